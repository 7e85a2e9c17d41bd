"""CoDe, collaborative decoding: two VARs take turns on one feature map, without verification.

Source: arXiv 2411.17787. The *large* model draws the coarse scales, few tokens that decide what the
picture shows; the *small* one prefills them in one block-causal pass and draws the fine ones, most
of the tokens. The output has neither model's distribution, so the certificate is ``heuristic``,
unless one model draws everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from specmm.certificate import Certificate
from specmm.image_ar.scales.next_scale import FeatureMap, Session
from specmm.image_ar.scales.sampling import Sampling, ScaleSampler
from specmm.image_ar.scales.var import VAR
from specmm.stats import Clock

LARGE = "large"
SMALL = "small"

Step = Callable[[int], None]


@dataclass(frozen=True)
class Turn:
    """The ``steps`` of one model; ``open(steps)`` returns what does one, timed as ``part``."""

    model: str
    part: str
    steps: range
    open: Callable[[range], Step]


def split(total: int, at: int) -> tuple[range, range]:
    """Steps of the first and the second of two models: the first does ``at`` of ``total``.

    Raises ``ValueError`` unless 0 ≤ ``at`` ≤ ``total``, a whole number.
    """
    if not isinstance(at, int) or not 0 <= at <= total:
        raise ValueError(
            f"n must be a whole number from 0 (the second model alone) to {total} (the first), "
            f"got {at!r}"
        )
    return range(at), range(at, total)


def alternate(turns: Sequence[Turn], clock: Clock) -> Iterator[int]:
    """Do the steps of ``turns`` one after the other, yielding the number of each.

    A model's caches are freed before the next model's turn is opened.
    """
    for turn in turns:
        if not turn.steps:
            continue
        with clock(turn.part):
            step = turn.open(turn.steps)
        for k in turn.steps:
            with clock(turn.part):
                step(k)
            yield k
        del step


def certificate(turns: Sequence[Turn], target: str) -> Certificate:
    """What a run may claim about the distribution of the model called ``target``."""
    steps = {turn.model: len(turn.steps) for turn in turns if turn.steps}
    if set(steps) == {target}:
        return Certificate("exact", "plain decoding of the target", 0.0)
    shares = ", ".join(f"{count} by {model}" for model, count in steps.items())
    return Certificate("heuristic", f"nothing is verified: steps {shares}")


def turn(
    model: VAR,
    name: str,
    steps: range,
    feature_map: FeatureMap,
    labels: Tensor,
    sampling: Sampling,
    sampler: Callable[[range], ScaleSampler],
) -> Turn:
    """The turn of ``model`` over the scales ``steps``, whose tokens ``sampler(steps)`` draws."""

    def start(scales: range) -> Step:
        session = Session(model, labels, sampling, scales[-1])
        drawer = sampler(scales)

        def step(k: int) -> None:
            feature_map.add(drawer.draw(session.advance(feature_map, k), k))

        return step

    alone = len(steps) == len(feature_map.schedule)
    return Turn(name, "verify" if name == SMALL or alone else "draft", steps, start)


def code_turns(
    large: VAR,
    small: VAR,
    n: int,
    feature_map: FeatureMap,
    labels: Tensor,
    sampling: Sampling,
    sampler: Callable[[range], ScaleSampler],
) -> list[Turn]:
    """CoDe: scales below ``n`` by the large model, the others by the small one.

    Raises ``ValueError`` for ``n`` out of range.
    """
    coarse, fine = split(len(feature_map.schedule), n)
    shared = feature_map, labels, sampling, sampler
    return [turn(large, LARGE, coarse, *shared), turn(small, SMALL, fine, *shared)]
