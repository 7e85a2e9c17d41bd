"""LlamaGen as a target of the core, with dynamic shapes or, for compilers and CUDA graphs, static
ones.

Shape letters: B batch, G guidance branches ([cond; uncond] under guidance), R = G·B rows, N tree
nodes, P prefix positions, T tokens of a picture, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from specmm.core.cache import Cache, CacheSize, StaticMemory, alike, branched
from specmm.core.guidance import Guidance as Guidance
from specmm.core.processors import Processor, extremes
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.image_ar.tokens.gpt import Transformer
from specmm.kernels.tree_attention import Mask
from specmm.programs.compiled import NotCompiled, compiled
from specmm.verify.rule import VerifyResult


@dataclass
class Prompt:
    """Conditions: class ids [B], or caption features [B, P, caption_dim] with ``mask`` [B, P]."""

    condition: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.condition)

    def __getitem__(self, some: slice) -> Prompt:
        return Prompt(self.condition[some], None if self.mask is None else self.mask[some])


class LlamaGenTarget:
    """A :class:`Transformer` with a cache; one instance serves one batch at a time.

    ``aux_layers`` are the layers whose inputs the drafter reads beside the last hidden state.
    """

    state: ClassVar[tuple[str, ...]] = ("cache",)
    static_shapes: ClassVar[bool] = False
    prompted: ClassVar[bool] = False
    allowed: ClassVar[None] = None  # every token may come everywhere

    def __init__(
        self, model: Transformer, guidance: Guidance, processor: Processor, name: str = "llamagen"
    ) -> None:
        processor.check_vocabulary(model.config.vocab_size)
        self.model = model.eval()
        self.guidance = guidance
        self.processor = processor
        self.name = name
        self.aux_layers: tuple[int, ...] = ()
        self.steps = 0  # plain ones
        self.cache: Cache

    def with_processor(self, processor: Processor) -> LlamaGenTarget:
        """A target of the same model with another processor."""
        return LlamaGenTarget(self.model, self.guidance, processor, self.name)

    @property
    def length(self) -> int:
        """T, the tokens of a picture."""
        return self.model.config.block_size

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.model.config.vocab_size

    @property
    def codes(self) -> int:
        """All tokens."""
        return self.vocabulary

    @property
    def undrawable(self) -> None:
        """None: every token is allowed everywhere."""
        return None

    @property
    def columns(self) -> int:
        """Tokens a row of the picture."""
        return self.model.config.grid

    @property
    def line(self) -> int:
        """Tokens a row with its end token: as ``columns``, since no token ends a row."""
        return self.columns

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.output.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, which the cache shares."""
        return self.model.output.weight.dtype

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, scratch: int) -> TargetOutput:
        """Run the prefix of ``prompt``; see :class:`specmm.core.target.Target`."""
        config = self.model.config
        rows = prompt.condition
        size = CacheSize(
            layers=alike(config.n_layer, config.n_head, config.head_dim),
            batch=len(rows),
            branches=self.guidance.branches,
            capacity=config.cls_token_num + self.length,
            scratch=scratch,
        )
        self.cache = self._new_cache(size, rows.device)
        self.steps = 0  # plain ones
        if self.guidance.branches == 2:
            rows = torch.cat([rows, self.model.cls_embedding.unconditional(rows)])
        bias = self._hide_padding(prompt.mask, config.cls_token_num)
        x = self.model.cls_embedding(rows)
        self.cache.aim(0, config.cls_token_num)
        output = self._forward(x, torch.arange(x.shape[1], device=x.device)[None], bias)
        self.cache.lengths += config.cls_token_num
        return output

    def _new_cache(self, size: CacheSize, device: torch.device) -> Cache:
        cache = Cache(size, self.dtype, device)
        cache.near = device.type == "cpu"
        return cache

    @torch.inference_mode()
    def start_row(self, row: int, prompt: Prompt) -> TargetOutput:
        """Begin ``prompt``, of one picture, in ``row``; as ``BatchingTarget.start_row``."""
        row_target = LlamaGenTarget(self.model, self.guidance, self.processor, self.name)
        row_target.aux_layers = self.aux_layers
        output = row_target.prefill(prompt, 0)
        self.cache.take(row, row_target.cache)
        return output

    @torch.inference_mode()
    def score(self, tree: DraftTree) -> TargetOutput:
        """One tree-attention forward; see :class:`specmm.core.target.Target`."""
        return self._scored(tree)

    def _scored(self, tree: DraftTree) -> TargetOutput:
        self.cache.aim_at_tree(tree.shape.size)
        positions = self.cache.lengths[:, None] + tree.shape.depths
        return self._score(tree.tokens, positions, self.cache.tree_mask(tree.shape))

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step. Rows have equal lengths: slices serve, with a mask for padding only."""
        cache = self.cache
        done = self.model.config.cls_token_num + self.steps
        self.steps += 1
        cache.aim(done, done + 1)
        bias = None
        if cache.hidden_prefix is not None:
            bias = cache.prefix_bias()[:, None, None, : done + 1].clone()
            bias[..., done] = 0
        positions = torch.full((1, 1), done, device=tokens.device)
        output = self._score(tokens[:, None], positions, bias)
        cache.lengths += 1
        return output

    def commit(self, result: VerifyResult) -> None:
        """Keep the accepted nodes."""
        self.cache.keep(result.path, result.kept)

    def _score(self, tokens: Tensor, positions: Tensor, bias: Mask) -> TargetOutput:
        branches = self.guidance.branches
        if len(positions) > 1:
            positions = branched(positions, branches)
        return self._forward(branched(self.embed(tokens), branches), positions, bias)

    def read_layers(self, layers: Sequence[int]) -> None:
        self.aux_layers = tuple(layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., C] of ``tokens`` [...]."""
        return self.model.tok_embeddings(tokens)

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., V] of ``states`` [..., C] after the final norm."""
        return self.model.output(states)

    def drawn_logits(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """Guided logits [B, P, V] from ``logits`` [R, P, V] of all branches; ``drawn`` [B, 1 or P]
        are the tokens' indices in their pictures, from 0.
        """
        return self.guide(logits, drawn + self.model.config.cls_token_num - 1)

    def any_prompt(self, batch: int) -> Prompt:
        """Prompts for ``batch`` pictures: classes in turn, or captions of nothing."""
        config = self.model.config
        if config.model_type == "c2i":
            return Prompt(torch.arange(batch, device=self.device) % config.num_classes)
        shape = (batch, config.cls_token_num, config.caption_dim)
        return Prompt(torch.zeros(shape, dtype=self.dtype, device=self.device))

    def _forward(self, x: Tensor, positions: Tensor, bias: Mask) -> TargetOutput:
        logits, hidden = self.model(x, positions, bias, self.cache.layers, self.aux_layers)
        guided = self.guide(logits.float(), positions)
        ends = extremes(guided)
        return TargetOutput(self.processor(guided), hidden, ends)

    def guide(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Guided logits [B, N, V] from both branches' [R, N, V] at ``positions`` [1 or R, N]."""
        return self.guidance.mix(logits, positions, self.model.config.cls_token_num)

    def _hide_padding(self, mask: Tensor | None, prefix: int) -> Tensor | None:
        """Bias [R, 1, P, P] of the prefix forward.

        Both branches share the caption's ``mask``; every position sees itself.
        """
        if mask is None and prefix == 1:
            return None
        device = self.cache.lengths.device
        keep = torch.ones(prefix, prefix, dtype=torch.bool, device=device).tril()[None]
        if mask is not None:
            padded = (mask == 0).repeat(self.guidance.branches, 1)
            shape = (len(padded), self.cache.size.capacity)
            hidden = torch.zeros(shape, dtype=torch.bool, device=device)
            hidden[:, :prefix] = padded
            self.cache.hidden_prefix = hidden
            keep = (keep & ~padded[:, None]) | torch.eye(prefix, dtype=torch.bool, device=device)
        bias = torch.zeros(keep.shape, dtype=self.dtype, device=device)
        return bias.masked_fill_(~keep, float("-inf"))[:, None]


