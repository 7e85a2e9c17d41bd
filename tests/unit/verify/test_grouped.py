"""Grouped acceptance: the distribution it states, what it costs, and which tokens are a group."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specmm.core.tree import DraftTree, TreeShape
from specmm.verify import Grouped, neighbour_table
from specmm.verify.exact import take
from specmm.verify.exhaustive import draws, emitted_probs, sequence_probs, total_variation
from specmm.verify.naive import group
from tests.sampling import expected_excess

TABLE = neighbour_table(torch.randn(4, 2, generator=torch.Generator().manual_seed(3)), 3)
RULES = [Grouped(span=1, gap=0.4), Grouped(span=3, gap=0.25), Grouped(TABLE, 3, 0.5, k=1)]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.span}-{r.gap}-{r.k}")
SCHEMES = ["without replacement", "independent", "top"]


def stated(rule: Grouped, p: Tensor, q: Tensor) -> Tensor:
    """The distribution of one token after a draft of distribution q, in plain terms."""
    near = TABLE.tolist() if rule.k else None
    groups = [
        group(p.tolist(), x, rule.span, rule.gap, near[x][: rule.k] if near else None)
        for x in range(len(p))
    ]
    kept = torch.stack(
        [q[x] * (p[g].sum() / q[g].sum()).clamp(max=1) for x, g in enumerate(groups)]
    )
    rest = (p - q).clamp(min=0)
    return kept + (1 - kept.sum()) * rest / rest.sum()


def stated_tables(rule: Grouped, target: list[Tensor], drafter: list[Tensor]) -> list[Tensor]:
    return [
        torch.stack([stated(rule, p, q) for p, q in zip(*pair, strict=True)])
        for pair in zip(target, drafter, strict=True)
    ]


def first_two(rule, target: list[Tensor], drafter: list[Tensor], after: list[Tensor]) -> Tensor:
    """The first two of three tokens [16], a chain's drafts."""
    drawn = draws(TreeShape.chain(2), drafter, "independent")
    return emitted_probs(rule, drawn, target, after).view(4, 4, 4).sum(-1).flatten()


@every_rule
def test_it_emits_the_distribution_it_states(rule, tables):
    target, drafter = tables(7, 4, 3), tables(8, 4, 3)
    promised = stated_tables(rule, target, drafter)
    first = first_two(rule, target, drafter, promised)
    assert total_variation(first, sequence_probs(promised, 2)) < 1e-12
    assert total_variation(first, sequence_probs(target, 2)) > 1e-3


@dataclass(frozen=True)
class OwnDraftMass(Grouped):
    """A broken twin: the group's mass against the draft's own."""

    def _chance(self, target, trial):
        group, member = self._group(target, trial.token)
        mass = (take(target, group) * member).sum(-1)
        return (mass / take(trial.probs, trial.token)).clamp(max=1)


def test_a_broken_twin_does_not(tables):
    target, drafter = tables(7, 4, 3), tables(8, 4, 3)
    twin = OwnDraftMass(span=1, gap=0.4)
    promised = stated_tables(twin, target, drafter)
    first = first_two(twin, target, drafter, promised)
    assert total_variation(first, sequence_probs(promised, 2)) > 1e-3


@every_rule
def test_what_is_measured_of_one_draft_bounds_what_it_costs(rule, tables):
    """One draft: the total variation, enumerated, and what drafts and uniforms in common give."""
    p, q = tables(7, 4, 1), tables(8, 4, 1)
    drawn = draws(TreeShape.chain(1), q, "independent")
    both = [p[0], p[0].expand(4, -1)]
    emitted = emitted_probs(rule, drawn, both).view(4, 4).sum(1)
    apart = total_variation(emitted, p[0][0])
    assert apart == pytest.approx(total_variation(stated(rule, p[0][0], q[0][0]), p[0][0]))
    every = torch.tensor([[0, x] for x in range(4)])
    tree = DraftTree(every, TreeShape.chain(1), q[0][0].expand(4, 2, -1))
    kept = rule.decisions(tree, p[0].expand(4, 2, -1)).accept[:, 1]
    strict = (p[0][0] / q[0][0]).clamp(max=1)
    measured = expected_excess(rule, drawn, both)
    assert measured == pytest.approx(float(q[0][0] @ (kept - strict).abs()), abs=1e-12)
    assert apart <= measured + 1e-12


@pytest.mark.parametrize("scheme", SCHEMES)
@every_rule
def test_the_excess_bounds_the_total_variation(rule, scheme, drift):
    apart, excess = drift(rule, scheme)
    assert 1e-3 < apart <= excess + 1e-12
    assert not rule.exact


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rule", [Grouped(span=0), Grouped(gap=0.0)], ids=["span", "gap"])
def test_alone_a_draft_is_kept_by_the_strict_rule(rule, scheme, drift):
    apart, excess = drift(rule, scheme)
    assert apart < 1e-12 and excess == 0


def test_a_group_is_what_is_about_as_likely():
    """Around token 1 of four."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    q = torch.tensor([0.0, 0.6, 0.2, 0.2])
    tree = DraftTree(torch.tensor([[0, 1]]), TreeShape.chain(1), q.expand(1, 2, -1))

    def kept(**options):
        rule = Grouped(**options)
        return float(rule.decisions(tree, p.expand(1, 2, -1)).accept[0, 1])

    assert kept(span=0) == pytest.approx(0.3 / 0.6)
    assert kept(span=1, gap=0.11) == pytest.approx(1.0)  # (0.4 + 0.3 + 0.2) / (0 + 0.6 + 0.2)
    assert kept(span=1, gap=0.05) == pytest.approx(0.3 / 0.6)
    near = torch.tensor([[1], [2], [3], [0]])
    assert kept(table=near, span=3, gap=0.5, k=1) == pytest.approx(0.5 / 0.8)
    shifted = torch.tensor([[1], [0], [1]])  # codes begin at token 1, whose nearest is token 2
    assert kept(table=shifted, span=3, gap=0.5, k=1, offset=1) == pytest.approx(0.5 / 0.8)


def test_options_out_of_range_are_named():
    with pytest.raises(ValueError, match=r"span must be at least 0 and gap in \[0, 1\], got -1"):
        Grouped(span=-1)
    with pytest.raises(ValueError, match="k must be 0 without a table of nearest codes, got 4"):
        Grouped(k=4)
    with pytest.raises(ValueError, match=r"k must be in \[0, 3\]"):
        Grouped(TABLE, k=4)
