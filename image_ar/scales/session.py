"""One VAR at work on one batch: conditions computed once, keys and values preallocated.

All state is here and none in the model, so an interrupted run leaves nothing after. Shape letters:
B batch, R = B rows, or 2B under guidance ([cond; null]), T tokens of the scales run, S cached
tokens, H heads, D head width, V vocabulary, K scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmm.cache import Memory
from specmm.image_ar.scales.feature_map import FeatureMap
from specmm.image_ar.scales.sampling import Sampling
from specmm.image_ar.scales.scale_schedule import scale_bias
from specmm.image_ar.scales.var import VAR, Conditioned, Store
from specmm.processors import check_finite


class Unkept:
    """A store for the last scale run: its keys and values are attended once and not written."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values  # [R, S, H, D]

    def before(self) -> tuple[Tensor, Tensor]:
        """What was stored."""
        return self.keys, self.values

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """After what is stored, ``k`` and ``v`` [R, T, H, D]."""
        return torch.cat([self.keys, k], 1), torch.cat([self.values, v], 1)


class Session:
    """``model`` drawing pictures of ``labels`` [B] up to scale ``last``."""

    def __init__(self, model: VAR, labels: Tensor, sampling: Sampling, last: int) -> None:
        self.model, self.sampling, self.last = model, sampling, last
        self.schedule, self.batch = model.config.schedule, len(labels)
        self.guided = sampling.cfg > 0
        nothing = torch.full_like(labels, model.config.num_classes)
        self.given = model.condition(torch.cat([labels, nothing]) if self.guided else labels)
        self.places = model.places()
        self.filled = 0  # scales whose keys and values are stored
        self.memories: list[Memory] = []

    def advance(self, feature_map: FeatureMap, k: int, first: int | None = None) -> Tensor:
        """Guided logits [B, T, V] of scales ``first`` … ``k`` (of ``k`` alone without ``first``).

        All scales since the last call are run at once, each seeing itself and the coarser ones;
        nothing of the others than keys and values is computed in the last layer. Raises
        ``ValueError`` for logits that are not finite.
        """
        first, starts = k if first is None else first, self.schedule.starts
        x = self._embed(feature_map, k)
        levels, bias = self.model.lvl_1L[:, : starts[k + 1]], None
        if self.filled < k:
            bias = scale_bias(levels[:, starts[self.filled] :], levels).to(x.dtype)
        x = self.model.run(x, self.given, bias, self._stores(k), starts[k + 1] - starts[first])
        self.filled = k + 1
        logits = self._guided(x, first, k)
        check_finite(logits, k, f"VAR of depth {self.model.config.depth}", "scale")
        return logits

    def crop(self, scales: int) -> None:
        """Forget what was stored of scale ``scales`` and the finer ones."""
        self.filled = min(self.filled, scales)

    def _embed(self, feature_map: FeatureMap, k: int) -> Tensor:
        """Embeddings [R, T, C] of the scales not yet stored, up to ``k``."""
        starts, parts = self.schedule.starts, []
        if self.filled == 0:
            parts.append(self.model.begin(self.given.cond, self.places))
        inputs = feature_map.inputs(self.filled, k)
        if inputs is not None:
            first = starts[max(self.filled, 1)]
            x = (
                self.model.word_embed(inputs.to(self.places.dtype))
                + self.places[:, first : starts[k + 1]]
            )
            parts.append(x.repeat(2, 1, 1) if self.guided else x)
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _stores(self, k: int) -> Sequence[Store | None]:
        """Where the layers write: nowhere if nothing comes before or after."""
        first, stop = self.schedule.starts[self.filled], self.schedule.starts[k + 1]
        if k >= self.last and not first:
            return [None] * self.model.config.depth
        if not self.memories:
            self.memories = self._allocate(self.schedule.starts[self.last])
        for memory in self.memories:
            memory.first, memory.stop = first, stop
        return [Unkept(*m.before()) for m in self.memories] if k >= self.last else self.memories

    def _allocate(self, capacity: int) -> list[Memory]:
        config, rows = self.model.config, len(self.given.cond)
        shape = (
            config.depth,
            2,
            rows,
            capacity,
            config.num_heads,
            config.embed_dim // config.num_heads,
        )
        data = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        return [Memory(keys, values) for keys, values in data]

    def _guided(self, x: Tensor, first: int, k: int) -> Tensor:
        """Logits of the hidden states ``x`` [R, T, C] of scales ``first`` … ``k``; the null half
        waits for weight.

        The head is linear, so guidance mixes what it reads: half the products, and none of two
        distributions over V tokens.
        """
        weights = [self.sampling.weight(i, len(self.schedule)) for i in range(first, k + 1)]
        if not any(weights):
            return self.model.logits(x[: self.batch], _rows(self.given, self.batch))
        cond, null = self.model.normed(x, self.given.head).chunk(2)
        if len(weights) == 1:
            return self.model.scores(torch.lerp(null, cond, 1 + weights[0]))
        counts = [self.schedule.tokens(i) for i in range(first, k + 1)]
        spread = [w for w, n in zip(weights, counts, strict=True) for _ in range(n)]
        return self.model.scores(
            torch.lerp(null, cond, 1 + torch.tensor(spread, device=x.device)[:, None])
        )


def _rows(given: Conditioned, count: int) -> tuple[Tensor, Tensor]:
    """The head's factors of the first ``count`` rows."""
    scale, shift = given.head
    return scale[:count], shift[:count]
