"""A target whose layers can be left out: what drafting with a part of the target needs.

Shape letters: B batch, G guidance branches, R = G·B rows, n nodes, N tree nodes, S slots, C width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from specmm.cache import Cache

Skip: TypeAlias = tuple[int, ...]
"""The layers that are left out, in order."""


class Layered(Protocol):
    """A target that can run without some of its layers.

    Keys and values of a pass go where the cache aims. ``tokens`` are [B, n], ``positions`` [B, n]
    count the tokens of the text, ``bias`` [R, 1, n, S] is an additive mask.
    """

    @property
    def layers(self) -> int:
        """How many layers it has."""

    @property
    def resumes(self) -> bool:
        """Whether it can go on from the states between two layers."""

    @property
    def cache(self) -> Cache:
        """That of the batch."""

    def begin(self) -> None:
        """The target has begun a batch, or a row of it."""

    def logits(
        self, skip: Skip, tokens: Tensor, positions: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Guided logits [B, n, V] without the layers ``skip``, and the states [R, n, C] that the
        first of these would read.
        """

    def states(self, stop: int, tokens: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """The states [R, n, C] after the first ``stop`` layers."""

    def resume(self, first: int, states: Tensor | None) -> None:
        """Score the next tree from its ``states`` [R, N, C] on, which layer ``first`` reads; with
        None as ever.
        """


def skipped(layers: int, exit: int = 0, skip: Sequence[int] = ()) -> Skip:
    """The layers left out of ``layers``: all from ``exit`` on, or those of ``skip``, or else the
    second half.

    Raises ``ValueError`` for both at once, layers that there are not, if none would be left, and
    for models of one layer.
    """
    if layers < 2:
        raise ValueError("method 'self' needs a model of two layers or more, got one of 1")
    if exit and skip:
        raise ValueError(f"give exit or skip, not both, got exit {exit} and skip {tuple(skip)}")
    if exit and not 0 < exit < layers:
        raise ValueError(
            f"exit must be in [1, {layers - 1}], for the model has {layers} layers, got {exit}"
        )
    found = tuple(sorted(set(skip))) or tuple(range(exit or layers // 2, layers))
    strange = [layer for layer in found if not 0 <= layer < layers]
    if strange:
        raise ValueError(
            f"skip must be layers from 0 to {layers - 1}, got {', '.join(map(str, strange))}"
        )
    if len(found) == layers:
        raise ValueError(f"skip must leave at least one of the {layers} layers, got all of them")
    return found
