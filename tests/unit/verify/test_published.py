"""Which published ways to draw pictures by Jacobi decoding are lossless, by enumeration.

SJD and MC-SJD, and with it the adaptive continuation of SJD-PAC, are in test_jacobi: drafts drawn
afresh and coupled ones, token by token. Here is what is added to them.

Shape letters: R draws, V vocabulary.
"""

from __future__ import annotations

import itertools

import torch

from specmm.core.tree import DraftTree, TreeShape
from specmm.verify import Recursive
from specmm.verify.exact import normalised
from specmm.verify.exhaustive import Draws, draws, emitted_probs, sequence_probs, total_variation

PAIR = TreeShape.from_parents([-1, 0, 0])


def continued_and_branched(before, now):
    """SJD-PAC's proactive drafting (arXiv 2603.18599, its released code) of two siblings at a place
    whose draft of distribution ``before`` [V] was just tested against ``now`` [V]: one that passed
    is the first sibling, and what else is needed is drawn without replacement from the residual.
    Recorded are ``now``, and ``now`` without the first.
    """
    vocab = len(now)
    rest = normalised((now - before).clamp(min=0), now)
    passed = torch.minimum(before, now)  # chance that a draft is there and passes
    first = torch.zeros(vocab, vocab, dtype=now.dtype)  # by first and second sibling
    for x, y in itertools.product(range(vocab), repeat=2):
        first[x, y] = passed[x] * rest[y]
        if x != y:
            first[x, y] += (1 - passed.sum()) * rest[x] * rest[y] / (1 - rest[x])
    tokens = torch.tensor([[0, x, y] for x, y in itertools.product(range(vocab), repeat=2)])
    probs = now.expand(len(tokens), 3, vocab).clone()
    probs[:, 2] = probs[:, 2].scatter(1, tokens[:, 1:2], 0.0)
    probs[:, 2] /= probs[:, 2].sum(1, keepdim=True)
    prefix = torch.tensor([0, 1, 1]) * tokens
    return Draws(DraftTree(tokens, PAIR, probs), first.flatten(), prefix)


def test_siblings_of_a_continued_draft_are_not_lossless(tables):
    """With the distributions as recorded they are."""
    before = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    now = before.flip(0)  # more of two tokens, so that the residual has two siblings
    target = tables(7, 4, 2)
    wanted = sequence_probs(target, 2)
    drawn = continued_and_branched(before, now)
    assert abs(float(drawn.chance.sum()) - 1) < 1e-12
    assert total_variation(emitted_probs(Recursive(), drawn, target), wanted) > 1e-2
    honest = draws(PAIR, [now[None]], "without replacement")
    assert total_variation(emitted_probs(Recursive(), honest, target), wanted) < 1e-12


def test_rows_in_parallel_are_not_lossless_whatever_verifies_them(tables):
    """PJD (arXiv 2606.05703) and ZipAR keep a row's first tokens before the row above has ended. A
    picture of two rows of two, whose third token is drawn without the second; even if it has the
    model's own distribution given the first alone, which no mask can better.
    """
    first, second, third, fourth = tables(3, 2, 4)
    third = third.reshape(2, 2, 2)  # [first, second, V]
    blind = (second[..., None] * third).sum(1, keepdim=True)  # without the second
    found = sequence_probs([first, second, blind.expand(-1, 2, -1).reshape(4, 2), fourth], 4)
    wanted = sequence_probs(tables(3, 2, 4), 4)
    assert abs(float(found.sum()) - 1) < 1e-12
    assert total_variation(found, wanted) > 1e-2
