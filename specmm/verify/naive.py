"""The acceptance rules once more, for one row, in plain Python: what the vectorised ones are tested against.

A law is a list of V floats. Every rule takes ``tokens`` [N], ``parents`` [N] (-1 for the root), the target's laws
``p`` [N][V] and the laws the drafts were drawn from (``laws`` [N][V], or None for point masses), and returns the
chance of each node, the law of the next token at each node and, for bottom-up rules, the order of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeAlias

Law: TypeAlias = list[float]
Laws: TypeAlias = Sequence[Law]
Result: TypeAlias = tuple[list[float], list[Law], list[int] | None]


def _children(parents: Sequence[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def _normalised(rest: Law, fallback: Law) -> Law:
    total = math.fsum(rest)
    return [x / total for x in rest] if total > 0 else fallback


def _minus(p: Law, q: Law) -> Law:
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def _point(token: int, size: int) -> Law:
    return [float(x == token) for x in range(size)]


def _ratio(p: float, q: float) -> float:
    return min(1.0, p / q) if q > 0 else float(p > 0)


StepRule: TypeAlias = Callable[[Law, int, Law | None, int], tuple[float, Law]]
"""(target, token, its law, its rank) -> (chance, target once it is rejected)."""


def _top_down(tokens: Sequence[int], parents: Sequence[int], p: Laws, laws: Laws | None, step: StepRule) -> Result:
    accept, next_law = [1.0] * len(tokens), [list(law) for law in p]
    for node in range(len(tokens)):
        for rank, child in enumerate(_children(parents, node)):
            law = None if laws is None else laws[child]
            accept[child], next_law[node] = step(next_law[node], tokens[child], law, rank)
    return accept, next_law, None


def strict_step(p: Law, token: int, law: Law | None, rank: int) -> tuple[float, Law]:
    """One draft by rejection sampling."""
    law = _point(token, len(p)) if law is None else law
    return _ratio(p[token], law[token]), _normalised(_minus(p, law), p)


def greedy_match(tokens: Sequence[int], parents: Sequence[int], p: Laws, laws: Laws | None = None) -> Result:
    """Accept the argmax."""
    best = [law.index(max(law)) for law in p]
    accept = [float(n == 0 or tokens[n] == best[parents[n]]) for n in range(len(tokens))]
    return accept, [_point(b, len(p[0])) for b in best], None


def recursive(tokens: Sequence[int], parents: Sequence[int], p: Laws, laws: Laws | None = None) -> Result:
    """Siblings in turn."""
    return _top_down(tokens, parents, p, laws, strict_step)


def greedy_multi_draft(tokens: Sequence[int], parents: Sequence[int], p: Laws, laws: Laws) -> Result:
    """The sample of rank 0 by its law, the others as point masses."""

    def step(target: Law, token: int, law: Law | None, rank: int) -> tuple[float, Law]:
        return strict_step(target, token, law if rank == 0 else None, rank)

    return _top_down(tokens, parents, p, laws, step)


def rho_star(p: Law, q: Law, drafts: int) -> float:
    """K-SEQ's rho by bisection, from above."""
    low, high = 1.0, float(drafts)
    for _ in range(100):
        rho = (low + high) / 2
        beta = math.fsum(min(a / rho, b) for a, b in zip(p, q, strict=True))
        low, high = (low, rho) if rho * beta >= 1 - (1 - beta) ** drafts else (rho, high)
    return high


def k_seq(tokens: Sequence[int], parents: Sequence[int], p: Laws, laws: Laws) -> Result:
    """Independent siblings, all tested against the same target."""
    accept, next_law = [1.0] * len(tokens), [list(law) for law in p]
    for node in range(len(tokens)):
        if not (siblings := _children(parents, node)):
            continue
        target, law = p[node], laws[siblings[0]]
        rho = rho_star(target, law, len(siblings))
        kept = [min(a / rho, b) for a, b in zip(target, law, strict=True)]
        beta = math.fsum(kept)
        scale = (1 - (1 - beta) ** len(siblings)) / beta if beta > 0 else 0.0
        next_law[node] = _normalised(_minus(target, [scale * x for x in kept]), target)
        for child in siblings:
            accept[child] = _ratio(target[tokens[child]], rho * law[tokens[child]])
    return accept, next_law, None


