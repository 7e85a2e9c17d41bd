"""What nodes of a tree have seen, and where rows end.

Shape letters: B batch, N nodes, V vocabulary.
"""

import torch

from specmm.core.decode import EndTokens, all_of
from specmm.core.processors import History, Processor, penalise
from specmm.core.tree import DraftTree, TreeShape

V = 9


def naive(committed, tree, row):
    """Tokens each node has seen, by walking up."""
    seen = torch.zeros(tree.shape.size, V, dtype=torch.bool)
    for node in range(tree.shape.size):
        tokens, at = set(committed), node
        while at >= 0:
            tokens.add(int(tree.tokens[row, at]))
            at = int(tree.shape.parents[0, at])
        seen[node, list(tokens)] = True
    return seen


def test_a_node_has_seen_its_row_and_its_path():
    history = History(torch.tensor([[1, 2, 0], [3, 3, 4]]), torch.tensor([2, 3]), room=4)
    history.append(torch.tensor([[5, 6], [7, 8]]), torch.tensor([2, 0]))
    tree = DraftTree(
        torch.tensor([[7, 8, 0, 1], [5, 6, 6, 2]]), TreeShape.from_parents([-1, 0, 0, 1])
    )
    seen = history.seen(tree, V)
    for row, committed in enumerate([[1, 2, 5, 6], [3, 4]]):
        assert torch.equal(seen[row], naive(committed, tree, row))
        assert history.seen(None, V)[row, 0].nonzero()[:, 0].tolist() == sorted(committed)
    assert history.sequence(0).tolist() == [1, 2, 5, 6]


def test_tokens_outside_the_vocabulary_do_not_count():
    history = History(torch.tensor([[1, 40]]), torch.tensor([2]), room=1)
    assert history.seen(None, V).sum() == 1


def test_the_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 2], [3, 3], [8, 0]])
    seen = torch.zeros(3, V, dtype=torch.bool).scatter_(1, ids, True)
    assert torch.equal(
        penalise(logits, seen, 1.7), RepetitionPenaltyLogitsProcessor(1.7)(ids, logits)
    )
    assert torch.equal(
        Processor(repetition_penalty=1.7)(logits, seen), penalise(logits, seen, 1.7).softmax(-1)
    )


def test_a_row_ends_after_its_first_end_token():
    tokens = torch.tensor([[5, 2, 4, 2], [5, 5, 2, 2], [2, 5, 5, 5]])
    counts, done = EndTokens([2, 3])(tokens, torch.tensor([1, 0, 1]), torch.tensor([4, 2, 3]))
    assert counts.tolist() == [2, 2, 3]
    assert done.tolist() == [True, False, False]


def test_of_several_stops_the_first_to_end_a_row_does():
    tokens = torch.tensor([[5, 2, 4, 3], [5, 3, 4, 2], [5, 4, 3, 4], [5, 4, 4, 4]])
    before, after = torch.ones(4, dtype=torch.int64), torch.full((4,), 4)
    for stop in (all_of(EndTokens([2]), EndTokens([3])), all_of(EndTokens([3]), EndTokens([2]))):
        counts, done = stop(tokens, before, after)
        assert counts.tolist() == [2, 2, 3, 4] and done.tolist() == [True, True, True, False]
