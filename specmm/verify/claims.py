"""The certificate of a run by its rule: for our rules, the claim that tests prove; for third-party
rules, the claim that enumeration confirms.

A third-party rule that calls itself exact is tested before a certificate says so: on every draw of
its trees in the run, with targets that also have zeros (:mod:`.exhaustive`). Larger trees are
enumerated in parts, one for each depth around the largest family of siblings there.

Shape letters: V vocabulary, D deepest level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from specmm.core.stats import Certificate, rule_certificate
from specmm.core.tree import DraftTree, TreeShape
from specmm.extending.outside import OutsideDrafter
from specmm.extending.registry import maker_of
from specmm.shape.trees import Siblings
from specmm.verify.bottom_up import Block, Traversal
from specmm.verify.exact import GreedyMatch, GreedyMultiDraft, PointMass, Recursive
from specmm.verify.exhaustive import (
    Scheme,
    Tables,
    draws,
    emitted_probs,
    sequence_probs,
    total_variation,
)
from specmm.verify.matching import Matching
from specmm.verify.rule import Rule

PROVED = (Block, GreedyMatch, GreedyMultiDraft, Matching, PointMass, Recursive, Traversal)
VOCABULARY = 3  # at least
SEEDS = range(4)
TOLERANCE = 1e-9  # rounding of a total variation in float64, summed over some thousand draws
ENOUGH = 10_000  # draws, and texts, up to which a part of a tree grows
MOST = 50_000  # draws of one family of siblings
SCHEMES: dict[Siblings, Scheme] = {
    "distinct": "without replacement",
    "independent": "independent",
    "likeliest and one": "top and sample",
}
Parents: TypeAlias = tuple[int, ...]


def proved(rule: object) -> bool:
    """Whether ``rule`` is ours, with unchanged ``decisions``, and the tests prove it exact."""
    return type(rule) in PROVED and "decisions" not in vars(rule)


class GivenTrees:
    """The trees ``given`` to a rule: a row's parents, and whether distributions were recorded."""

    def __init__(self, given: Sequence[tuple[Parents, bool]] = ()) -> None:
        self.given = set(given)

    def add(self, tree: DraftTree) -> None:
        """Note the shapes of all rows of ``tree``."""
        rows = tree.shape.parents.tolist()
        self.given |= {(tuple(parents), tree.probs is not None) for parents in rows}


class Counts(Protocol):
    """A run's measurements, as in :class:`specmm.core.decode.Progress`."""

    @property
    def excess(self) -> Tensor:
        """The excess of a relaxed rule, summed over rounds and rows."""

    @property
    def measured(self) -> Tensor:
        """The number of tokens over which :attr:`excess` was summed."""

    @property
    def trees(self) -> GivenTrees:
        """The trees given to a third-party rule that calls itself exact."""


def run_claim(rule: Rule | None, counts: Counts, drafter: object) -> Certificate:
    """The certificate of a run by ``rule`` (None: plain decoding).

    A third-party ``drafter`` is named if it recorded distributions, since every rule relies on
    them.
    """
    if rule is None:
        return Certificate("exact", "plain decoding of the target", 0.0)
    measured = float(counts.measured)
    excess = float(counts.excess) / measured if measured else None
    certificate = claim(rule, excess, counts.trees)
    if isinstance(drafter, OutsideDrafter) and drafter.recorded:
        shapes = " and chose its shapes without looking at its drafts" if drafter.varied else ""
        return _noted(certificate, f"provided that {drafter} drew from what it recorded{shapes}")
    return certificate


def claim(rule: Rule, excess: float | None, trees: GivenTrees) -> Certificate:
    """The certificate of a run by ``rule``, which was given ``trees``; ``excess`` is a relaxed
    rule's mean excess per token.
    """
    if proved(rule):
        return rule_certificate(rule.name, True, None)
    maker = maker_of(rule)
    if rule.exact:
        return _of_others(rule, maker or "its caller", trees)
    result = rule_certificate(rule.name, False, excess)
    return _noted(result, f"rule and measure are by {maker}, not specmm") if maker else result


def _noted(certificate: Certificate, more: str) -> Certificate:
    return replace(certificate, reason=f"{certificate.reason}; {more}")


def _of_others(rule: Any, maker: str, trees: GivenTrees) -> Certificate:
    """The certificate of a ``rule`` by ``maker`` that calls itself exact."""
    said = f"the {rule.name} rule calls itself exact, by {maker}"
    try:
        parts = list(_parts(rule, trees))
        distances = [off for part in parts for off in _distances(rule, part)]
    except Exception as error:  # whatever a rule of others raises, its claim is not shown
        reason = f"{said}; it could not be enumerated ({type(error).__name__}: {error})"
        return Certificate("heuristic", reason)
    furthest = torch.tensor(distances).max().item()  # nan, if one is
    if not furthest <= TOLERANCE:
        off = f"its tokens are {furthest:.2g} in total variation off"
        return Certificate("heuristic", f"{said}, and is not: on trees of this run {off}")
    enumerated = {(part.parents, part.recorded) for part in parts if not part.lead}
    parted = "" if trees.given <= enumerated else "parts of "
    reason = (
        f"the {rule.name} rule is exact by the word of its author, {maker}, and in "
        f"{len(distances)} cases of {parted}this run's trees that were enumerated here"
    )
    return Certificate("exact", reason, 0.0)


