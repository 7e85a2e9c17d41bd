"""Chains that end by what their own drafts say: exact where the drafts before decide, by
enumeration; not where a draft decides about itself.

Shape letters: R draws, N nodes, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specmm.core.tree import DraftTree, TreeShape
from specmm.verify import Block, Recursive, Traversal
from specmm.verify.exhaustive import Draws, draws, emitted_probs, sequence_probs, total_variation

V, DEPTH = 3, 3
RULES = [Recursive(), Block(), Traversal()]


def cut(whole: Draws, depth: Tensor, length: int) -> Draws:
    """The draws that end after ``length`` drafts, of which each has a ``depth`` [R]."""
    rows = depth == length
    tree = whole.tree
    assert tree.probs is not None
    shape = TreeShape.chain(length)
    kept = DraftTree(tree.tokens[rows, : length + 1], shape, tree.probs[rows, : length + 1])
    return Draws(kept, whole.chance[rows], whole.prefix[rows, : length + 1])


def emitted(rule, whole: Draws, depth: Tensor, target) -> Tensor:
    """The distribution [V**(DEPTH + 1)] of the tokens by chains of all depths together."""
    found = torch.zeros(V ** (DEPTH + 1), dtype=torch.float64)
    for length in range(DEPTH + 1):
        probs = emitted_probs(rule, cut(whole, depth, length), target)
        for table in target[length + 1 : DEPTH + 1]:
            probs = (probs[:, None] * table).flatten()
        found += probs
    return found


def depths(whole: Draws, goes_on: list[Tensor], early: int) -> Tensor:
    """By draw [R]: how many drafts come before the first place that does not go on, where place n
    asks the drafts before it, or one more if not ``early``.
    """
    asked = [goes_on[n][whole.prefix[:, n + 1 - early]] for n in range(DEPTH)]
    return torch.stack(asked, dim=1).long().cumprod(1).sum(1)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("seed", range(4))
def test_a_chain_that_its_drafts_end(rule, seed, tables):
    target, drafter = tables(seed, V, DEPTH + 1), tables(seed + 50, V, DEPTH)
    whole = draws(TreeShape.chain(DEPTH), drafter, "independent")
    generator = torch.Generator().manual_seed(seed)
    before = [torch.rand(V**n, generator=generator) < 0.7 for n in range(DEPTH)]
    ends = depths(whole, before, early=1)
    assert len(ends.unique()) > 1 or seed
    wanted = sequence_probs(target, DEPTH + 1)
    assert total_variation(emitted(rule, whole, ends, target), wanted) < 1e-12
    itself = [torch.rand(V ** (n + 1), generator=generator) < 0.7 for n in range(DEPTH)]
    broken = depths(whole, itself, early=0)
    assert total_variation(emitted(rule, whole, broken, target), wanted) > 1e-3
