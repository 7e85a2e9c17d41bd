"""Drafts after one another: marginals, chains and trees of a block with pairs or a memory, against
enumeration.

Shape letters: B batch, K block, v tokens of the drafter.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.tree import TreeShape
from specmm.diffusion_drafters.block_drafters import NextDrafts, with_point_masses
from specmm.diffusion_drafters.sources import DrafterVocabulary
from tests.unit.shape.test_heap import brute

TABLE = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))  # of the drafter's tokens
FEW = DrafterVocabulary(9, torch.tensor([1, 2, 4, 7, 8]))
ALL = DrafterVocabulary(5)


def block(rows, places=3):
    return torch.randn(rows, places, 5, generator=torch.Generator().manual_seed(0))


def next_logits(vocabulary, remembers=False):
    """After the target's tokens, of which the drafter may not know all; the latest alone or all of
    a block.
    """
    place = torch.zeros(vocabulary.size, dtype=torch.int64)
    place[vocabulary.ids if vocabulary.ids is not None else torch.arange(5)] = torch.arange(5)

    def after(logits, before, memory):
        said = TABLE[place[before]]
        if not remembers:
            return logits + said, None
        memory = said if memory is None else said - 0.7 * memory.flip(-1)
        return logits + memory, memory

    return after


def drafts(vocabulary):
    return NextDrafts(Processor(), next_logits(vocabulary), vocabulary)


def along(after, logits, path):
    """Logits [..., v] after every token [...] of ``path``, one after another; ``logits`` are those
    of each place.
    """
    memory, found = None, []
    for place, token in enumerate(path):
        scores, memory = after(logits[place], torch.as_tensor(token), memory)
        found.append(scores)
    return found


def paths(tree):
    """Of one row: the drafts from the root down to every node."""
    seen = tree.shape.ancestors[0]
    return {tuple(tree.tokens[0, row][1:].tolist()) for row in seen}


@torch.inference_mode()
@pytest.mark.parametrize("vocabulary", [ALL, FEW])
@pytest.mark.parametrize("total", [2, 4, 6])
@pytest.mark.parametrize("remembers", [False, True])
def test_a_tree_of_pairs_holds_the_likeliest_paths(vocabulary, total, remembers):
    logits, after = block(1), next_logits(vocabulary, remembers)
    root = vocabulary.to_target(torch.tensor([3]))

    @cache
    def probs(path):
        return vocabulary.spread(Processor()(along(after, logits[0], (int(root), *path))[-1]))

    found = NextDrafts(Processor(), after, vocabulary).tree(root, logits, total)
    assert found.shape.size == total and found.probs is None
    wanted = brute(probs, vocabulary.size, 3, total - 1)
    assert paths(found) == {(), *wanted}


@torch.inference_mode()
def test_a_tree_of_one_level_and_one_of_many_nodes():
    root = torch.tensor([1])
    level = drafts(ALL).tree(root, block(1, 1), 5)
    assert level.shape.depth == 1 and len(set(level.tokens[0, 1:].tolist())) == 4
    assert drafts(ALL).tree(root, block(1, 4), 50).shape.size == 50
    with pytest.raises(ValueError, match=r"total must be in \[2, 6\]"):
        drafts(ALL).tree(root, block(1, 1), 9)


@torch.inference_mode()
@pytest.mark.parametrize("vocabulary", [ALL, FEW])
@pytest.mark.parametrize("remembers", [False, True])
def test_a_chain_records_the_distribution_of_every_draw(vocabulary, remembers):
    logits = block(2)
    root = vocabulary.to_target(torch.tensor([1, 4]))
    after = next_logits(vocabulary, remembers)
    uniforms, shape = Uniforms.from_seeds([0, 1]), TreeShape.chain(3, "cpu")
    tree = NextDrafts(Processor(0.7), after, vocabulary).chain(root, logits, shape, uniforms)
    for place, scores in enumerate(along(after, logits.unbind(1), tree.tokens[:, :3].unbind(1))):
        probs = vocabulary.spread(Processor(0.7)(scores))
        torch.testing.assert_close(tree.probs[:, place + 1], probs, rtol=0, atol=0)
        assert bool((probs.gather(1, tree.tokens[:, place + 1 : place + 2]) > 0).all())


@torch.inference_mode()
def test_a_greedy_chain_takes_the_likeliest_and_what_is_settled():
    logits, root, after = block(1), torch.tensor([7]), next_logits(FEW)
    fixed = torch.tensor([[-1, 3, -1]])  # a token that the drafter does not know
    tree = drafts(FEW).chain(root, logits, TreeShape.chain(3, "cpu"), None, fixed)
    first, last = (
        FEW.to_target(after(logits[:, i], tree.tokens[:, i], None)[0].argmax(-1)) for i in (0, 2)
    )
    assert tree.probs is None and tree.tokens[0].tolist() == [7, int(first), 3, int(last)]


def test_what_is_settled_is_a_point_mass_whatever_its_number():
    probs = block(1).softmax(-1)
    found = with_point_masses(probs, torch.tensor([[0, -1, 4]]))
    assert found[0, 0].tolist() == [1, 0, 0, 0, 0] and found[0, 2].tolist() == [0, 0, 0, 0, 1]
    assert torch.equal(found[0, 1], probs[0, 1]) and with_point_masses(probs, None) is probs
