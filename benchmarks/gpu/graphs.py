"""A target whose forwards are captured CUDA graphs: plain steps and tree scoring without launch overhead.

Shape letters: B batch, R rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.static_step import StaticTarget
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.target import TargetOutput
from specmm.tree import DraftTree


class Graph:
    """``function`` of tensors, captured at its first call and replayed at the others of the same shapes.

    Without a GPU it just calls ``function``. Results are copies, for the next replay overwrites the originals.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.captured: Any = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The function's results for ``inputs``."""
        if not inputs[0].is_cuda:
            return self.function(*inputs)
        if self.captured is None:
            self._capture(inputs)
        for memory, value in zip(self.inputs, inputs, strict=True):
            memory.copy_(value)
        self.captured.replay()
        return tuple(x.clone() for x in self.outputs)

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = [x.clone() for x in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.captured):
            self.outputs = self.function(*self.inputs)


class GraphTarget(StaticTarget):
    """A class-conditional target with captured forwards; one batch size and one static tree an instance.

    The finiteness check, which waits for the GPU, is left out in scoring.
    """

    def __init__(self, plain: LlamaGenTarget) -> None:
        super().__init__(plain, Graph)
        self.shape: Any = None
        self.tree_graph = Graph(self._tree_forward)

    @torch.inference_mode()
    def score(self, tree: DraftTree) -> TargetOutput:
        """One captured tree-attention forward; raises ``ValueError`` when the shape is another than before."""
        if self.shape is None:
            self.shape = tree.shape
        if tree.shape is not self.shape:
            raise ValueError("tree must have the same static shape in every round to be captured, got another")
        self.cache.aim(self.cache.size.capacity, self.cache.slots)
        laws, hidden = self.tree_graph(tree.tokens)
        self.calls += 1
        return TargetOutput(laws, hidden)

    def _tree_forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Laws [B, N, V] and hidden states [R, N, C] of drafts ``tokens`` [B, N] behind the cache's lengths."""
        positions = (self.cache.lengths[:, None] + self.shape.depths).clamp(max=self.cache.size.capacity - 1)
        bias = self.cache.tree_bias(self.shape.ancestors)
        branches = self.guidance.branches
        x, positions = self.model.tok_embeddings(tokens).repeat(branches, 1, 1), positions.repeat(branches, 1)
        logits, hidden = self.model(x, positions, bias, self.cache.layers)
        return self.processor(self.guide(logits.float(), positions)), hidden
