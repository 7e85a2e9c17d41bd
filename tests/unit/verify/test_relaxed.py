"""Typical acceptance: what it promises, and that the measured excess bounds what they cost."""

from __future__ import annotations

import pytest
import torch

from specmm.core.tree import DraftTree, TreeShape
from specmm.verify import Typical

SCHEMES = ["without replacement", "independent", "top"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rule", [Typical(), Typical(0.3, 1.0)], ids=str)
def test_the_excess_bounds_the_total_variation(rule, scheme, drift):
    apart, excess = drift(rule, scheme)
    assert 1e-3 < apart <= excess + 1e-12
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
