"""What a run may claim by its rule: of ours what the tests prove, of others' what is enumerated.

A rule that others wrote and that calls itself exact is put to the test before a certificate says
so: every draw of some small trees, by targets that have zeros as well (:mod:`.exhaustive`).

Shape letters: V vocabulary, D deepest level.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from specmm.outside import OutsideDrafter
from specmm.registry import maker_of
from specmm.shape.trees import Siblings
from specmm.stats import Certificate, rule_certificate
from specmm.tree import TreeShape
from specmm.verify.exhaustive import (
    Scheme,
    Tables,
    draws,
    emitted_probs,
    sequence_probs,
    total_variation,
)
from specmm.verify.rule import Rule

VOCABULARY = 3
SHAPES = ((-1, 0, 1), (-1, 0, 0), (-1, 0, 0, 1, 1))  # parents: a chain, siblings, both
SEEDS = range(4)
TOLERANCE = 1e-9  # of a total variation in float64, summed over some hundred draws
SCHEMES: dict[Siblings | None, Scheme] = {
    "distinct": "without replacement",
    "independent": "independent",
    "likeliest and one": "top and sample",
    None: "top",
}


class Counts(Protocol):
    """What a run measured: :class:`specmm.decode.Progress`."""

    @property
    def excess(self) -> Tensor:
        """Summed over the measured rounds of all rows."""

    @property
    def measured(self) -> Tensor:
        """Tokens of those rounds."""


def run_claim(rule: Rule | None, counts: Counts, drafter: object) -> Certificate:
    """The certificate of a run by ``rule``, None: plain decoding.

    A ``drafter`` of others is named where it recorded distributions: every rule relies on them.
    """
    if rule is None:
        return Certificate("exact", "plain decoding of the target", 0.0)
    measured = float(counts.measured)
    found = claim(rule, float(counts.excess) / measured if measured else None)
    if isinstance(drafter, OutsideDrafter) and drafter.recorded:
        return _with(found, f"provided that {drafter} drew from what it recorded")
    return found


def claim(rule: Rule, excess: float | None) -> Certificate:
    """The certificate of a run by ``rule``; ``excess`` is a relaxed rule's, the mean per token."""
    maker = maker_of(rule)
    if maker and rule.exact:
        return _of_others(rule, maker)
    found = rule_certificate(rule.name, rule.exact, excess)
    return _with(found, f"rule and measure are by {maker}, not specmm") if maker else found


def _with(found: Certificate, more: str) -> Certificate:
    return replace(found, reason=f"{found.reason}; {more}")


def _of_others(rule: Any, maker: str) -> Certificate:
    """Of a ``rule`` that calls itself exact, by ``maker``."""
    try:
        furthest, trees = enumerated(rule)
    except Exception as error:  # whatever a rule of others raises, its claim is not shown
        reason = f"the {rule.name} rule calls itself exact, by {maker}; it could not be enumerated"
        return Certificate("heuristic", f"{reason} ({type(error).__name__}: {error})")
    if furthest > TOLERANCE:
        reason = f"the {rule.name} rule calls itself exact, by {maker}, and is not: on small trees"
        return Certificate(
            "heuristic", f"{reason} its tokens are {furthest:.2g} in total variation off"
        )
    reason = (
        f"the {rule.name} rule is exact by the word of its author, {maker}, and in {trees} small "
        "cases that were enumerated here"
    )
    return Certificate("exact", reason, 0.0)


def enumerated(rule: Any) -> tuple[float, int]:
    """The largest total variation of what ``rule`` emits from the target, and of how many cases.

    Raises ``ValueError`` for a rule that takes none of them. Rules of chains alone may refuse
    siblings.
    """
    scheme = SCHEMES[getattr(rule, "siblings", "distinct")]
    found = []
    refused: ValueError | None = None
    for parents in SHAPES:
        shape = TreeShape.from_parents(parents)
        for seed in SEEDS:
            target, drafter = (_tables(shape.depth + 1, 2 * seed + i) for i in range(2))
            try:
                emitted = emitted_probs(rule, draws(shape, drafter, scheme), target)
            except ValueError as error:
                refused = error
                continue
            found.append(total_variation(emitted, sequence_probs(target, shape.depth + 1)))
    if not found:
        raise refused or ValueError("it was given no tree")
    return max(found), len(found)


def _tables(length: int, seed: int) -> Tables:
    """Distributions after every prefix of fewer than ``length`` tokens, a tenth of them zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for depth in range(length):
        size = (VOCABULARY**depth, VOCABULARY)
        weights = torch.rand(size, dtype=torch.float64, generator=generator)
        weights = torch.where(weights > 0.1, weights, 0.0)
        weights[:, seed % VOCABULARY] += 0.05  # no row is empty
        found.append(weights / weights.sum(-1, keepdim=True))
    return found