class StaticTarget(LlamaGenTarget):
    """A class-conditional target whose plain step has the same shapes, and the same memory, at
    every call.

    A step attends all slots of the cache under a mask and writes by index; the uncompiled step
    slices the cache instead.
    """

    static_shapes: ClassVar[bool] = True

    def __init__(self, plain: LlamaGenTarget) -> None:
        if plain.model.config.model_type != "c2i":
            raise NotCompiled(
                "steps and rounds of static shapes serve class-conditional models only"
            )
        super().__init__(plain.model, plain.guidance, plain.processor, plain.name)
        self.run = partial(compiled(StaticTarget.logits_of, self.device), self)

    def _new_cache(self, size: CacheSize, device: torch.device) -> Cache:
        """The first call's cache, if it fits: all steps use its memory."""
        kept = vars(self).get("cache")
        cache = Cache.again(kept, size, self.dtype, device)
        if cache is not kept:
            self.place = torch.zeros(1, dtype=torch.int64, device=device)
            self.numbers = torch.arange(cache.slots, device=device)
            self.memories = [StaticMemory(x.keys, x.values, self.place) for x in cache.layers]
        return cache

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step of static shapes."""
        self.place.fill_(self.model.config.cls_token_num + self.steps)
        guided, hidden = self.run(tokens)
        self.steps += 1
        self.cache.lengths += 1
        return TargetOutput(self.processor(guided), hidden, extremes(guided))

    def score(self, tree: DraftTree) -> TargetOutput:
        """One tree-attention forward; entering inference mode would break a compiled program."""
        return self._scored(tree)

    def logits_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Guided logits [B, 1, V] and hidden states [R, 1, C] after ``tokens`` [B] at ``place``."""
        x = self.model.tok_embeddings(tokens[:, None]).repeat(self.guidance.branches, 1, 1)
        later = self.numbers > self.place
        bias = torch.zeros_like(later, dtype=x.dtype).masked_fill(later, float("-inf"))
        logits, hidden = self.model(x, self.place[None], bias[None, None, None], self.memories)
        return self.guide(logits.float(), self.place[None]), hidden

    def with_processor(self, processor: Processor) -> StaticTarget:
        """The same model under another processor, with its own memory and programs."""
        return type(self)(super().with_processor(processor))


@torch.inference_mode()
def log_likelihood(target: LlamaGenTarget, prompt: Prompt, tokens: Tensor) -> Tensor:
    """Mean log-probability a token [B] (nats) of ``tokens`` [B, T] under ``target``.

    It shows what a relaxed rule costs. Guidance and temperature are the target's (1 where it is
    greedy); top-k and top-p are not applied, since a relaxed rule may keep a token that they
    exclude. The picture is scored as one chain in one forward.
    """
    processor = Processor(target.processor.temperature or 1.0)
    judge = LlamaGenTarget(target.model, target.guidance, processor, target.name)
    first = judge.prefill(prompt, tokens.shape[1]).probs[:, -1:]  # [B, 1, V]
    chain = TreeShape.chain(tokens.shape[1] - 1, tokens.device)
    # the distribution after token i is that of token i + 1
    later = judge.score(DraftTree(tokens, chain)).probs[:, :-1]
    chosen = torch.cat([first, later], dim=1).gather(-1, tokens[..., None]).squeeze(-1)
    return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log().mean(1)
