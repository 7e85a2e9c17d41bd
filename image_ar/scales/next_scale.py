"""Next-scale prediction: the accumulated feature map f_hat, and one VAR that predicts its scales.

Shape letters: B batch, R = B rows, or 2B under guidance ([cond; null]), T tokens of the scales run,
S cached tokens, H heads, D head width, E code width, P latent side, p side of a scale, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from specmm.core.processors import check_finite, extremes
from specmm.image_ar.scales.sampling import Sampling, ScaleTokens
from specmm.image_ar.scales.scale_schedule import scale_bias
from specmm.image_ar.scales.var import VAR, ScaleCache
from specmm.image_ar.scales.vqvae import MultiScaleQuantizer

# rows times positions up to which a program is ahead of single operators (pocket/var, two cores)
FEW = 320
Blocks: TypeAlias = Callable[..., Tensor]  # as VAR.run


class FeatureMap:
    """The picture so far: ``tokens`` [B, L] of ``drawn`` scales, and ``f_hat`` [B, E, P, P].

    f_hat is the sum of the scales' codes in VAR's algorithm 2. It does not depend on the model, so
    any model with the same tokenizer can predict the next scale. ``ends`` [K, 2] are the least and
    largest logit of each scale; if ``late``, the caller checks them after the last scale.
    """

    state: ClassVar[tuple[str, ...]] = ("tokens", "f_hat", "ends", "_inputs")

    def __init__(self, quantizer: MultiScaleQuantizer, batch: int, late: bool = False) -> None:
        self.quantizer = quantizer
        self.batch = batch
        self.schedule = quantizer.schedule
        self.late = late
        self.drawn = 0
        codes = quantizer.embedding.weight.detach()
        width, side, length = codes.shape[1], self.schedule.sides[-1], self.schedule.length
        self.tokens = codes.new_zeros(batch, length, dtype=torch.int64)
        # in the memory layout of the summands: grids are rows of codes
        self.f_hat = codes.new_zeros(batch, side, side, width).permute(0, 3, 1, 2)
        self.ends = codes.new_zeros(len(self.schedule), 2)
        self._inputs = codes.new_zeros(batch, length - self.schedule.tokens(0), width)

    @property
    def scales(self) -> list[Tensor]:
        """The tokens [B, p²] of each scale drawn so far."""
        return list(self.schedule.split(self.tokens[:, : self.schedule.starts[self.drawn]]))

    def add(self, drawn: ScaleTokens) -> None:
        """Add the next scale to f_hat."""
        k, starts = self.drawn, self.schedule.starts
        if drawn.weights is None:
            codes = self.quantizer.codes(drawn.tokens)
        else:
            codes = self.quantizer.soft_codes(drawn.weights)
        self.f_hat += self.quantizer.contribution(codes, k)
        self.tokens[:, starts[k] : starts[k + 1]] = drawn.tokens
        self.drawn = k + 1
        if k + 1 < len(self.schedule):
            self._at(k + 1, k + 1).copy_(self.quantizer.downsample(self.f_hat, k + 1))

    def check(self, model: VAR, k: int) -> None:
        """Raise ``ValueError`` for logits of scale ``k`` by ``model`` that are not finite."""
        check_finite(self.ends[k], f"VAR of depth {model.config.depth} in scale {k}")

    def inputs(self, first: int, last: int) -> Tensor | None:
        """Inputs [B, T, E] of scales ``first`` … ``last``; None if that is scale 0 alone."""
        return self._at(max(first, 1), last) if last else None

    def _at(self, first: int, last: int) -> Tensor:
        starts = self.schedule.starts
        return self._inputs[:, starts[first] - starts[1] : starts[last + 1] - starts[1]]


class Session:
    """``model`` predicting pictures of ``labels`` [B] up to scale ``last``.

    The session holds all state (the class condition, computed once, and the KV cache) and the model
    none, so an interrupted run leaves no trace. ``blocks`` may be a faster equivalent of
    :meth:`VAR.run` for scales of few rows.
    """

    state: ClassVar[tuple[str, ...]] = ("caches",)

    def __init__(
        self,
        model: VAR,
        labels: Tensor,
        sampling: Sampling,
        last: int,
        blocks: Blocks | None = None,
    ) -> None:
        self.model = model
        self.sampling = sampling
        self.last = last
        self.blocks = blocks or VAR.run
        self.schedule = model.config.schedule
        self.batch = len(labels)
        self.guided = sampling.cfg > 0
        null = torch.full_like(labels, model.config.num_classes)
        self.given = model.condition(torch.cat([labels, null]) if self.guided else labels)
        self.positions = model.positions()
        self.filled = 0  # scales whose keys and values are cached
        self.caches: list[ScaleCache] = []

    def advance(self, feature_map: FeatureMap, k: int) -> Tensor:
        """Guided logits [B, T, V] of scale ``k``.

        All scales since the last call are run at once, each seeing itself and the coarser ones; the
        last layer computes no more than keys and values of those before ``k``. Raises
        ``ValueError`` for logits that are not finite.
        """
        starts = self.schedule.starts
        x = self._embed(feature_map, k)
        bias = None
        if self.filled < k:
            levels = self.model.lvl_1L[:, : starts[k + 1]]
            bias = scale_bias(levels[:, starts[self.filled] :], levels).to(x.dtype)
        stores = self._stores(k)
        few = x.shape[0] * x.shape[1] <= FEW and stores[0] is not None
        run = self.blocks if few else VAR.run
        x = run(self.model, x, self.given, bias, stores, self.schedule.tokens(k))
        self.filled = k + 1
        logits = self._guided(x, k)
        feature_map.ends[k] = extremes(logits)
        if not feature_map.late:
            feature_map.check(self.model, k)
        return logits

    def _embed(self, feature_map: FeatureMap, k: int) -> Tensor:
        """Embeddings [R, T, C] of the scales not yet cached, up to ``k``."""
        starts = self.schedule.starts
        parts = []
        if self.filled == 0:
            parts.append(self.model.start(self.given.embedding, self.positions))
        inputs = feature_map.inputs(self.filled, k)
        if inputs is not None:
            places = slice(starts[max(self.filled, 1)], starts[k + 1])
            x = self.model.word_embed(inputs.to(self.positions.dtype)) + self.positions[:, places]
            parts.append(x.repeat(2, 1, 1) if self.guided else x)
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _stores(self, k: int) -> Sequence[ScaleCache | None]:
        """The layers' caches for scale ``k``; None if no earlier or later scale needs them."""
        first = self.schedule.starts[self.filled]
        config = self.model.config
        if k >= self.last and not first:
            return [None] * config.depth
        if not self.caches:
            rows = len(self.given.embedding)
            width = config.embed_dim // config.num_heads
            slots = self.schedule.starts[self.last]
            like = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
            shape = (rows, slots, config.num_heads, width)
            stores = [like.new_empty(shape) for _ in range(2 * config.depth)]
            self.caches = list(map(ScaleCache, stores[::2], stores[1::2]))
        for cache in self.caches:
            cache.filled = first
            cache.keep = k < self.last
        return self.caches

    def _guided(self, x: Tensor, k: int) -> Tensor:
        """Logits of the states ``x`` [R, T, C] of scale ``k``.

        The head is linear, so guidance mixes its inputs: half the products, and no second
        distribution over V tokens. The null half is left out if the weight is 0.
        """
        weight = self.sampling.weight(k, len(self.schedule))
        if not weight:
            scale, shift = self.given.head
            head = (scale[: self.batch], shift[: self.batch])
            return self.model.logits(self.model.normed(x[: self.batch], head))
        cond, null = self.model.normed(x, self.given.head).chunk(2)
        return self.model.logits(torch.lerp(null, cond, 1 + weight))


@torch.inference_mode()
def log_likelihood(
    model: VAR, quantizer: MultiScaleQuantizer, labels: Tensor, tokens: Tensor, sampling: Sampling
) -> Tensor:
    """Mean log-probability (nats) a token [B] of ``tokens`` [B, L] of classes ``labels`` [B].

    Guidance and temperature are taken from ``sampling`` (temperature 1 if it is greedy); top-k and
    top-p are not applied, since the small model may draw a token that they would exclude. Raises
    ``ValueError`` for another number of tokens than the model's.
    """
    length = model.config.schedule.length
    if tokens.ndim != 2 or tokens.shape[1] != length:
        raise ValueError(f"tokens must be [pictures, {length}], got {list(tokens.shape)}")
    feature_map = FeatureMap(quantizer, len(labels))
    session = Session(model, labels, sampling, len(feature_map.schedule) - 1)
    scores = []
    for k, part in enumerate(feature_map.schedule.split(tokens)):
        logits = session.advance(feature_map, k).float() / (sampling.temperature_at(k) or 1.0)
        scores.append(logits.log_softmax(-1).gather(-1, part[..., None])[..., 0])  # [B, T]
        feature_map.add(ScaleTokens(part))
    return torch.cat(scores, dim=1).mean(1)
