import pytest
import torch

from specmm.shape.trees import NAMED, branching, delayed, make_tree, spine


@pytest.mark.parametrize(
    ("name", "counts"),
    [("naive_extend_57", [1, 5, 13, 16, 14, 9]), ("mc_sim_7b_63", [1, 4, 8, 8, 3, 2])],
)
def test_published_lists(name, counts):
    shape, choices = make_tree(name), NAMED[name]
    assert shape.size == len(choices) + 1 == len(set(choices)) + 1
    assert torch.bincount(shape.depths[0]).tolist() == counts


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown tree 'medusa'.*mc_sim_7b_63"):
        make_tree("medusa")
    for odd, said in ((1.5, "1.5"), (3, "3"), ({1: 2}, "a dict")):
        with pytest.raises(ValueError, match=rf"or numbers such as \(3, 2, 1\), got {said}"):
            make_tree(odd)


def test_branching():
    shape = branching([4, 2, 1])
    assert torch.bincount(shape.depths[0]).tolist() == [1, 4, 8, 8]
    assert shape.parents[0].tolist() == [-1, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, *range(5, 13)]
    assert (shape.width, shape.depth) == (4, 3)


def test_branching_of_ones_is_a_chain():
    assert branching([1, 1, 1]).parents.tolist() == [[-1, 0, 1, 2]]


def test_spine_grows_from_rank_zero_only():
    shape = spine([3, 1, 2])
    assert shape.parents[0].tolist() == [-1, 0, 0, 0, 1, 4, 4]
    inner = shape.inner.tolist()
    assert all(int(shape.ranks[0, n]) == 0 for n in inner)


@pytest.mark.parametrize("make", [branching, spine])
@pytest.mark.parametrize("widths", [[], [2, 0]])
def test_widths_must_be_positive(make, widths):
    with pytest.raises(ValueError, match="widths must be"):
        make(widths)


def test_delayed_trunk_then_branches():
    shape = delayed(2, 3, 2)
    assert shape.parents[0].tolist() == [-1, 0, 1, 2, 2, 2, 3, 4, 5]
    assert delayed(0, 2, 2).parents[0].tolist() == [-1, 0, 0, 1, 2]
    with pytest.raises(ValueError, match="branches must be at least 1, got 0"):
        delayed(1, 0, 2)
