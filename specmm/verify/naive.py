"""The acceptance rules for one row in plain Python: references for the vectorised rules.

Every rule takes ``tokens`` [N], ``parents`` [N] (-1 for the root), the target's distributions ``p``
[N][V], and the drafts' distributions ``probs`` [N][V], or None for point masses. It returns the
chance of each node, the next token's distribution at each node and, for bottom-up rules, the order
of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

Ints: TypeAlias = Sequence[int]
Dist: TypeAlias = list[float]  # V floats
Dists: TypeAlias = Sequence[Dist]
Result: TypeAlias = tuple[list[float], list[Dist], list[int] | None]


def _children(parents: Ints, node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def _normalised(residual: Dist, fallback: Dist) -> Dist:
    total = math.fsum(residual)
    return [x / total for x in residual] if total > 0 else fallback


def _minus(p: Dist, q: Dist) -> Dist:
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def _point(token: int, size: int) -> Dist:
    return [float(x == token) for x in range(size)]


def _ratio(p: float, q: float) -> float:
    return min(1.0, p / q) if q > 0 else float(p > 0)


StepRule: TypeAlias = Callable[[Dist, int, Dist | None, int], tuple[float, Dist]]
"""(target, token, its distribution, its rank) -> (chance, target once it is rejected)."""


def _top_down(tokens: Ints, parents: Ints, p: Dists, probs: Dists | None, step: StepRule) -> Result:
    """Chances and next distributions of a top-down rule, one ``step`` a sibling."""
    accept = [1.0] * len(tokens)
    next_probs = [list(dist) for dist in p]
    for node in range(len(tokens)):
        for rank, child in enumerate(_children(parents, node)):
            dist = None if probs is None else probs[child]
            accept[child], next_probs[node] = step(next_probs[node], tokens[child], dist, rank)
    return accept, next_probs, None


def strict_step(p: Dist, token: int, probs: Dist | None, rank: int) -> tuple[float, Dist]:
    """One draft by rejection sampling."""
    probs = _point(token, len(p)) if probs is None else probs
    return _ratio(p[token], probs[token]), _normalised(_minus(p, probs), p)


def greedy_match(tokens: Ints, parents: Ints, p: Dists, probs: Dists | None = None) -> Result:
    """Accept the argmax."""
    best = [dist.index(max(dist)) for dist in p]
    accept = [float(n == 0 or tokens[n] == best[parents[n]]) for n in range(len(tokens))]
    return accept, [_point(b, len(p[0])) for b in best], None


def recursive(tokens: Ints, parents: Ints, p: Dists, probs: Dists | None = None) -> Result:
    """Siblings in turn."""
    return _top_down(tokens, parents, p, probs, strict_step)


def greedy_multi_draft(tokens: Ints, parents: Ints, p: Dists, probs: Dists) -> Result:
    """The sample of rank 0 by its distribution, other siblings as point masses."""

    def step(target: Dist, token: int, dist: Dist | None, rank: int) -> tuple[float, Dist]:
        return strict_step(target, token, dist if rank == 0 else None, rank)

    return _top_down(tokens, parents, p, probs, step)


def block(tokens: Ints, parents: Ints, p: Dists, probs: Dists | None = None) -> Result:
    """A chain, as the paper writes it."""
    last = len(tokens) - 1
    size = len(p[0])
    reach = 1.0
    accept = [1.0] * len(tokens)
    next_probs = [list(dist) for dist in p]
    for node in range(last + 1):
        if node:
            dist = _point(tokens[node], size) if probs is None else probs[node]
            reach = _ratio(reach * p[node - 1][tokens[node]], dist[tokens[node]])
        accept[node] = reach
        if node < last:
            after = _point(tokens[node + 1], size) if probs is None else probs[node + 1]
            residual = _minus([reach * x for x in p[node]], after)
            total = math.fsum(residual)
            accept[node] = total / (total + 1 - reach) if reach < 1 else 1.0
            next_probs[node] = _normalised(residual, p[node])
    return accept, next_probs, list(range(last, 0, -1))


def traversal(tokens: Ints, parents: Ints, p: Dists, probs: Dists | None = None) -> Result:
    """Depth first: a node is tested after its children, and its rejection changes its parent."""
    accept = [1.0] * len(tokens)
    next_probs = [list(dist) for dist in p]
    order: list[int] = []

    def visit(node: int) -> None:
        for child in _children(parents, node):
            dist = _point(tokens[child], len(p[0])) if probs is None else probs[child]
            accept[child] = _ratio(
                accept[node] * next_probs[node][tokens[child]], dist[tokens[child]]
            )
            visit(child)
            order.append(child)
            residual = _minus([accept[node] * x for x in next_probs[node]], dist)
            total = math.fsum(residual)
            next_probs[node] = _normalised(residual, next_probs[node])
            accept[node] = total / (total + 1 - accept[node]) if accept[node] < 1 else 1.0

    visit(0)
    return accept, next_probs, order


def borrowed(
    p: Dist, token: int, table: Sequence[Ints], k: int, bound: float, factor: bool
) -> float | None:
    """LANTERN's S_x, or None if no neighbour qualifies."""
    limit = (bound - 1) * p[token] if factor else bound
    total = 0.0
    best = None
    for near in table[token][:k]:
        total += p[near]
        if total <= limit:
            best = total
    return best


