"""Typical and grouped acceptance: what they promise, and that the measured excess bounds what they cost."""

from __future__ import annotations

import pytest
import torch

from specmm.tree import DraftTree, TreeShape
from specmm.verify import Grouped, Typical
from specmm.verify.exhaustive import draws, emitted_law, expected_excess, sequence_law, total_variation

GROUPS = torch.tensor([0, 1, 0, 1])
SCHEMES = ["without replacement", "independent", "top"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("parents", [[-1, 0], [-1, 0, 0, 0], [-1, 0, 1]], ids=str)
def test_the_groups_keep_the_targets_law(scheme, parents, tables):
    shape = TreeShape.from_parents(parents)
    target, drafter = tables(1, 4, 3), tables(2, 4, 3)
    target = [target[0]] + [target[0].expand(4**d, -1) for d in (1, 2)]  # so that groups follow groups
    emitted = emitted_law(Grouped(GROUPS), draws(shape, drafter, scheme), target).view(*[4] * (shape.depth + 1))
    wanted = sequence_law(target, shape.depth + 1).view_as(emitted)
    assert total_variation(emitted, wanted) > 1e-3
    for axis in range(shape.depth + 1):
        emitted, wanted = by_group(emitted, axis), by_group(wanted, axis)
    assert total_variation(emitted, wanted) < 1e-12


def by_group(law: torch.Tensor, axis: int) -> torch.Tensor:
    size = list(law.shape)
    size[axis] = 2
    return law.new_zeros(size).index_add(axis, GROUPS, law)


def test_groups_of_one_are_exact(tables):
    shape, target = TreeShape.from_parents([-1, 0, 0, 1]), tables(1, 4, 3)
    drawn = draws(shape, tables(2, 4, 3), "without replacement")
    rule = Grouped(torch.arange(4))
    assert total_variation(emitted_law(rule, drawn, target), sequence_law(target, 3)) < 1e-12
    assert expected_excess(rule, drawn, target) < 1e-12


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rule", [Typical(), Typical(0.3, 1.0), Grouped(GROUPS)], ids=str)
def test_the_excess_bounds_the_total_variation(rule, scheme, tables):
    shape, target = TreeShape.from_parents([-1, 0, 0, 1, 1]), tables(1, 4, 3)
    drawn = draws(shape, tables(2, 4, 3), scheme)
    apart = total_variation(emitted_law(rule, drawn, target), sequence_law(target, 3))
    assert 1e-3 < apart <= expected_excess(rule, drawn, target) + 1e-12
    assert not rule.exact


def test_typical_threshold_follows_the_entropy():
    tree = DraftTree(torch.tensor([[0, 1], [0, 1]]), TreeShape.chain(1))
    flat, sharp = torch.full((8,), 0.125), torch.tensor([0.9, 0.1, 0, 0, 0, 0, 0, 0])
    p = torch.stack([flat, sharp])[:, None].expand(-1, 2, -1)
    assert Typical(0.09, 0.3).decisions(tree, p).accept[:, 1].tolist() == [1, 1]
    assert Typical(0.2, 0.5).decisions(tree, p).accept[:, 1].tolist() == [1, 0]
    assert Typical(0.2, 2.0).decisions(tree, p).accept[:, 1].tolist() == [0, 0]


def test_options_out_of_range_are_named():
    with pytest.raises(ValueError, match="epsilon must be"):
        Typical(epsilon=0)
    tree = DraftTree(torch.zeros(1, 2, dtype=torch.int64), TreeShape.chain(1))
    with pytest.raises(ValueError, match=r"groups must be \[5\], got \[4\]"):
        Grouped(GROUPS).decisions(tree, torch.full((1, 2, 5), 0.2))
