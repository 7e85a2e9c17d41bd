"""The picture as it grows from scale to scale: sums of codes, tokens, and what the transformers are
given.

Shape letters: B batch, E code width, P latent side, p side of a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.image_ar.scales.quantizer import MultiScaleQuantizer
from specmm.image_ar.scales.sampling import Choice


class FeatureMap:
    """Tokens [B, p²] by scale, the sums f_hat [B, E, P, P] after them and the inputs [B, p², E] of
    later scales.

    It belongs to no model: whoever draws the next scale goes on from here.
    """

    def __init__(self, quantizer: MultiScaleQuantizer, batch: int) -> None:
        self.quantizer, self.batch, self.schedule = quantizer, batch, quantizer.schedule
        self.tokens: list[Tensor] = []
        self.sums: list[Tensor] = []
        self._inputs: list[Tensor] = []

    def add(self, choice: Choice) -> None:
        """Paint the next scale."""
        k = len(self.tokens)
        soft = choice.weights
        codes = self.quantizer.codes(choice.tokens) if soft is None else self._blend(soft)
        painted = self.quantizer.paint(codes, k)
        self.sums.append(self.sums[-1] + painted if k else painted)
        self.tokens.append(choice.tokens)
        if k + 1 < len(self.schedule):
            self._inputs.append(self.quantizer.reduce(self.sums[k], k + 1))

    def _blend(self, weights: Tensor) -> Tensor:
        """Soft codes [B, E, p, p] of weights [B, p², V]."""
        side = round(weights.shape[1] ** 0.5)
        mixed = weights @ self.quantizer.embedding.weight
        return mixed.transpose(1, 2).unflatten(2, (side, side))

    def inputs(self, first: int, last: int) -> Tensor | None:
        """The transformer's inputs [B, T, E] at scales ``first`` … ``last``; scale 0 has none but
        the class.
        """
        parts = self._inputs[max(first - 1, 0) : last]
        return torch.cat(parts, dim=1) if parts else None

    def crop(self, scales: int) -> None:
        """Keep the first ``scales`` scales."""
        del self.tokens[scales:], self.sums[scales:], self._inputs[scales:]
