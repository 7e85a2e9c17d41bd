"""The preallocated KV cache, whose rows have different lengths.

Slots [0, capacity) hold committed tokens. The ``scratch`` slots from ``front`` on hold the nodes of
a round's tree; accepted nodes are then moved after the row's committed tokens. If shapes may
change, the front follows the longest row, so that no round attends to empty slots; otherwise it is
the capacity. The moves and, where Triton runs, tree attention are kernels (:mod:`specmm.kernels`).

Shape letters: A arrays (keys and values of layers alike), G guidance branches (1, or 2 for [cond;
uncond]), B batch, R = G·B rows, S slots, T new tokens, H heads, D head width, N tree nodes, M most
nodes kept a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from specmm.core.state import with_one, without
from specmm.core.tree import TreeShape
from specmm.kernels.backend import backend
from specmm.kernels.kv_commit import commit
from specmm.kernels.tree_attention import ChainsMask, RaggedMask, TreeMask
from specmm.kernels.tree_attention.masks import ragged
from specmm.loading.hardware import untouched_zeros
from specmm.programs.batch_invariant import any_invariant


def branched(x: Tensor, branches: int) -> Tensor:
    """``x`` [B, ...] repeated for every guidance branch, [G·B, ...]; no copy if there is one."""
    return x if branches == 1 else x.repeat(branches, *[1] * (x.ndim - 1))


Pair: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values."""


class Views:
    """Views of the slots that the next forward writes and attends to, for all layers, in ``arrays``
    [A, R, S, H, D].

    They are made for all layers at once, and remade only when the slots change: layer by layer they
    would be a tenth of all PyTorch calls at batch 1. ``halves`` locate each layer's keys and
    values: the array, and the index in it.
    """

    def __init__(
        self, arrays: Sequence[Tensor], halves: Sequence[tuple[tuple[int, int], tuple[int, int]]]
    ) -> None:
        self.arrays = arrays
        self.halves = halves
        self.asked: tuple[int, ...] = ()
        self.fresh: list[tuple[Tensor, ...]] = []
        self.attended: list[tuple[Tensor, ...]] = []

    def of(self, layer: int, first: int, stop: int, count: int, axis: int) -> tuple[Pair, Pair]:
        """Keys and values of ``count`` slots from ``first`` on, and of the slots below ``stop``."""
        if self.asked != (first, stop, count, axis):
            self.asked = (first, stop, count, axis)
            turned = [x if axis == 1 else x.transpose(2, 3) for x in self.arrays]
            self.fresh = [x.narrow(axis + 1, first, count).unbind() for x in turned]
            self.attended = [x.narrow(axis + 1, 0, stop).unbind() for x in turned]
        (a, i), (b, j) = self.halves[layer]
        fresh, attended = self.fresh, self.attended
        return (fresh[a][i], fresh[b][j]), (attended[a][i], attended[b][j])


class ChainViews:
    """Views for all layers of ``arrays`` [A, R, S, H, D] where each row has a chain right behind
    its tokens: ``sizes`` nodes after ``lengths`` slots. For ``halves`` see :class:`Views`.
    """

    def __init__(
        self,
        arrays: Sequence[Tensor],
        halves: Sequence[tuple[tuple[int, int], tuple[int, int]]],
        lengths: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self.halves = halves
        slots = arrays[0].shape[2]
        starts = [row * slots + length for row, length in enumerate(lengths)]
        ranges = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self.places = torch.tensor([*chain(*ranges)], device=arrays[0].device)  # [M]
        self.flat = [x.flatten(1, 2).unbind() for x in arrays]
        stops = [length + size for length, size in zip(lengths, sizes, strict=True)]
        self.attended = [
            [x[:, row : row + 1, :stop].transpose(2, 3).unbind() for row, stop in enumerate(stops)]
            for x in arrays
        ]

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Pair]:
        """Store the keys ``k`` and values ``v`` [1, H, M, D] of a ``layer``, row after row; returns
        those that each row attends, [1, H, S', D].
        """
        (a, i), (b, j) = self.halves[layer]
        self.flat[a][i].index_copy_(0, self.places, k[0].transpose(0, 1))
        self.flat[b][j].index_copy_(0, self.places, v[0].transpose(0, 1))
        each = zip(self.attended[a], self.attended[b], strict=True)
        return [(keys[i], values[j]) for keys, values in each]


