"""The slots that a tree's nodes attend to: as words of ancestor bits, and as a dense mask.

Shape letters: R rows, B rows of lengths, T tree nodes, S slots, W = ceil(T / 64) words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class TreeMask:
    """The slots that each node of a tree attends to: its row's committed slots and its ancestors'.

    ``words`` [1 or B, T, W] int64 is :attr:`specmm.core.tree.TreeShape.ancestor_words`; ``lengths``
    [B] int64 counts committed slots, from slot 0 on; node j lies in slot ``first`` + j; ``hidden``
    [R, up to S] bool hides committed ones.
    """

    words: Tensor
    lengths: Tensor
    first: int
    hidden: Tensor | None = None


class RowGroup(NamedTuple):
    """Rows from ``start`` to ``stop``, which attend to their first ``slots`` slots and the tree's
    under an additive ``bias`` [rows, 1, up to T, ``slots`` + T].
    """

    start: int
    stop: int
    slots: int
    bias: Tensor


@dataclass(frozen=True)
class RaggedMask:
    """The mask of rows of very different lengths, which run in ``groups``: a row does not read as
    many keys as the longest row. The tree lies from slot ``first`` on.
    """

    groups: Sequence[RowGroup]
    first: int


@dataclass(frozen=True)
class ChainsMask:
    """Chains of ``sizes`` [R] nodes, each right behind its row's committed slots: a node attends
    those and the chain up to itself, by an additive bias [T, S] a row (None: there is one node).
    """

    sizes: Sequence[int]
    biases: Sequence[Tensor | None]

    @classmethod
    def of(cls, lengths: Sequence[int], sizes: Sequence[int], closed: Tensor) -> ChainsMask:
        """The mask of rows with ``lengths`` [R] committed slots; ``closed`` is -inf."""
        longest = max(lengths)
        steps = torch.triu(closed.expand(max(sizes), max(sizes)), 1)
        band = torch.nn.functional.pad(steps, (longest, 0))
        pairs = zip(lengths, sizes, strict=True)
        return cls(
            sizes,
            [None if n == 1 else band[:n, longest - before : longest + n] for before, n in pairs],
        )


class Nodes:
    """``rows`` rows of ``most`` nodes: all nodes or, of each row, the first ``sizes`` [R]."""

    def __init__(self, rows: int, most: int, sizes: Tensor | None = None) -> None:
        self.rows = rows
        self.most = most
        self.sizes = sizes
        self.size = rows * most  # M
        if sizes is not None:
            used = torch.arange(most, device=sizes.device) < sizes[:, None]
            self.there = used.flatten().nonzero()[:, 0]  # [M], by number
            self.size = len(self.there)
            self.back = self.there.new_zeros(rows * most)  # an index of ``there``, or any
            self.back[self.there] = torch.arange(self.size, device=sizes.device)

    def flat(self, x: Tensor, axis: int) -> Tensor:
        """``x`` [..., R, T, ...], whose rows lie along ``axis``, as [..., M, ...]."""
        tokens = x.flatten(axis, axis + 1)
        return tokens if self.sizes is None else tokens.index_select(axis, self.there)

    def rows_of(self, x: Tensor, axis: int) -> Tensor:
        """``x`` [..., M, ...], whose nodes lie along ``axis``, as [..., R, T, ...]; nodes that a
        row lacks get the values of some other node.
        """
        padded = x if self.sizes is None else x.index_select(axis, self.back)
        return padded.unflatten(axis, (self.rows, self.most))


class Part(NamedTuple):
    """The ``nodes`` of some rows, and their mask over a separate cache."""

    nodes: Nodes
    mask: TreeMask | ChainsMask

    def rows_of(self, x: Tensor, axis: int) -> Tensor:
        """``x`` [1, ..., M, ...], whose tokens lie along ``axis``, as [R, ..., T, ...]."""
        return self.nodes.rows_of(x[0], axis - 1).movedim(axis - 1, 0)


class PackedMask:
    """Masks of several ``parts`` whose tokens run through the layers as one sequence [1, M]: part
    by part and, within a part, row by row. ``held``: each part's keys and values in the current
    layer, [R, K, S, D], or of chains [1, K, S', D] for each row.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.held: list[Any] = []

    def split(self, x: Tensor, axis: int) -> Sequence[Tensor]:
        """``x`` [1, ..., M, ...] with tokens along ``axis``, by parts."""
        return x.split([part.nodes.size for part in self.parts], axis)

    def rows_of(self, x: Tensor, axis: int) -> list[Tensor]:
        """``x`` [1, ..., M, ...] with tokens along ``axis``, as [R, ..., T, ...] of each part."""
        pairs = zip(self.parts, self.split(x, axis), strict=True)
        return [part.rows_of(piece, axis) for part, piece in pairs]

    def joined(self, each: Sequence[Tensor], axis: int = 0) -> Tensor:
        """The inverse of :meth:`rows_of`: ``each`` part's [..., R, T, ...], whose rows lie along
        ``axis``, as [..., M, ...].
        """
        pairs = zip(self.parts, each, strict=True)
        return torch.cat([part.nodes.flat(x, axis) for part, x in pairs], axis)


APART = 2**18  # bytes of keys and values that are read while one more group begins


def ragged(bias: Tensor, lengths: Sequence[int], first: int, width: int) -> Tensor | RaggedMask:
    """The additive mask ``bias`` [R, 1, T, S] of a tree from slot ``first`` on, in groups of rows
    if that is faster. Row r has committed ``lengths[r % B]`` slots, of ``width`` bytes a layer.
    """
    blocks: list[tuple[int, int, int]] = []
    for row in range(len(bias)):
        length = lengths[row % len(lengths)]
        start, _, most = blocks[-1] if blocks else (row, row, 0)
        together = (row + 1 - start) * max(most, length)
        if blocks and together <= (row - start) * most + length + APART // width:
            blocks[-1] = start, row + 1, max(most, length)
        else:
            blocks.append((row, row + 1, length))
    if len(blocks) < 2:
        return bias
    groups = []
    for start, stop, most in blocks:
        slots = most if 2 * most < first else first  # else nothing is copied
        mask = bias[start:stop]
        cut = mask if slots == first else torch.cat([mask[..., :slots], mask[..., first:]], -1)
        groups.append(RowGroup(start, stop, slots, cut))
    return RaggedMask(groups, first)


def unpacked(words: Tensor, nodes: int) -> Tensor:
    """Whether bit j of ``words`` [..., W] is set, [..., T] bool for T = ``nodes``."""
    bits = torch.arange(nodes, device=words.device)
    return (words[..., bits // 64] >> (bits % 64) & 1).bool()


def dense_mask(mask: TreeMask, rows: int, slots: int) -> Tensor:
    """Whether each of T nodes attends to each of S = ``slots`` slots, [R, 1, T, S] bool."""
    words, lengths, first = mask.words, mask.lengths, mask.first
    nodes = words.shape[1]
    slot = torch.arange(slots, device=words.device)
    committed = (slot < lengths[:, None]).repeat(rows // len(lengths), 1)  # [R, S]
    if mask.hidden is not None:
        committed[:, : mask.hidden.shape[1]] &= ~mask.hidden
    visible = committed[:, None].repeat(1, nodes, 1)
    visible[:, :, first : first + nodes] |= unpacked(words, nodes).repeat(rows // len(words), 1, 1)
    return visible[:, None]
