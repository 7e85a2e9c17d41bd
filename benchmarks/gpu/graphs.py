"""Targets whose forwards are captured CUDA graphs: plain steps and tree scoring.

Trees of one size share a graph, whatever their shape, for words and depths are inputs of it. The
finiteness check, which waits for the GPU, is left out. Shape letters: B batch, R rows, N tree
nodes, W words, C width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from specmm.core.cache import Cache, CacheSize
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.models.target import VLMTarget
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt, StaticTarget
from specmm.kernels.tree_attention import TreeMask
from specmm.programs.graphs import Graphs


class TreeGraphs:
    """``function`` of (tokens [B, N], depths [B, N], words [B, N, W], …), one graph for each N."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.graphs = Graphs(function)

    def __call__(self, tree: DraftTree, *others: Tensor) -> tuple[Tensor, ...]:
        """The function's results for ``tree`` and ``others``."""
        batch = len(tree.tokens)
        words = tree.shape.ancestor_words.expand(batch, -1, -1).contiguous()
        return self.graphs(tree.tokens, tree.shape.depths.expand(batch, -1), words, *others)


def mask_of(cache: Cache, words: Tensor) -> TreeMask:
    """The mask of a tree of ``words`` [B, N, W] in the cache's scratch region."""
    return TreeMask(words, cache.lengths, cache.size.capacity, cache.hidden_prefix)


class GraphTarget(StaticTarget):
    """LlamaGen, class-conditional, with captured forwards; one batch size an instance.

    A plain step is a tree of one node, as :class:`VLMGraphTarget`'s: it has what a round has, the
    processor within the graph and no check, so that neither is handicapped.
    """

    def __init__(self, plain: LlamaGenTarget) -> None:
        super().__init__(plain)
        self.graphs = TreeGraphs(self._tree_forward)
        self.alone = TreeShape.chain(0, self.device)

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, scratch: int) -> TargetOutput:
        """As the parent's, with room for a plain step's node; another memory forgets the graphs."""
        before = vars(self).get("cache")
        output = super().prefill(prompt, max(scratch, 1))
        if self.cache is not before:
            self.graphs = TreeGraphs(self._tree_forward)
        return output

    @torch.inference_mode()
    def score(self, tree: DraftTree) -> TargetOutput:
        """One captured tree-attention forward."""
        self.cache.aim(self.cache.size.capacity, self.cache.size.capacity + tree.shape.size)
        return TargetOutput(*self.graphs(tree))

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step."""
        return one_node(self, tokens)

    def _tree_forward(self, tokens: Tensor, depths: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Probs [B, N, V] and hidden states [R, N, C] of drafts [B, N] after the committed."""
        positions = (self.cache.lengths[:, None] + depths).clamp(max=self.cache.size.capacity - 1)
        branches = self.guidance.branches
        x = self.model.tok_embeddings(tokens).repeat(branches, 1, 1)
        positions = positions.repeat(branches, 1)
        logits, hidden = self.model(
            x, positions, mask_of(self.cache, words), self.cache.layers, self.aux_layers
        )
        return self.processor(self.guide(logits.float(), positions)), hidden


def one_node(target: GraphTarget | VLMGraphTarget, tokens: Tensor) -> TargetOutput:
    """The forward of ``tokens`` [B], scored as a tree of one node and kept."""
    output = target.score(DraftTree(tokens[:, None], target.alone))
    target.cache.keep(torch.zeros_like(tokens)[:, None], torch.ones_like(tokens))
    return output


class VLMGraphTarget(VLMTarget):
    """A transformers model loaded with ``specmm_tree``, with captured forwards, for one batch size.

    A plain step is a tree of one node, scored by the graph of that size and kept, as any tree is.
    """

    def __init__(self, plain: VLMTarget) -> None:
        super().__init__(plain.model, plain.processor, plain.name)
        if not self.family.takes_trees or self.processor.stateful:
            raise ValueError(
                f"{self.name} must be loaded with attn_implementation='specmm_tree', have no "
                "sliding layers and no repetition penalty to be captured"
            )
        self.memory: Cache | None = None
        self.graphs = TreeGraphs(self._tree_forward)
        self.alone = TreeShape.chain(0, self.device)

    @torch.inference_mode()
    def score(self, tree: DraftTree) -> TargetOutput:
        """One captured tree-attention forward."""
        self.cache.aim(self.cache.size.capacity, self.cache.size.capacity + tree.shape.size)
        self.tree = tree
        return TargetOutput(*self.graphs(tree, self.offsets))

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step."""
        return one_node(self, tokens)

    def _tree_forward(
        self, tokens: Tensor, depths: Tensor, words: Tensor, offsets: Tensor
    ) -> tuple[Tensor, ...]:
        """Probs [B, N, V] of drafts [B, N] after the committed tokens, and what drafters read of
        them [B, N, C or F·C].
        """
        given = self.offsets  # of the graph's own memory
        self.offsets = offsets
        states = self.states(
            tokens, self.cache.lengths[:, None] + depths, mask_of(self.cache, words)
        )
        self.offsets = given
        probs = self.processor.probs(self.head(states).float(), self.history, None)
        return probs, self._drafters_states(states)

    def _new_cache(self, size: CacheSize) -> Cache:
        """The memory of the first call, which graphs go on using; a larger one forgets them."""
        size = dataclasses.replace(size, scratch=max(size.scratch, 1))
        if self.memory is None or self.memory.size != size:
            self.memory = super()._new_cache(size)
            self.graphs = TreeGraphs(self._tree_forward)
        self.memory.lengths.zero_()
        return self.memory
