"""CoDe, collaborative decoding: two VARs take turns on one feature map, without verification.

Source: arXiv 2411.17787. The *large* model draws the coarse scales: few tokens, which decide the
picture's content. The *small* model prefills these in one block-causal pass and draws the fine
scales: most of the tokens. The output has neither model's distribution, so the certificate is
``heuristic``, unless one model draws everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from specmm.core.randomness import PredrawnUniforms
from specmm.core.stats import Certificate, Clock
from specmm.core.watching import tell
from specmm.image_ar.scales.next_scale import Blocks, FeatureMap, Session
from specmm.image_ar.scales.sampling import InverseCDF, Sampling, ScaleSampler
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.vqvae import MultiScaleQuantizer

LARGE = "large"
SMALL = "small"


@dataclass(frozen=True)
class Turn:
    """The ``scales`` that one model draws."""

    name: str
    model: VAR
    scales: range
    blocks: Blocks | None = None  # see ``Session``


def split(scales: int, n: int) -> tuple[range, range]:
    """The scales of the large and of the small model: the large draws ``n`` of them.

    Raises ``ValueError`` unless 0 ≤ ``n`` ≤ ``scales``, a whole number.
    """
    if not isinstance(n, int) or not 0 <= n <= scales:
        raise ValueError(
            f"n must be a whole number from 0 (the second model alone) to {scales} (the first), "
            f"got {n!r}"
        )
    return range(n), range(n, scales)


def code_turns(large: VAR, small: VAR, n: int) -> list[Turn]:
    """CoDe: scales below ``n`` by the large model, the others by the small one; see ``split``."""
    coarse, fine = split(len(large.config.schedule), n)
    return [Turn(LARGE, large, coarse), Turn(SMALL, small, fine)]


def alternate(
    turns: Sequence[Turn],
    feature_map: FeatureMap,
    labels: Tensor,
    sampling: Sampling,
    sampler: Callable[[range], ScaleSampler],
    clock: Clock,
) -> Iterator[int]:
    """Draw the scales of ``turns`` onto ``feature_map``, yielding the number of each.

    ``sampler(scales)`` draws the tokens of a turn. A model's caches are freed before the next
    model's turn. The model that draws the last scale counts as the one that verifies.
    """
    for turn in turns:
        if not turn.scales:
            continue
        tell(turn)
        part = "draft" if turn.scales.stop < len(feature_map.schedule) else "verify"
        with clock(part):
            session = Session(turn.model, labels, sampling, turn.scales[-1], turn.blocks)
            drawer = sampler(turn.scales)
        for k in turn.scales:
            with clock(part):
                feature_map.add(drawer.draw(session.advance(feature_map, k), k))
            yield k
        del session


def draw_picture(
    turns: Sequence[Turn],
    quantizer: MultiScaleQuantizer,
    sampling: Sampling,
    labels: Tensor,
    numbers: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """All scales of ``labels`` [B] from uniforms ``numbers`` [B, L]: the tokens, f_hat and ``ends``
    of a ``FeatureMap``; the caller must check ``ends``.

    Scales have fixed sizes and nothing is decided on the host: it can be one graph of a GPU.
    """
    feature_map = FeatureMap(quantizer, len(labels), late=True)
    sampler = InverseCDF(sampling, PredrawnUniforms(numbers), len(feature_map.schedule))
    deque(alternate(turns, feature_map, labels, sampling, lambda _: sampler, Clock()), maxlen=0)
    return feature_map.tokens, feature_map.f_hat, feature_map.ends


def certificate(turns: Sequence[Turn], target: str) -> Certificate:
    """The claim of a run of ``turns`` about the distribution of the model named ``target``."""
    scales = {turn.name: len(turn.scales) for turn in turns if turn.scales}
    if set(scales) == {target}:
        return Certificate("exact", "plain decoding of the target", 0.0)
    shares = ", ".join(f"{count} by {name}" for name, count in scales.items())
    return Certificate("heuristic", f"nothing is verified: steps {shares}")
