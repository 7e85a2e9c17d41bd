"""Pictures scale by scale: one VAR alone, or CoDe's two in turn on the same feature map.

Source of CoDe: arXiv 2411.17787. The *large* model draws the coarse scales, few tokens that settle
the picture; the
*small* one catches up with them in one block-causal pass and draws the fine ones, most of the
tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specmm.collaborative import Turn, split
from specmm.image_ar.scales.feature_map import FeatureMap
from specmm.image_ar.scales.sampling import Sampler, Sampling
from specmm.image_ar.scales.session import Session
from specmm.image_ar.scales.var import VAR

LARGE, SMALL = "large", "small"


class ScaleDrawing:
    """A session that draws onto a feature map: the worker of ``specmm.alternate``."""

    def __init__(self, session: Session, feature_map: FeatureMap, sampler: Sampler) -> None:
        self.session, self.feature_map, self.sampler = session, feature_map, sampler

    def step(self, k: int) -> None:
        """Draw scale ``k``."""
        self.feature_map.add(self.sampler.draw(self.session.advance(self.feature_map, k), k))


def turn(
    model: VAR,
    name: str,
    steps: range,
    feature_map: FeatureMap,
    labels: Tensor,
    sampling: Sampling,
    sampler: Callable[[range], Sampler],
) -> Turn:
    """The turn of ``model`` over the scales ``steps``; ``sampler(steps)`` throws its uniforms."""

    def start(scales: range) -> ScaleDrawing:
        return ScaleDrawing(
            Session(model, labels, sampling, scales[-1]), feature_map, sampler(scales)
        )

    return Turn(
        name,
        "verify" if name == SMALL or len(steps) == len(feature_map.schedule) else "draft",
        steps,
        start,
    )


def code_turns(
    large: VAR,
    small: VAR,
    n: int,
    feature_map: FeatureMap,
    labels: Tensor,
    sampling: Sampling,
    sampler: Callable[[range], Sampler],
) -> list[Turn]:
    """CoDe: scales below ``n`` by the large model, the others by the small one; ``ValueError`` for
    n out of range.
    """
    before, after = split(len(feature_map.schedule), n)
    jobs = ((large, LARGE, before), (small, SMALL, after))
    return [
        turn(model, name, steps, feature_map, labels, sampling, sampler)
        for model, name, steps in jobs
    ]
