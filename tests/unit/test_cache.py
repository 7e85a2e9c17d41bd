"""The cache against one that is a list per row.

Shape letters: L layers, G guidance branches, B batch, R = G·B rows, S slots, H heads, D head width,
N tree nodes.
"""

import dataclasses

import pytest
import torch

from specmm.core import cache as cache_module
from specmm.core.cache import Cache, CacheSize, LayerSize, alike
from specmm.core.tree import TreeShape

SIZE = CacheSize(alike(2, 2, 3), batch=3, branches=2, capacity=9, scratch=5)
MIXED = dataclasses.replace(
    SIZE, layers=(LayerSize(2, 3, 3), LayerSize(1, 5, 3), LayerSize(2, 3, 4))
)


class Lists:
    """Committed entries of every layer and row, in plain lists."""

    def __init__(self, size):
        self.rows = [[[] for _ in range(SIZE.rows)] for _ in size.layers]

    def keep(self, entries, path, kept):
        """``entries``: for each layer keys and values [R, N, H, D]."""
        for layer, (keys, values) in zip(self.rows, entries, strict=True):
            for r, row in enumerate(layer):
                b = r % SIZE.batch
                row += [(keys[r, n], values[r, n]) for n in path[b][: kept[b]]]


def agree(cache, lists):
    for memory, layer in zip(cache.layers, lists.rows, strict=True):
        for r, row in enumerate(layer):
            assert int(cache.lengths[r % SIZE.batch]) == len(row)
            for slot, (key, value) in enumerate(row):
                assert torch.equal(memory.keys[r, slot], key)
                assert torch.equal(memory.values[r, slot], value)


def write(cache, nodes, generator):
    """Random entries of a tree of ``nodes`` written to the scratch region of every layer."""
    cache.aim_at_tree(nodes)
    attended = cache.front + (nodes if cache.near else SIZE.scratch)
    entries = [
        [
            torch.randn(SIZE.rows, nodes, layer.heads, width, generator=generator)
            for width in (layer.keys, layer.values)
        ]
        for layer in cache.size.layers
    ]
    for memory, (keys, values) in zip(cache.layers, entries, strict=True):
        seen_keys, seen_values = memory.write(keys, values)
        assert seen_keys.shape[1] == seen_values.shape[1] == attended
        assert torch.equal(seen_keys[:, cache.front : cache.front + nodes], keys)
    return entries


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("size", [SIZE, MIXED])
def test_rows_keep_what_they_accepted(size, near, monkeypatch):
    monkeypatch.setattr(cache_module, "NEAR", 2)
    cache = Cache(size, torch.float32)
    cache.near = near
    lists = Lists(size)
    generator = torch.Generator().manual_seed(0)
    rounds = [
        (5, [[0, 1, 3], [0, 2, 4], [0, 4, -1]], [3, 2, 1]),
        (5, [[0, 3, 4], [0, -1, -1], [0, 1, 2]], [2, 1, 3]),
        (3, [[0, 2, -1], [0, 1, 2], [0, -1, -1]], [2, 3, 0]),  # a finished row keeps nothing
    ]
    for nodes, path, kept in rounds:
        entries = write(cache, nodes, generator)
        cache.keep(torch.tensor(path), torch.tensor(kept))
        lists.keep(entries, path, kept)
        agree(cache, lists)
    assert cache.lengths.tolist() == [7, 6, 4]
    assert cache.front == (6 if near else SIZE.capacity), "of the longest row before the round"
    entries = write(cache, 2, generator)
    cache.keep(torch.tensor([[0, 1]] * 3), torch.tensor([2, 2, 1]))  # the first row is full now
    lists.keep(entries, [[0, 1]] * 3, [2, 2, 1])
    agree(cache, lists)


def test_the_scratch_region_and_the_spare_slot_are_never_attended_as_committed():
    cache = Cache(SIZE, torch.float32)
    cache.lengths += torch.tensor([9, 0, 4])
    bias = cache.prefix_bias()
    assert bias.shape == (SIZE.rows, SIZE.capacity)
    assert ((bias == 0).sum(1) == cache.lengths.repeat(2)).all()
    assert bool((bias[bias != 0] == float("-inf")).all())


def naive_bias(cache, ancestors, hidden):
    rows, nodes = SIZE.rows, ancestors.shape[-1]
    bias = torch.full((rows, 1, nodes, cache.slots), float("-inf"))
    for r in range(rows):
        b = r % SIZE.batch
        for n in range(nodes):
            for slot in range(int(cache.lengths[b])):
                if hidden is None or not hidden[r, slot]:
                    bias[r, 0, n, slot] = 0
            for m in range(nodes):
                if ancestors[b if len(ancestors) > 1 else 0, n, m]:
                    bias[r, 0, n, SIZE.capacity + m] = 0
    return bias


@pytest.mark.parametrize("padded", [False, True])
def test_tree_masks(padded):
    cache = Cache(SIZE, torch.float32)
    if padded:
        cache.hidden_prefix = torch.zeros(SIZE.rows, SIZE.capacity, dtype=torch.bool)
        cache.hidden_prefix[1::3, :2] = True
    static = TreeShape.from_parents([-1, 0, 0, 1, 1])
    as_large = TreeShape.chain(4)
    ragged = TreeShape(torch.tensor([[-1, 0, 1], [-1, 0, 0], [-1, 0, 1]]), depth=2, width=2)
    for shape, lengths in (
        (static, [3, 4, 5]),
        (static, [5, 4, 9]),
        (ragged, [6, 6, 9]),
        (static, [2, 3, 4]),
        (as_large, [2, 3, 4]),
    ):
        # the mask of a tree seen before must follow the lengths
        cache.lengths = torch.tensor(lengths)
        expected = naive_bias(cache, shape.ancestors, cache.hidden_prefix)
        assert torch.equal(cache.tree_bias(shape.ancestors), expected)