class Memory:
    """One layer's slots: where new keys and values go, and how many slots are attended to."""

    def __init__(self, keys: Tensor, values: Tensor, views: Views, layer: int) -> None:
        self.keys = keys  # [R, S, H, D]
        self.values = values
        self.first = 0
        self.stop = 0
        self.views = views
        self.layer = layer

    def before(self) -> tuple[Tensor, Tensor]:
        """Keys and values [R, ``first``, H, D] of the slots before the next one to write."""
        return self.keys[:, : self.first], self.values[:, : self.first]

    def write(self, k: Tensor, v: Tensor, axis: int = 1) -> tuple[Tensor, Tensor]:
        """Store ``k`` and ``v`` [R, T, H, D] from slot ``first`` on; return the first ``stop``.
        With ``axis`` 2 all are [R, H, T, D].
        """
        if torch.compiler.is_compiling():  # a program has views of its own
            keys, values = along(self.keys, axis), along(self.values, axis)
            first, count = self.first, k.shape[axis]
            fresh = keys.narrow(axis, first, count), values.narrow(axis, first, count)
            attended = keys.narrow(axis, 0, self.stop), values.narrow(axis, 0, self.stop)
        else:
            request = (self.first, self.stop, k.shape[axis], axis)
            fresh, attended = self.views.of(self.layer, *request)
        fresh[0].copy_(k)
        fresh[1].copy_(v)
        return attended


class StaticMemory:
    """One layer's slots [R, S, H, D], written at a tensor ``place`` [1]; all are attended to."""

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.place = place
        self.first = 0
        self.stop = keys.shape[1]

    def write(self, k: Tensor, v: Tensor, axis: int = 1) -> tuple[Tensor, Tensor]:
        """Store ``k`` and ``v`` [R, 1, H, D]; return all slots. ``axis`` 2: [R, H, 1 or S, D]."""
        keys, values = along(self.keys, axis), along(self.values, axis)
        keys.index_copy_(axis, self.place, k)
        values.index_copy_(axis, self.place, v)
        return keys, values


def along(x: Tensor, axis: int) -> Tensor:
    """``x`` [R, S, H, D] with its slots along ``axis`` 1 or 2."""
    return x if axis == 1 else x.transpose(1, 2)


@dataclass(frozen=True)
class LayerSize:
    """A layer's entry for a token: ``heads`` H of width ``keys`` and of width ``values``."""

    heads: int
    keys: int
    values: int


def alike(layers: int, heads: int, head_dim: int) -> tuple[LayerSize, ...]:
    """The sizes of ``layers`` equal layers."""
    return (LayerSize(heads, head_dim, head_dim),) * layers


@dataclass(frozen=True)
class CacheSize:
    """Sizes of a cache; ``capacity`` and ``scratch`` in tokens."""

    layers: Sequence[LayerSize]
    batch: int
    branches: int
    capacity: int
    scratch: int

    @property
    def rows(self) -> int:
        """R."""
        return self.batch * self.branches

    def width(self, dtype: torch.dtype) -> int:
        """Bytes that the largest layer stores of a token."""
        widths = (layer.heads * (layer.keys + layer.values) for layer in self.layers)
        return max(widths, default=1) * dtype.itemsize


class TreeBias(NamedTuple):
    """The additive mask ``whole`` [R, 1, N, S] of the tree with ancestors ``of``, and a view of its
    columns before the scratch region.
    """

    of: Tensor
    whole: Tensor
    committed: Tensor


class TreeBiases:
    """The masks of the last ``MOST`` trees."""

    MOST = 3  # a chain that ends early has so many lengths

    def __init__(self) -> None:
        self._kept: list[TreeBias] = []

    def find(self, ancestors: Tensor) -> TreeBias | None:
        """The mask made for this same tensor object, if it is still stored."""
        return next((bias for bias in self._kept if bias.of is ancestors), None)

    def once(self, ancestors: Tensor, make: Callable[[], TreeBias]) -> TreeBias:
        """The stored mask of ``ancestors``, or one by ``make``, which replaces the oldest."""
        bias = self.find(ancestors)
        if bias is None:
            bias = make()
            self._kept = [*self._kept, bias][-self.MOST :]
        return bias


NEAR = 16  # slots by which the front moves: masks are kept as long as it stays


