"""The acceptance rules once more, for one row, in plain Python: what the vectorised ones are tested
against.

A distribution is a list of V floats. Every rule takes ``tokens`` [N], ``parents`` [N] (-1 for the
root), the target's distributions ``p`` [N][V] and the distributions the drafts were drawn from
(``probs`` [N][V], or None for point masses), and returns the chance of each node, the distribution
of the next token at each node and, for bottom-up rules, the order of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeAlias

ToProbs: TypeAlias = list[float]
ProbsProcessor: TypeAlias = Sequence[ToProbs]
Result: TypeAlias = tuple[list[float], list[ToProbs], list[int] | None]


def _children(parents: Sequence[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def _normalised(rest: ToProbs, fallback: ToProbs) -> ToProbs:
    total = math.fsum(rest)
    return [x / total for x in rest] if total > 0 else fallback


def _minus(p: ToProbs, q: ToProbs) -> ToProbs:
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def _point(token: int, size: int) -> ToProbs:
    return [float(x == token) for x in range(size)]


def _ratio(p: float, q: float) -> float:
    return min(1.0, p / q) if q > 0 else float(p > 0)


StepRule: TypeAlias = Callable[[ToProbs, int, ToProbs | None, int], tuple[float, ToProbs]]
"""(target, token, its distribution, its rank) -> (chance, target once it is rejected)."""


def _top_down(
    tokens: Sequence[int],
    parents: Sequence[int],
    p: ProbsProcessor,
    probs: ProbsProcessor | None,
    step: StepRule,
) -> Result:
    accept, next_probs = [1.0] * len(tokens), [list(dist) for dist in p]
    for node in range(len(tokens)):
        for rank, child in enumerate(_children(parents, node)):
            dist = None if probs is None else probs[child]
            accept[child], next_probs[node] = step(next_probs[node], tokens[child], dist, rank)
    return accept, next_probs, None


def strict_step(p: ToProbs, token: int, probs: ToProbs | None, rank: int) -> tuple[float, ToProbs]:
    """One draft by rejection sampling."""
    probs = _point(token, len(p)) if probs is None else probs
    return _ratio(p[token], probs[token]), _normalised(_minus(p, probs), p)


def greedy_match(
    tokens: Sequence[int],
    parents: Sequence[int],
    p: ProbsProcessor,
    probs: ProbsProcessor | None = None,
) -> Result:
    """Accept the argmax."""
    best = [dist.index(max(dist)) for dist in p]
    accept = [float(n == 0 or tokens[n] == best[parents[n]]) for n in range(len(tokens))]
    return accept, [_point(b, len(p[0])) for b in best], None


def recursive(
    tokens: Sequence[int],
    parents: Sequence[int],
    p: ProbsProcessor,
    probs: ProbsProcessor | None = None,
) -> Result:
    """Siblings in turn."""
    return _top_down(tokens, parents, p, probs, strict_step)


def greedy_multi_draft(
    tokens: Sequence[int], parents: Sequence[int], p: ProbsProcessor, probs: ProbsProcessor
) -> Result:
    """The sample of rank 0 by its distribution, the others as point masses."""

    def step(target: ToProbs, token: int, dist: ToProbs | None, rank: int) -> tuple[float, ToProbs]:
        return strict_step(target, token, dist if rank == 0 else None, rank)

    return _top_down(tokens, parents, p, probs, step)


def rho_star(p: ToProbs, q: ToProbs, drafts: int) -> float:
    """K-SEQ's rho by bisection, from above."""
    low, high = 1.0, float(drafts)
    for _ in range(100):
        rho = (low + high) / 2
        beta = math.fsum(min(a / rho, b) for a, b in zip(p, q, strict=True))
        low, high = (low, rho) if rho * beta >= 1 - (1 - beta) ** drafts else (rho, high)
    return high


def k_seq(
    tokens: Sequence[int], parents: Sequence[int], p: ProbsProcessor, probs: ProbsProcessor
) -> Result:
    """Independent siblings, all tested against the same target."""
    accept, next_probs = [1.0] * len(tokens), [list(dist) for dist in p]
    for node in range(len(tokens)):
        if not (siblings := _children(parents, node)):
            continue
        target, dist = p[node], probs[siblings[0]]
        rho = rho_star(target, dist, len(siblings))
        kept = [min(a / rho, b) for a, b in zip(target, dist, strict=True)]
        beta = math.fsum(kept)
        scale = (1 - (1 - beta) ** len(siblings)) / beta if beta > 0 else 0.0
        next_probs[node] = _normalised(_minus(target, [scale * x for x in kept]), target)
        for child in siblings:
            accept[child] = _ratio(target[tokens[child]], rho * dist[tokens[child]])
    return accept, next_probs, None