@pytest.mark.parametrize("here, there", [(False, True), (True, False), (True, True)])
def test_a_row_that_is_taken_brings_its_padding(here, there):
    cache = Cache(SIZE, torch.float32)
    other = Cache(dataclasses.replace(SIZE, batch=1, capacity=4), torch.float32)
    padding = {cache: here, other: there}
    for made, hidden in padding.items():
        if hidden:
            made.hidden_prefix = torch.zeros(made.size.rows, made.size.capacity, dtype=torch.bool)
            made.hidden_prefix[:, : 1 if made is cache else 2] = True
    cache.take(1, other)
    rows = cache.hidden_prefix[1 :: SIZE.batch].sum(1).unique().tolist()
    assert rows == [2 if there else 0] and cache.hidden_prefix[0].sum() == here


def test_plain_writes_show_what_is_there_so_far():
    cache, generator = Cache(SIZE, torch.float32), torch.Generator().manual_seed(1)
    entries = torch.randn(4, SIZE.rows, 1, 2, 3, generator=generator)
    for step, entry in enumerate(entries):
        cache.aim(step, step + 1)
        keys, values = cache.layers[1].write(entry, -entry)
        assert torch.equal(keys, entries[: step + 1].transpose(0, 1).flatten(1, 2))
        assert torch.equal(values, -keys)


@pytest.mark.parametrize("shape", [TreeShape.chain(2), TreeShape.from_parents([-1, 0, 0, 1])])
def test_a_near_front_hides_the_same(shape, monkeypatch):
    """Committed tokens, padding and ancestors are what is seen, wherever the tree lies."""
    monkeypatch.setattr(cache_module, "NEAR", 4)
    masks = []
    for near in (False, True):
        cache = Cache(SIZE, torch.float32)
        cache.near = near
        cache.hidden_prefix = torch.zeros(SIZE.rows, SIZE.capacity, dtype=torch.bool)
        cache.hidden_prefix[1, :2] = True
        for lengths in ([2, 4, 0], [5, 4, 1]):
            cache.lengths.copy_(torch.tensor(lengths))
            cache.aim_at_tree(shape.size)
            bias = cache.tree_bias(shape.ancestors)
            front = cache.front
            assert bias.shape[-1] == front + (shape.size if near else SIZE.scratch)
            masks.append((bias[..., :5].clone(), bias[..., front:].clone(), front))
    for far, close in zip(masks[:2], masks[2:], strict=True):
        width = min(5, close[2])
        assert torch.equal(far[0][..., :width], close[0][..., :width])
        assert torch.equal(far[1][..., : shape.size], close[1])
        assert bool((far[1][..., shape.size :] == float("-inf")).all())
    assert [front for *_, front in masks] == [9, 9, 4, 8]


def test_bf16_masks_are_bf16():
    cache = Cache(SIZE, torch.bfloat16)
    assert cache.tree_bias(TreeShape.chain(2).ancestors).dtype == torch.bfloat16


def test_memory_is_used_again_for_the_same_alone():
    first = Cache(SIZE, torch.float32)
    first.arrays[0].fill_(float("nan"))
    first.lengths += 2
    first.hidden_prefix = torch.ones(6, 9, dtype=torch.bool)
    again = Cache.again(first, SIZE, torch.float32)
    assert again is first and not again.lengths.any() and again.hidden_prefix is None
    assert all(not array.any() for array in again.arrays)
    for size, dtype in ((SIZE, torch.float64), (MIXED, torch.float32)):
        other = Cache.again(first, size, dtype)
        assert other is not first and (other.size, other.dtype) == (size, dtype)
    assert Cache.again(None, SIZE, torch.float32).size == SIZE


def test_chains_are_written_behind_their_rows_and_stay_there():
    """Each row attends its own tokens and its chain; the slots of others do not change."""
    cache = Cache(CacheSize((LayerSize(2, 4, 3),) * 2, 3, 1, 8, 4), torch.float32)
    cache.lengths[:] = torch.tensor([5, 1, 3])
    sizes = [2, 1, 4]
    mask = cache.aim_at_chains(sizes)
    k, v = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 3)
    held = cache.chains.write(1, k, v)
    own = k.split(sizes, 2), v.split(sizes, 2)
    each = zip(cache.lengths.tolist(), sizes, held, *own, strict=True)
    for row, (length, size, (keys, values), own_k, own_v) in enumerate(each):
        assert keys.shape == (1, 2, length + size, 4) and values.shape == (1, 2, length + size, 3)
        assert torch.equal(keys[:, :, length:], own_k) and torch.equal(values[:, :, length:], own_v)
        assert not keys[:, :, :length].any() and not cache.layers[0].keys[row].any()
        seen = torch.ones(size, length + size).tril(length)
        bias = mask.biases[row]
        assert (bias is None) == (size == 1)
        assert bias is None or torch.equal(bias == 0, seen.bool())
    before = [array.clone() for array in cache.arrays]
    cache.keep(torch.arange(4).expand(3, -1), torch.tensor([2, 1, 3]))
    assert cache.lengths.tolist() == [7, 2, 6]
    assert all(map(torch.equal, cache.arrays, before))
    cache.aim_at_tree(1)  # which moves what is kept
    for layer in cache.layers:
        layer.write(torch.ones(3, 1, 2, 4), torch.ones(3, 1, 2, 3))
    cache.keep(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    assert (cache.layers[0].keys[2, 6] == 1).all()
