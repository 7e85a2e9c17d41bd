"""LlamaGen without some of its layers, for it to draft by itself; both branches of guidance draft.

Shape letters: B batch, R rows (all guidance branches), n nodes, S slots, C width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from specmm.cache import Cache
from specmm.image_ar.tokens.target import Known, LlamaGenTarget
from specmm.layered import Skip


class LayeredLlamaGen:
    """``target`` as one that runs without some of its layers; see
    :class:`specmm.layered.Layered`.
    """

    resumes = True

    def __init__(self, target: LlamaGenTarget) -> None:
        self.target = target

    @property
    def layers(self) -> int:
        return self.target.model.config.n_layer

    @property
    def cache(self) -> Cache:
        return self.target.cache

    def begin(self) -> None:
        self.target.known = None

    def logits(
        self, skip: Skip, tokens: Tensor, positions: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        positions = self.target.branched(positions)
        model = self.target.model
        x = self.target.inputs(tokens)
        logits, read = model(x, positions, bias, self.cache.layers, skip[:1], skip)
        return self.target.guide(logits.float(), positions), read[..., x.shape[-1] :]

    def states(self, stop: int, tokens: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        positions = self.target.branched(positions)
        x = self.target.inputs(tokens)
        return self.target.model.states(x, positions, bias, self.cache.layers[:stop])

    def resume(self, first: int, states: Tensor | None) -> None:
        self.target.known = None if states is None else Known(first, states)