class Cache:
    """Keys and values of all layers in ``arrays``, one [A, R, S, H, D] for each H and D, and the
    committed ``lengths`` [B] of the rows.
    """

    state: ClassVar[tuple[str, ...]] = ("arrays", "lengths", "hidden_prefix")
    fixed: ClassVar[tuple[str, ...]] = ("arrays",)  # layers have views of them

    def __init__(
        self, size: CacheSize, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.size = size
        self.slots = size.capacity + size.scratch
        self.dtype = dtype
        halves = [(x.heads, width) for x in size.layers for width in (x.keys, x.values)]
        # no inference tensors: compiled programs only write to tensors whose views are tracked
        with torch.inference_mode(False):
            arrays = {
                half: untouched_zeros(
                    (halves.count(half), size.rows, self.slots, *half), dtype, device
                )
                for half in dict.fromkeys(halves)
            }
            self.arrays = list(arrays.values())
            self.memory = self.arrays  # for all rows that there is room for
            numbers = [halves[:i].count(half) for i, half in enumerate(halves)]
            where = [list(arrays).index(half) for half in halves]
            slots = list(zip(where, numbers, strict=True))
            self.pairs = list(zip(slots[::2], slots[1::2], strict=True))
            views = Views(self.arrays, self.pairs)
            self.layers = [
                Memory(self.arrays[a][i], self.arrays[b][j], views, layer)
                for layer, ((a, i), (b, j)) in enumerate(self.pairs)
            ]
            self.lengths = torch.zeros(size.batch, dtype=torch.int64, device=device)
        # [R, capacity] bool: padding that no row may attend
        self.hidden_prefix: Tensor | None = None
        self.near = False  # whether the front follows the longest row
        self.front = size.capacity
        self.chains: ChainViews | None = None  # of chains that lie behind their rows' tokens
        self._columns = torch.arange(size.capacity, device=device)
        self._open = torch.tensor(0.0, dtype=dtype, device=device)
        self._closed = torch.tensor(float("-inf"), dtype=dtype, device=device)
        self._bias: TreeBias | None = None  # the last tree's
        self._biases = TreeBiases()

    @classmethod
    def again(
        cls,
        kept: Cache | None,
        size: CacheSize,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Cache:
        """An empty cache: ``kept``, emptied, if size, dtype and device agree, else a new cache."""
        facts = size, dtype, torch.device(device)
        if kept is None or (kept.size, kept.dtype, kept.device) != facts:
            return cls(size, dtype, device)
        for array in (*kept.arrays, kept.lengths):  # masked slots must at least be finite
            array.zero_()
        kept.hidden_prefix = None
        kept.front = size.capacity
        return kept

    @property
    def device(self) -> torch.device:
        """The device of the arrays."""
        return self.lengths.device

    def aim(self, first: int, stop: int) -> None:
        """Let the next forward write from slot ``first`` on and attend to slots below ``stop``."""
        self.chains = None
        for layer in self.layers:
            layer.first, layer.stop = first, stop

    def aim_at_chains(self, sizes: Sequence[int]) -> ChainsMask:
        """The next forward writes a chain of ``sizes`` nodes right behind each row's tokens, where
        those that are kept stay; returns what they attend.
        """
        lengths = self.lengths.tolist()
        self.chains = ChainViews(self.arrays, self.pairs, lengths, sizes)
        return ChainsMask.of(lengths, sizes, self._closed)

    def aim_at_tree(self, nodes: int) -> None:
        """Let the next forward write a tree of ``nodes`` nodes and attend to all slots up to it."""
        if self._follows:
            longest = int(self.lengths.max())
            front = min(-(-longest // NEAR) * NEAR, self.size.capacity)
            if front != self.front:
                self.front, self._bias, self._biases = front, None, TreeBiases()
        self.aim(self.front, self.front + self._reach(nodes))

    def _reach(self, nodes: int) -> int:
        """Scratch slots that a tree of ``nodes`` nodes attends to."""
        return nodes if self._follows else self.size.scratch

    @property
    def _follows(self) -> bool:
        """Whether the front follows the rows' lengths; not within batch invariance."""
        return self.near and not any_invariant()

    def tree_mask(self, shape: TreeShape) -> Tensor | TreeMask | RaggedMask:
        """The attention mask of a tree in the scratch region: a dense bias, in groups of rows if
        their lengths differ much, or words for Triton.
        """
        if backend(self.lengths.device) == "torch":
            bias = self.tree_bias(shape.ancestors)
            if not self._follows:
                return bias
            return ragged(bias, self.lengths.tolist(), self.front, self.size.width(self.dtype))
        hidden = None if self.hidden_prefix is None else self.hidden_prefix[:, : self.front]
        return TreeMask(shape.ancestor_words, self.lengths, self.front, hidden)

    def tree_bias(self, ancestors: Tensor) -> Tensor:
        """Additive mask [R, 1, N, S] for a tree in the scratch region.

        A node attends to its row's committed tokens and its ``ancestors`` [1 or B, N, N]. The
        ancestors' part is written only if ``ancestors`` is not one of the last few tensors, so once
        for a static tree, or once for each length of a chain.
        """
        bias = self.bias_for(ancestors)
        bias.committed.copy_(self.prefix_bias()[:, None, : self.front])
        return bias.whole

    def bias_for(self, ancestors: Tensor) -> TreeBias:
        """The mask for a tree with ``ancestors`` [1 or B, N, N]. Its columns for committed tokens
        are stale: call :meth:`tree_bias` to refresh them.

        A compiled program uses the mask of the previous call, or makes a new one.
        """
        if self._bias is None or self._bias.of is not ancestors:
            make = partial(self._new_bias, ancestors)
            compiling = torch.compiler.is_compiling()
            self._bias = make() if compiling else self._biases.once(ancestors, make)
        return self._bias

    def _new_bias(self, ancestors: Tensor) -> TreeBias:
        """The mask of a tree with ``ancestors`` [1 or B, N, N]; other columns are closed."""
        nodes, first = ancestors.shape[-1], self.front
        bias = self._closed.repeat(self.size.rows, 1, nodes, first + self._reach(nodes))
        visible = branched(ancestors.expand(self.size.batch, -1, -1), self.size.branches)
        bias[:, 0, :, first : first + nodes].masked_fill_(visible, 0)
        return TreeBias(ancestors, bias, bias[:, 0, :, :first])

    def prefix_bias(self) -> Tensor:
        """Additive mask [R, capacity]: open for each row's committed tokens except padding."""
        visible = self._columns < branched(self.lengths, self.size.branches)[:, None]
        if self.hidden_prefix is not None:
            visible = visible & ~self.hidden_prefix
        return torch.where(visible, self._open, self._closed)

    def keep(self, path: Tensor, kept: Tensor) -> None:
        """Move the first ``kept`` [B] nodes of ``path`` [B, M] after the committed tokens."""
        for array in self.arrays if self.chains is None else ():
            commit(array, path, kept, self.lengths, self.front)
        self.chains = None
        self.lengths += kept

    def join(self) -> None:
        """Add an empty row at the end; not under guidance."""
        rows = self.size.batch + 1
        if rows > self.memory[0].shape[1]:
            self.widen(rows=2 * rows)
        self.lengths = with_one(self.lengths)
        self._show(rows)

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place. New rows reuse the memory."""
        last = self.size.batch - 1
        if row != last:
            slots = int(self.lengths[last])
            for array in self.arrays:
                array[:, row, :slots] = array[:, last, :slots]
        self.lengths = without(self.lengths, row)
        self._show(last)

    def clear(self, row: int) -> None:
        """Zero the slots of ``row``: even masked slots must be finite."""
        for array in self.arrays:
            array[:, row] = 0

    def widen(self, capacity: int = 0, rows: int = 0) -> None:
        """Make room for at least ``rows`` rows of ``capacity`` tokens."""
        now, count = self.memory[0].shape[1], self.size.batch
        if capacity > self.size.capacity or rows > now:
            room = dataclasses.replace(
                self.size, batch=max(rows, now), capacity=max(capacity, self.size.capacity)
            )
            self._move(Cache(room, self.dtype, self.device))
            self._show(count)

    def _move(self, other: Cache) -> None:
        """Move the tokens into the memory of ``other``, an empty, larger cache, and adopt it."""
        slots = int(self.lengths.max()) if len(self.lengths) else 0
        for new, array in zip(other.arrays, self.arrays, strict=True):
            new[:, : self.size.rows, :slots] = array[:, :, :slots]
        self.memory, self.slots = other.arrays, other.slots
        self.size = dataclasses.replace(other.size, batch=self.size.batch)
        self._columns = other._columns

    def _show(self, rows: int) -> None:
        """Let the first ``rows`` rows of the memory be the batch."""
        self.size = dataclasses.replace(self.size, batch=rows)
        self.arrays = [array[:, :rows] for array in self.memory]
        views = Views(self.arrays, self.pairs)
        for layer, ((a, i), (b, j)) in zip(self.layers, self.pairs, strict=True):
            layer.keys, layer.values, layer.views = self.arrays[a][i], self.arrays[b][j], views
        self.front = self.size.capacity
        self._bias, self._biases = None, TreeBiases()

    def take(self, row: int, other: Cache, source: int = 0) -> None:
        """Replace ``row``'s tokens by the tokens of sample ``source`` of ``other``.

        Raises ``ValueError`` if ``other`` has more capacity than this cache.
        """
        rows = slice(row, None, self.size.batch)  # in all guidance branches
        from_rows = slice(source, None, other.size.batch)
        slots = other.size.capacity
        if slots > self.size.capacity:
            raise ValueError(
                f"a sample must fit the {self.size.capacity} slots of its row, got {slots}"
            )
        kept = int(other.lengths[source])
        for ours, theirs in zip(self.arrays, other.arrays, strict=True):
            ours[:, rows, :kept] = theirs[:, from_rows, :kept]
        self.lengths[row] = other.lengths[source]
        hidden = other.hidden_prefix
        if self.hidden_prefix is None and hidden is not None:
            self.hidden_prefix = hidden.new_zeros(self.size.rows, self.size.capacity)
        if self.hidden_prefix is not None:
            self.hidden_prefix[rows, :slots] = False if hidden is None else hidden[from_rows]
