"""Fused acceptance, one row in plain Python: the naive rules' chances, then the uniforms.

Shape letters: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from specmm.verify.naive import Result


def accept(
    result: Result, parents: Sequence[int], uniforms: Sequence[float]
) -> tuple[list[int], int]:
    """Accepted nodes, root first, and the next token, from a ``result`` of ``specmm.verify.naive``.

    ``uniforms`` [N + 1]: one uniform for each node, the last for the next token.
    """
    chances, following, order = result
    hit = [u < chance for u, chance in zip(uniforms, chances, strict=False)]
    if order is None:
        path = _down(parents, hit)
    else:
        path = _up(parents, next(filter(hit.__getitem__, order), 0))
    probs = following[path[-1]]
    reached = list(accumulate(probs))
    threshold = uniforms[-1] * reached[-1]
    token = next(t for t, mass in enumerate(probs) if mass > 0 and reached[t] > threshold)
    return path, token


def _down(parents: Sequence[int], hit: Sequence[bool]) -> list[int]:
    """The path from the root that always takes the first child that is ``hit``."""
    path = [0]
    for node in range(1, len(parents)):  # siblings by rank, and every node after its parent
        if parents[node] == path[-1] and hit[node]:
            path.append(node)
    return path


def _up(parents: Sequence[int], last: int) -> list[int]:
    """The path from the root to ``last``."""
    return [*_up(parents, parents[last]), last] if last > 0 else [0]
