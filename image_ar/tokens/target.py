"""LlamaGen as a target of the core.

Shape letters: B batch, G guidance branches ([cond; uncond] under guidance), R = G·B rows, N tree
nodes, P prefix positions, T tokens of a picture, C width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.cache import Cache, CacheSize
from specmm.image_ar.tokens.gpt import CaptionEmbedder, Transformer
from specmm.kernels.tree_attention import Mask
from specmm.processors import Processor, check_finite
from specmm.target import TargetOutput
from specmm.tree import DraftTree
from specmm.verify.rule import VerifyResult


@dataclass
class Prompt:
    """Conditions of a batch: class ids [B], or caption features [B, P, caption_dim] with their
    ``mask`` [B, P].
    """

    condition: Tensor
    mask: Tensor | None = None

    def rows(self, some: slice) -> Prompt:
        """``some`` of them."""
        return Prompt(self.condition[some], None if self.mask is None else self.mask[some])


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: ``scale`` ≥ 0 (1 is off); with ``interval`` n > -1 only tokens 0 …
    n + 1 are guided.
    """

    scale: float = 1.0
    interval: int = -1

    def __post_init__(self) -> None:
        if not self.scale >= 0:
            raise ValueError(f"cfg must be at least 0, got {self.scale}, use 1 for no guidance")

    @property
    def branches(self) -> int:
        """G: LlamaGen guides only above scale 1."""
        return 2 if self.scale > 1 else 1

    @property
    def settings(self) -> dict[str, float]:
        """The options that shape the distribution, for certificates."""
        last = {"cfg_interval": self.interval} if self.branches > 1 and self.interval > -1 else {}
        return {"cfg": self.scale} | last


class LlamaGenTarget:
    """A :class:`Transformer` with a cache; one instance serves one batch at a time."""

    def __init__(
        self, model: Transformer, guidance: Guidance, processor: Processor, name: str = "llamagen"
    ) -> None:
        self.model, self.guidance, self.processor, self.name = (
            model.eval(),
            guidance,
            processor,
            name,
        )
        processor.check_vocabulary(model.config.vocab_size)
        self.aux_layers: tuple[
            int, ...
        ] = ()  # layers whose inputs the drafter reads beside the last hidden state
        self.calls = 0
        self.cache: Cache

    def with_processor(self, processor: Processor) -> LlamaGenTarget:
        """The same model under another processor."""
        return LlamaGenTarget(self.model, self.guidance, processor, self.name)

    @property
    def length(self) -> int:
        """T, the tokens of a picture."""
        return self.model.config.block_size

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, which the cache shares."""
        return self.model.output.weight.dtype

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, scratch: int) -> TargetOutput:
        """Run the prefix of ``prompt``; see :class:`specmm.target.Target`."""
        config = self.model.config
        rows = self._branches(prompt)
        size = CacheSize(
            layers=config.n_layer,
            heads=config.n_head,
            head_dim=config.head_dim,
            batch=len(prompt.condition),
            branches=self.guidance.branches,
            capacity=config.cls_token_num + self.length,
            scratch=scratch,
        )
        self.cache = Cache(size, self.dtype, prompt.condition.device)
        self.calls = 0
        bias = self._hide_padding(prompt.mask, config.cls_token_num)
        x = self.model.cls_embedding(rows)
        self.cache.aim(0, config.cls_token_num)
        output = self._forward(x, torch.arange(x.shape[1], device=x.device)[None], bias)
        self.cache.lengths += config.cls_token_num
        return output

    @torch.inference_mode()
    def start_row(self, row: int, prompt: Prompt) -> TargetOutput:
        """Begin ``prompt``, of one picture, in ``row``; see
        :class:`specmm.target.BatchingTarget`.
        """
        alone = LlamaGenTarget(self.model, self.guidance, self.processor, self.name)
        alone.aux_layers = self.aux_layers
        output = alone.prefill(prompt, 0)
        self.cache.take(row, alone.cache)
        return output

    @torch.inference_mode()
    def score(self, tree: DraftTree) -> TargetOutput:
        """One tree-attention forward; see :class:`specmm.target.Target`."""
        return self._scored(tree)

    def _scored(self, tree: DraftTree) -> TargetOutput:
        self.cache.aim(self.cache.size.capacity, self.cache.slots)
        positions = self.cache.lengths[:, None] + tree.shape.depths
        return self._score(tree.tokens, positions, self.cache.tree_mask(tree.shape))

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step; the rows have the same length here, so that slices serve and, unpadded,
        no mask.
        """
        cache, done = self.cache, self.model.config.cls_token_num + self.calls - 1
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
        x = self.model.tok_embeddings(tokens)
        if self.guidance.branches == 2:
            x = x.repeat(2, 1, 1)
            positions = positions if len(positions) == 1 else positions.repeat(2, 1)
        return self._forward(x, positions, bias)

    def _forward(self, x: Tensor, positions: Tensor, bias: Mask) -> TargetOutput:
        logits, hidden = self.model(x, positions, bias, self.cache.layers, self.aux_layers)
        guided = self.guide(logits.float(), positions)
        self._count(guided)
        return TargetOutput(self.processor(guided), hidden)

    def _count(self, guided: Tensor) -> None:
        """Another forward gave these logits."""
        check_finite(guided, self.calls, self.name)
        self.calls += 1

    def guide(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, N, V] of both branches' [R, N, V] at ``positions`` [1 or R, N]."""
        if self.guidance.branches == 1:
            return logits
        cond, uncond = logits.chunk(2)
        if self.guidance.interval < 0:
            return torch.lerp(uncond, cond, self.guidance.scale)
        index = (
            positions[: len(cond)] - self.model.config.cls_token_num + 1
        )  # of the token these logits predict
        scale = torch.where(index <= self.guidance.interval + 1, self.guidance.scale, 1.0)
        return torch.lerp(uncond, cond, scale[..., None])

    def _branches(self, prompt: Prompt) -> Tensor:
        if self.guidance.branches == 1:
            return prompt.condition
        embedder = self.model.cls_embedding
        if self.model.config.model_type == "c2i":
            nothing = torch.full_like(prompt.condition, self.model.config.num_classes)
        else:
            assert isinstance(embedder, CaptionEmbedder)
            nothing = embedder.uncond_embedding.to(prompt.condition.dtype).expand_as(
                prompt.condition
            )
        return torch.cat([prompt.condition, nothing])

    def _hide_padding(self, mask: Tensor | None, prefix: int) -> Tensor | None:
        """Bias [R, 1, P, P] of the prefix forward; both branches share the caption's mask, the
        diagonal stays open.
        """
        if mask is None and prefix == 1:
            return None
        device = self.cache.lengths.device
        seen = torch.ones(prefix, prefix, dtype=torch.bool, device=device).tril()[None]
        if mask is not None:
            padded = (mask == 0).repeat(self.guidance.branches, 1)
            hidden = torch.zeros(
                len(padded), self.cache.size.capacity, dtype=torch.bool, device=device
            )
            hidden[:, :prefix] = padded
            self.cache.hidden_prefix = hidden
            seen = (seen & ~padded[:, None]) | torch.eye(prefix, dtype=torch.bool, device=device)
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=device).masked_fill_(
            ~seen, float("-inf")
        )
        return bias[:, None]