class _Part(NamedTuple):
    """A part of a tree, whose root has depth ``lead``; ``recorded``: drafts drawn, not chosen."""

    parents: Parents
    lead: int
    recorded: bool
    scheme: Scheme  # how siblings are drawn


def _distances(rule: Any, part: _Part) -> Iterator[float]:
    """The total variation between ``rule``'s output on ``part`` and each of several targets."""
    shape = TreeShape.from_parents(part.parents)
    length, size = shape.depth + 1, _vocabulary(part.parents)
    for seed in SEEDS:
        target, drafter = (_tables(length, 2 * seed + i, size) for i in range(2))
        drawn = draws(shape, drafter, part.scheme)
        emitted = emitted_probs(rule, drawn, target, lead=part.lead)
        yield total_variation(emitted, sequence_probs(target, length))


def _parts(rule: Any, trees: GivenTrees) -> Iterator[_Part]:
    """The root alone and, for each depth, the part around its largest family of siblings."""
    yield _Part((-1,), 0, False, "top")
    for recorded in (True, False):
        siblings: Siblings = getattr(rule, "siblings", None) or "distinct"
        scheme = SCHEMES[siblings] if recorded else "top"
        chosen = [tree for tree, drawn in trees.given if drawn == recorded]
        depths = {tree: _depths(tree) for tree in chosen}
        parts = set()
        deepest = max(map(max, depths.values()), default=0)
        for depth in range(1, deepest + 1):
            widest = max(chosen, key=lambda tree: (len(_family(tree, depth)), len(tree), tree))
            parts.add(_part(widest, depth, scheme))
        yield from (_Part(*part, recorded, scheme) for part in sorted(parts))


def _depths(parents: Parents) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def _family(parents: Parents, depth: int) -> list[int]:
    """The largest family of siblings at ``depth``; empty if the tree ends before."""
    families: dict[int, list[int]] = {}
    for node, (parent, level) in enumerate(zip(parents, _depths(parents), strict=True)):
        if level == depth:
            families.setdefault(parent, []).append(node)
    return max(families.values(), key=len, default=[])


def _part(parents: Parents, depth: int, scheme: Scheme) -> tuple[Parents, int]:
    """The part of a tree that can be enumerated around the largest family at ``depth``, and the
    level of its root.

    Raises ``ValueError`` for too many siblings.
    """
    family = _family(parents, depth)
    path = [parents[family[0]]]
    while path[0]:
        path.insert(0, parents[path[0]])

    def cost(nodes: list[int]) -> int:
        return _cost(_cut(parents, nodes), scheme)

    lead = 0
    while lead < depth - 1 and cost(path[lead:] + family) > ENOUGH:
        lead += 1
    nodes = path[lead:] + family
    if cost(nodes) > MOST:
        raise ValueError(f"there are too many siblings, {len(family)}")
    for node in range(path[lead] + 1, len(parents)):
        if node not in nodes and parents[node] in nodes and cost([*nodes, node]) <= ENOUGH:
            nodes.append(node)
    return _cut(parents, nodes), lead


def _cut(parents: Parents, nodes: Sequence[int]) -> Parents:
    """The parents within the subtree of ``nodes``, the first of which is its root."""
    number = {node: i for i, node in enumerate(sorted(nodes))}
    return (-1, *(number[parents[node]] for node in sorted(nodes)[1:]))


def _vocabulary(parents: Parents) -> int:
    """The least V at which no sibling is the last remaining token."""
    return max(VOCABULARY, 1 + max(parents.count(node) for node in range(len(parents))))


def _cost(parents: Parents, scheme: Scheme) -> int:
    """The number of possible draws of a tree, or of texts if that is larger."""
    size = _vocabulary(parents)
    families = [parents.count(node) for node in range(len(parents))]
    draws_of = {
        "independent": lambda count: size**count,
        "without replacement": lambda count: math.perm(size, count),
        "top and sample": lambda count: size if count else 1,
        "top": lambda count: 1,
    }
    texts = size ** (max(_depths(parents)) + 1)
    return max(math.prod(map(draws_of[scheme], families)), texts)


def _tables(length: int, seed: int, size: int = VOCABULARY) -> Tables:
    """Distributions over ``size`` tokens after all prefixes below ``length``, a tenth zeros."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for depth in range(length):
        weights = torch.rand((size**depth, size), dtype=torch.float64, generator=generator)
        weights = torch.where(weights > 0.1, weights, 0.0)
        weights[:, seed % size] += 0.05  # no row is empty
        tables.append(weights / weights.sum(-1, keepdim=True))
    return tables
