"""Next-scale prediction: the accumulated feature map f_hat, and one VAR that predicts its scales.

Shape letters: B batch, R = B rows, or 2B under guidance ([cond; null]), T tokens of the scales run,
S cached tokens, H heads, D head width, E code width, P latent side, p side of a scale, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.image_ar.scales.sampling import Sampling, ScaleTokens
from specmm.image_ar.scales.scale_schedule import scale_bias
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.vqvae import MultiScaleQuantizer
from specmm.processors import check_finite, extremes


class FeatureMap:
    """What is drawn so far: ``tokens`` [B, p²] and ``f_hats`` [B, E, P, P] by scale.

    f_hat is the sum of the scales' codes in VAR's algorithm 2. It belongs to no model, so that any
    model of the same tokenizer can predict the next scale. ``ends`` are the least and largest
    logits [2] of each prediction, which whoever draws checks in the end if that is to be ``late``.
    """

    def __init__(self, quantizer: MultiScaleQuantizer, batch: int, late: bool = False) -> None:
        self.quantizer = quantizer
        self.batch = batch
        self.schedule = quantizer.schedule
        self.tokens: list[Tensor] = []
        self.f_hats: list[Tensor] = []
        self.late = late
        self.ends: list[Tensor] = []
        self._inputs: list[Tensor] = []

    def add(self, drawn: ScaleTokens) -> None:
        """Add the next scale to f_hat."""
        k = len(self.tokens)
        if drawn.weights is None:
            codes = self.quantizer.codes(drawn.tokens)
        else:
            codes = self.quantizer.soft_codes(drawn.weights)
        added = self.quantizer.contribution(codes, k)
        self.f_hats.append(self.f_hats[-1] + added if k else added)
        self.tokens.append(drawn.tokens)
        if k + 1 < len(self.schedule):
            self._inputs.append(self.quantizer.downsample(self.f_hats[k], k + 1))

    def inputs(self, first: int, last: int) -> Tensor | None:
        """Inputs [B, T, E] of scales ``first`` … ``last``; None if that is scale 0 alone."""
        parts = self._inputs[max(first - 1, 0) : last]
        return torch.cat(parts, dim=1) if parts else None


@dataclass
class ScaleCache:
    """One layer's keys and values [R, S, H, D], of which the first ``filled`` are attended.

    Without ``keep`` new keys and values are attended once and not written: those of the last scale.
    """

    keys: Tensor
    values: Tensor
    filled: int = 0
    keep: bool = True

    def before(self) -> tuple[Tensor, Tensor]:
        """The keys and values written so far."""
        return self.keys[:, : self.filled], self.values[:, : self.filled]

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.keep:
            keys, values = self.before()
            return torch.cat([keys, k], 1), torch.cat([values, v], 1)
        stop = self.filled + k.shape[1]
        self.keys[:, self.filled : stop] = k
        self.values[:, self.filled : stop] = v
        return self.keys[:, :stop], self.values[:, :stop]


class Session:
    """``model`` predicting pictures of ``labels`` [B] up to scale ``last``.

    Holds all state (the class condition, computed once, and the KV cache), the model none: an
    interrupted run leaves nothing.
    """

    def __init__(self, model: VAR, labels: Tensor, sampling: Sampling, last: int) -> None:
        self.model = model
        self.sampling = sampling
        self.last = last
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
        x = self.model.run(x, self.given, bias, self._stores(k), self.schedule.tokens(k))
        self.filled = k + 1
        logits = self._guided(x, k)
        feature_map.ends.append(extremes(logits))
        if not feature_map.late:
            depth = self.model.config.depth
            check_finite(feature_map.ends[-1], f"VAR of depth {depth} in scale {k}")
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
        """Where the layers write: nowhere if nothing comes before or after."""
        first = self.schedule.starts[self.filled]
        config = self.model.config
        if k >= self.last and not first:
            return [None] * config.depth
        if not self.caches:
            rows = len(self.given.embedding)
            width = config.embed_dim // config.num_heads
            slots = self.schedule.starts[self.last]
            shape = (config.depth, 2, rows, slots, config.num_heads, width)
            data = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
            self.caches = [ScaleCache(keys, values) for keys, values in data]
        for cache in self.caches:
            cache.filled = first
            cache.keep = k < self.last
        return self.caches

    def _guided(self, x: Tensor, k: int) -> Tensor:
        """Logits of the states ``x`` [R, T, C] of scale ``k``.

        The head is linear, so guidance mixes what it reads: half the products, and no two
        distributions over V tokens. The null half is left out where the weight is 0.
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

    Guidance and temperature are those of ``sampling`` (temperature 1 where it is greedy); top-k and
    top-p are not applied, since the small model may draw a token that they would exclude. Raises
    ``ValueError`` for another number of tokens than the model's.
    """
    wanted = model.config.schedule.length
    if tokens.ndim != 2 or tokens.shape[1] != wanted:
        raise ValueError(f"tokens must be [pictures, {wanted}], got {list(tokens.shape)}")
    feature_map = FeatureMap(quantizer, len(labels))
    session = Session(model, labels, sampling, len(feature_map.schedule) - 1)
    found = []
    for k, part in enumerate(feature_map.schedule.split(tokens)):
        logits = session.advance(feature_map, k).float() / (sampling.temperature_at(k) or 1.0)
        found.append(logits.log_softmax(-1).gather(-1, part[..., None])[..., 0])  # [B, T]
        feature_map.add(ScaleTokens(part))
    return torch.cat(found, dim=1).mean(1)