def block(tokens: Sequence[int], parents: Sequence[int], p: Laws, laws: Laws | None = None) -> Result:
    """A chain, as the paper writes it."""
    last, size, reach = len(tokens) - 1, len(p[0]), 1.0
    accept, next_law = [1.0] * len(tokens), [list(law) for law in p]
    for node in range(last + 1):
        if node:
            law = _point(tokens[node], size) if laws is None else laws[node]
            reach = _ratio(reach * p[node - 1][tokens[node]], law[tokens[node]])
        accept[node] = reach
        if node < last:
            after = _point(tokens[node + 1], size) if laws is None else laws[node + 1]
            rest = _minus([reach * x for x in p[node]], after)
            total = math.fsum(rest)
            accept[node] = total / (total + 1 - reach) if reach < 1 else 1.0
            next_law[node] = _normalised(rest, p[node])
    return accept, next_law, list(range(last, 0, -1))


def traversal(tokens: Sequence[int], parents: Sequence[int], p: Laws, laws: Laws | None = None) -> Result:
    """Depth first: a node is tested once its children are gone, and its rejection changes its parent."""
    accept, next_law, order = [1.0] * len(tokens), [list(law) for law in p], list[int]()

    def visit(node: int) -> None:
        for child in _children(parents, node):
            law = _point(tokens[child], len(p[0])) if laws is None else laws[child]
            accept[child] = _ratio(accept[node] * next_law[node][tokens[child]], law[tokens[child]])
            visit(child)
            order.append(child)
            rest = _minus([accept[node] * x for x in next_law[node]], law)
            total = math.fsum(rest)
            next_law[node] = _normalised(rest, next_law[node])
            accept[node] = total / (total + 1 - accept[node]) if accept[node] < 1 else 1.0

    visit(0)
    return accept, next_law, order


def borrowed(p: Law, token: int, table: Sequence[Sequence[int]], k: int, bound: float, factor: bool) -> float | None:
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
    p: Laws,
    laws: Laws | None,
    table: Sequence[Sequence[int]],
    k: int,
    bound: float,
    factor: bool,
    residual: str,
) -> Result:
    """LANTERN (``bound`` = delta) or, with ``factor``, LANTERN++ (``bound`` = lambda)."""

    def relaxed(target: Law, token: int) -> float:
        return target[token] + (borrowed(target, token, table, k, bound, factor) or 0.0)

    def step(target: Law, token: int, law: Law | None, rank: int) -> tuple[float, Law]:
        drawn = _point(token, len(target)) if law is None else law
        chance = _ratio(relaxed(target, token), drawn[token])
        if residual == "corrected":
            kept = _point(token, len(target))
            if law is not None:
                kept = [min(q, relaxed(target, x)) for x, q in enumerate(law)]
            return chance, _normalised(_minus(target, kept), target)
        found = borrowed(target, token, table, k, bound, factor) is not None
        gone = set(table[token][: k + 1]) if found else set()
        if law is None or residual == "lumina":
            target = [0.0 if x in gone else m for x, m in enumerate(target)]
        else:
            drawn = [0.0 if x in gone else m for x, m in enumerate(drawn)]
        if law is None:
            target[token] = 0.0
        rest = target if law is None else _minus(target, drawn)
        return chance, _normalised(rest, [1 / len(target)] * len(target))

    return _top_down(tokens, parents, p, laws, step)


def typical(
    tokens: Sequence[int], parents: Sequence[int], p: Laws, laws: Laws | None, epsilon: float, delta: float
) -> Result:
    """Medusa's threshold."""

    def step(target: Law, token: int, law: Law | None, rank: int) -> tuple[float, Law]:
        entropy = -math.fsum(x * math.log(x) for x in target if x > 0)
        return float(target[token] > min(epsilon, delta * math.exp(-entropy))), target

    return _top_down(tokens, parents, p, laws, step)


def ot_bound(p: Law, q: Law, drafts: int) -> float:
    """1 + min over every set H of p(H) - q(H)^k."""
    tokens = range(len(p))
    sets = (chosen for count in range(len(p) + 1) for chosen in combinations(tokens, count))
    return 1 + min(math.fsum(p[x] for x in h) - math.fsum(q[x] for x in h) ** drafts for h in sets)
