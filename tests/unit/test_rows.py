"""What joins and leaves with the rows of a batch is what each row would have by itself."""

import random
from types import SimpleNamespace

import pytest
import torch

from specmm.core.cache import Cache, CacheSize, LayerSize
from specmm.core.processors import History, Processor
from specmm.core.randomness import RowNumbers
from specmm.core.state import with_one, without
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.models.rows import RowProcessors, RowsTarget

V = 11


def test_without_a_row_the_last_one_takes_its_place():
    x = torch.arange(6).view(3, 2)
    assert without(x.clone(), 0).tolist() == [[4, 5], [2, 3]]
    assert without(x.clone(), 2).tolist() == [[0, 1], [2, 3]]
    assert without(x.clone(), 0, 1).tolist() == [[1], [3], [5]]
    assert with_one(x, 1).tolist() == [[0, 1, 0], [2, 3, 0], [4, 5, 0]]


def filled(length, number):
    """A cache of one sample whose tokens are all ``number``."""
    size = CacheSize((LayerSize(2, 4, 3),) * 2, 1, 1, length + 2, 0)
    cache = Cache(size, torch.float32)
    for array in cache.arrays:
        array[:, :, :length] = number
    cache.lengths[:] = length
    return cache


@pytest.mark.parametrize("seed", range(8))
def test_a_cache_whose_rows_join_and_leave(seed):
    random.seed(seed)
    cache = Cache(CacheSize((LayerSize(2, 4, 3),) * 2, 1, 1, 8, 4), torch.float32)
    cache.leave(0)
    rows = []
    for step in range(1, 60):
        if rows and random.random() < 0.4:
            row = random.randrange(len(rows))
            rows[row] = rows[-1]
            rows.pop()
            cache.leave(row)
        else:
            length = random.randint(1, 5 + step // 6)
            cache.widen(length + 2)
            cache.join()
            cache.take(len(rows), filled(length, step))
            rows.append((length, step))
        assert cache.lengths.tolist() == [length for length, _ in rows]
        for layer in cache.layers:
            for row, (length, number) in enumerate(rows):
                assert (layer.keys[row, :length] == number).all()
                assert (layer.values[row, :length] == number).all()
        if rows:  # a round's nodes are kept in these rows alone
            cache.aim_at_tree(1)
            for layer in cache.layers:
                nodes = torch.full((len(rows), 1, 2, 4), float(step))
                layer.write(nodes, nodes[..., :3])
            cache.keep(torch.zeros(len(rows), 1, dtype=torch.int64), torch.zeros(len(rows)).long())


def test_a_row_of_several_is_taken():
    cache, both = filled(3, 1.0), filled(4, 2.0)
    both.join()
    for array in both.arrays:
        array[:, 1, :2] = 7.0
    both.lengths[1] = 2
    cache.widen(6)
    cache.take(0, both, 1)
    assert cache.lengths.tolist() == [2]
    assert (cache.layers[0].keys[0, :2] == 7).all()


def test_a_token_has_its_number_whatever_else_is_there():
    numbers = RowNumbers()
    alone = [torch.rand(4096, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    assert numbers.join(torch.Generator().manual_seed(0), 5) == alone[0][0]
    numbers.join(torch.Generator().manual_seed(1), 9)
    numbers.join(torch.Generator().manual_seed(2), 7)
    numbers.leave(0)  # now 2, 1
    numbers.counts = torch.tensor([3, 6])
    assert torch.equal(numbers.draw(2), torch.stack([alone[2][3:5], alone[1][6:8]]))
    assert numbers.draw(40).shape == (2, 40)  # beyond what a row may have: any


@pytest.mark.parametrize("shared", [True, False])
def test_each_row_is_processed_as_by_itself(shared):
    generator = torch.Generator().manual_seed(0)
    kinds = [
        Processor(0.0),
        Processor(1.0, top_k=3),
        Processor(0.0),
        Processor(0.7, repetition_penalty=1.5),
    ]
    both = RowProcessors(kinds)
    assert both.stateful and not both.greedy
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1], [-1, 0, 0], [-1, 0, 1]])
    shape = TreeShape(parents[1:2] if shared else parents, 2, 2)
    tokens = torch.randint(V, (4, 3), generator=generator)
    logits = torch.randn(4, 3, V, generator=generator)
    said = torch.randint(V, (4, 6), generator=generator)
    history = History(said, torch.tensor([6, 4, 5, 3]), 2)
    found = both.probs(logits, history, DraftTree(tokens, shape))
    for row, own in enumerate(kinds):
        some = torch.tensor([row])
        alone = TreeShape(shape.parents[[0 if shared else row]], 2, 2)
        tree = DraftTree(tokens[some], alone)
        wanted = own.probs(logits[some], history.rows(some), tree)
        torch.testing.assert_close(found[some], wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_which_rows_are_not_finite(bad):
    """A token that is not allowed is -inf, and no fault of its row."""
    logits = torch.zeros(4, 2, V)
    logits[0, 1, 3] = bad
    logits[1, 0, 4] = -float("inf")
    logits[2, 0, 5] = bad
    target = SimpleNamespace(logits=logits, name="a/model", processor=RowProcessors())
    found = RowsTarget.spoilt(target)
    assert sorted(found) == [0, 2]
    assert "logits must be finite" in str(found[0])
