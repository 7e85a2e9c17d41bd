"""A VAR's whole picture, alone or under CoDe, as one graph of a GPU: scales have fixed sizes, and
nothing is decided on the way.

Shape letters: B pictures, L tokens of all scales, E code width, P side of the codes.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from specmm.graphs import Graph
from specmm.image_ar.scales.collaborative import alternate, code_turns
from specmm.image_ar.scales.next_scale import FeatureMap
from specmm.image_ar.scales.sampling import InverseCDF, Sampling
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.vqvae import MultiScaleQuantizer
from specmm.randomness import PredrawnUniforms
from specmm.stats import Clock


class PictureGraph:
    """Pictures of ``large``, of which ``small`` draws all scales but the first ``n``, as long as
    their weights lie where they do.
    """

    def __init__(
        self, large: VAR, small: VAR, quantize: MultiScaleQuantizer, n: int, sampling: Sampling
    ) -> None:
        self.models = large, small
        self.quantize = quantize
        self.n = n
        self.sampling = sampling
        self.graph = Graph(self._checked)

    @torch.inference_mode()
    def __call__(self, labels: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, L] and sums of codes [B, E, P, P] of ``labels`` [B], with uniforms [B, L].

        Raises ``ValueError`` for logits that are not finite.
        """
        tokens, sums, checks = self.graph(labels, numbers)
        if not bool(checks.isfinite().all()):
            self.eager(labels, numbers)  # which says where
        return tokens, sums

    @torch.inference_mode()
    def eager(self, labels: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The same without a graph."""
        feature_map = self._drawn(labels, numbers, late=False)
        return torch.cat(feature_map.tokens, dim=1), feature_map.f_hats[-1]

    @torch.inference_mode()
    def _drawn(self, labels: Tensor, numbers: Tensor, late: bool) -> FeatureMap:
        feature_map = FeatureMap(self.quantize, len(labels), late)
        uniforms = InverseCDF(self.sampling, PredrawnUniforms(numbers), len(feature_map.schedule))
        given = code_turns(*self.models, self.n), feature_map, labels, self.sampling
        deque(alternate(*given, lambda _: uniforms, Clock()), maxlen=0)
        return feature_map

    def _checked(self, labels: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self._drawn(labels, numbers, late=True)
        return torch.cat(found.tokens, dim=1), found.f_hats[-1], torch.stack(found.ends)