def block(
    tokens: Sequence[int],
    parents: Sequence[int],
    p: ProbsProcessor,
    probs: ProbsProcessor | None = None,
) -> Result:
    """A chain, as the paper writes it."""
    last, size, reach = len(tokens) - 1, len(p[0]), 1.0
    accept, next_probs = [1.0] * len(tokens), [list(dist) for dist in p]
    for node in range(last + 1):
        if node:
            dist = _point(tokens[node], size) if probs is None else probs[node]
            reach = _ratio(reach * p[node - 1][tokens[node]], dist[tokens[node]])
        accept[node] = reach
        if node < last:
            after = _point(tokens[node + 1], size) if probs is None else probs[node + 1]
            rest = _minus([reach * x for x in p[node]], after)
            total = math.fsum(rest)
            accept[node] = total / (total + 1 - reach) if reach < 1 else 1.0
            next_probs[node] = _normalised(rest, p[node])
    return accept, next_probs, list(range(last, 0, -1))


def traversal(
    tokens: Sequence[int],
    parents: Sequence[int],
    p: ProbsProcessor,
    probs: ProbsProcessor | None = None,
) -> Result:
    """Depth first: a node is tested once its children are gone, and its rejection changes its
    parent.
    """
    accept, next_probs, order = [1.0] * len(tokens), [list(dist) for dist in p], list[int]()

    def visit(node: int) -> None:
        for child in _children(parents, node):
            dist = _point(tokens[child], len(p[0])) if probs is None else probs[child]
            accept[child] = _ratio(
                accept[node] * next_probs[node][tokens[child]], dist[tokens[child]]
            )
            visit(child)
            order.append(child)
            rest = _minus([accept[node] * x for x in next_probs[node]], dist)
            total = math.fsum(rest)
            next_probs[node] = _normalised(rest, next_probs[node])
            accept[node] = total / (total + 1 - accept[node]) if accept[node] < 1 else 1.0

    visit(0)
    return accept, next_probs, order


def borrowed(
    p: ToProbs, token: int, table: Sequence[Sequence[int]], k: int, bound: float, factor: bool
) -> float | None:
    """LANTERN's S_x, or None if no neighbour qualifies."""
    limit, total, best = (bound - 1) * p[token] if factor else bound, 0.0, None
    for near in table[token][:k]:
        total += p[near]
        if total <= limit:
            best = total
    return best


def lantern(
    tokens: Sequence[int],
    parents: Sequence[int],
    p: ProbsProcessor,
    probs: ProbsProcessor | None,
    table: Sequence[Sequence[int]],
    k: int,
    bound: float,
    factor: bool,
    residual: str,
) -> Result:
    """LANTERN (``bound`` = delta) or, with ``factor``, LANTERN++ (``bound`` = lambda)."""

    def relaxed(target: ToProbs, token: int) -> float:
        return target[token] + (borrowed(target, token, table, k, bound, factor) or 0.0)

    def step(target: ToProbs, token: int, dist: ToProbs | None, rank: int) -> tuple[float, ToProbs]:
        drawn = _point(token, len(target)) if dist is None else dist
        chance = _ratio(relaxed(target, token), drawn[token])
        if residual == "corrected":
            kept = _point(token, len(target))
            if dist is not None:
                kept = [min(q, relaxed(target, x)) for x, q in enumerate(dist)]
            return chance, _normalised(_minus(target, kept), target)
        found = borrowed(target, token, table, k, bound, factor) is not None
        gone = set(table[token][: k + 1]) if found else set()
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
    tokens: Sequence[int],
    parents: Sequence[int],
    p: ProbsProcessor,
    probs: ProbsProcessor | None,
    epsilon: float,
    delta: float,
) -> Result:
    """Medusa's threshold."""

    def step(target: ToProbs, token: int, dist: ToProbs | None, rank: int) -> tuple[float, ToProbs]:
        entropy = -math.fsum(x * math.log(x) for x in target if x > 0)
        return float(target[token] > min(epsilon, delta * math.exp(-entropy))), target

    return _top_down(tokens, parents, p, probs, step)


def ot_bound(p: ToProbs, q: ToProbs, drafts: int) -> float:
    """1 + min over every set H of p(H) - q(H)^k."""
    tokens = range(len(p))
    sets = (chosen for count in range(len(p) + 1) for chosen in combinations(tokens, count))
    return 1 + min(math.fsum(p[x] for x in h) - math.fsum(q[x] for x in h) ** drafts for h in sets)
