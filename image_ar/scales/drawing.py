"""Pictures scale by scale: one VAR alone, or CoDe's two in turn on the same canvas.

Source of CoDe: arXiv 2411.17787. The *large* model draws the coarse scales, few tokens that settle the picture; the
*small* one catches up with them in one block-causal pass and draws the fine ones, most of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specmm.handoff import Turn, split
from specmm.image_ar.scales.canvas import Canvas
from specmm.image_ar.scales.sampling import Sampler, Sampling
from specmm.image_ar.scales.session import Session
from specmm.image_ar.scales.var import VAR

LARGE, SMALL = "large", "small"


class Painter:
    """A session that draws onto a canvas: the worker of ``specmm.handoff``."""

    def __init__(self, session: Session, canvas: Canvas, sampler: Sampler) -> None:
        self.session, self.canvas, self.sampler = session, canvas, sampler

    def step(self, k: int) -> None:
        """Draw scale ``k``."""
        self.canvas.add(self.sampler.draw(self.session.advance(self.canvas, k), k))


def turn(
    model: VAR,
    name: str,
    steps: range,
    canvas: Canvas,
    labels: Tensor,
    sampling: Sampling,
    sampler: Callable[[range], Sampler],
) -> Turn:
    """The turn of ``model`` over the scales ``steps``; ``sampler(steps)`` throws its dice."""

    def start(scales: range) -> Painter:
        return Painter(Session(model, labels, sampling, scales[-1]), canvas, sampler(scales))

    return Turn(name, "verify" if name == SMALL or len(steps) == len(canvas.ladder) else "draft", steps, start)


def code_turns(
    large: VAR,
    small: VAR,
    n: int,
    canvas: Canvas,
    labels: Tensor,
    sampling: Sampling,
    sampler: Callable[[range], Sampler],
) -> list[Turn]:
    """CoDe: scales below ``n`` by the large model, the others by the small one; ``ValueError`` for n out of range."""
    before, after = split(len(canvas.ladder), n)
    jobs = ((large, LARGE, before), (small, SMALL, after))
    return [turn(model, name, steps, canvas, labels, sampling, sampler) for model, name, steps in jobs]