def lantern(
    tokens: Ints,
    parents: Ints,
    p: Dists,
    probs: Dists | None,
    table: Sequence[Ints],
    k: int,
    bound: float,
    factor: bool,
    residual: str,
) -> Result:
    """LANTERN (``bound`` = delta) or, with ``factor``, LANTERN++ (``bound`` = lambda)."""

    def relaxed(target: Dist, token: int) -> float:
        return target[token] + (borrowed(target, token, table, k, bound, factor) or 0.0)

    def step(target: Dist, token: int, dist: Dist | None, rank: int) -> tuple[float, Dist]:
        drawn = _point(token, len(target)) if dist is None else dist
        chance = _ratio(relaxed(target, token), drawn[token])
        if residual == "corrected":
            kept = _point(token, len(target))
            if dist is not None:
                kept = [min(q, relaxed(target, x)) for x, q in enumerate(dist)]
            return chance, _normalised(_minus(target, kept), target)
        borrows = borrowed(target, token, table, k, bound, factor) is not None
        gone = set(table[token][: k + 1]) if borrows else set()
        if dist is None or residual == "lumina":
            target = [0.0 if x in gone else m for x, m in enumerate(target)]
        else:
            drawn = [0.0 if x in gone else m for x, m in enumerate(drawn)]
        if dist is None:
            target[token] = 0.0
        rest = target if dist is None else _minus(target, drawn)
        return chance, _normalised(rest, [1 / len(target)] * len(target))

    return _top_down(tokens, parents, p, probs, step)


def typical(
    tokens: Ints, parents: Ints, p: Dists, probs: Dists | None, epsilon: float, delta: float
) -> Result:
    """Medusa's threshold."""

    def step(target: Dist, token: int, dist: Dist | None, rank: int) -> tuple[float, Dist]:
        entropy = -math.fsum(x * math.log(x) for x in target if x > 0)
        return float(target[token] > min(epsilon, delta * math.exp(-entropy))), target

    return _top_down(tokens, parents, p, probs, step)


def group(
    p: Dist, token: int, span: int, gap: float, near: Sequence[int] | None = None
) -> list[int]:
    """GSD's group of ``token``: tokens of similar probability, itself included, if ``near`` it."""
    order = sorted(range(len(p)), key=lambda x: (-p[x], x))
    rank = order.index(token)
    alike = [x for x in order[max(rank - span, 0) : rank + span + 1] if abs(p[x] - p[token]) < gap]
    return sorted({token, *(x for x in alike if near is None or x in near)})


def grouped(
    tokens: Ints,
    parents: Ints,
    p: Dists,
    probs: Dists | None,
    span: int,
    gap: float,
    table: Sequence[Ints] | None = None,
    k: int = 0,
) -> Result:
    """GSD: a draft is kept with its group's ratio."""

    def step(target: Dist, token: int, dist: Dist | None, rank: int) -> tuple[float, Dist]:
        drawn = _point(token, len(target)) if dist is None else dist
        members = group(target, token, span, gap, table[token][:k] if table and k else None)
        kept = _ratio(math.fsum(target[x] for x in members), math.fsum(drawn[x] for x in members))
        return kept, strict_step(target, token, dist, rank)[1]

    return _top_down(tokens, parents, p, probs, step)
