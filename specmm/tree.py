"""Draft trees: which tokens a drafter proposes, how they hang together, and the distribution each
was drawn from.

Shape letters: B batch, N nodes (node 0 is the root, the last committed token), D deepest level, P
inner nodes (those that may have children), K most children of a node, V vocabulary. A leading 1
stands for "shared by all rows".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class TreeShape:
    """How N nodes hang together: ``parents`` [1 or B, N], each smaller than its node, -1 for the
    root.

    Siblings are ranked by node number. A shape shared by all rows is made once and serves every
    round; a dynamic drafter makes one a round and passes its bounds ``depth`` (D) and ``width``
    (K), so that nothing waits for a value.
    """

    def __init__(self, parents: Tensor, depth: int, width: int) -> None:
        self.parents, self.depth, self.width = parents, depth, width
        self.made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[TreeShape], T]) -> T:
        """What ``make`` gives of this shape, made at the first call with ``name``."""
        if name not in self.made:
            self.made[name] = make(self)
        found: T = self.made[name]
        return found

    @classmethod
    def from_parents(cls, parents: Sequence[int], device: torch.device | str = "cpu") -> TreeShape:
        """Shape shared by all rows. Raises ``ValueError`` when ``parents`` is not a tree in
        topological order.
        """
        if not parents or parents[0] != -1:
            raise ValueError(f"parents must start with -1 (the root), got {list(parents[:1])}")
        depths, counts = [0], [0] * len(parents)
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"parent of node {node} must be in [0, {node}), got {parent}")
            depths.append(depths[parent] + 1)
            counts[parent] += 1
        return cls(torch.tensor([parents], device=device), max(depths), max(counts))

    @classmethod
    def from_choices(
        cls, choices: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> TreeShape:
        """Shape of a list of rank paths (Medusa's and LANTERN's ``tree_choices``): ``[[0], [1], [0,
        0], …]``.
        """
        paths = sorted((tuple(c) for c in choices), key=lambda c: (len(c), c))
        number: dict[tuple[int, ...], int] = {(): 0} | {
            path: n for n, path in enumerate(paths, start=1)
        }
        for path in paths:
            if path[:-1] not in number:
                raise ValueError(f"tree choice {list(path)} has no parent in the list")
        return cls.from_parents([-1, *(number[p[:-1]] for p in paths)], device)

    @classmethod
    def chain(cls, length: int, device: torch.device | str = "cpu") -> TreeShape:
        """A root followed by ``length`` drafts, one after the other."""
        return cls.from_parents(list(range(-1, length)), device)

    @property
    def size(self) -> int:
        """N, the root included."""
        return self.parents.shape[1]

    @property
    def shared(self) -> bool:
        """Whether one shape serves every row."""
        return self.parents.shape[0] == 1

    @cached_property
    def ancestors(self) -> Tensor:
        """Whether node j is i or an ancestor of i, [1 or B, N, N] bool: row i is node i's
        tree-attention mask.
        """
        eye = torch.eye(self.size, dtype=torch.bool, device=self.parents.device)
        step = (
            eye[self.parents.clamp(min=0)] & (self.parents >= 0)[..., None]
        )  # row n: only n's parent
        mask, reach = eye | step, step
        for _ in range(self.depth - 1):
            reach = (reach.float() @ step.float()) > 0
            mask = mask | reach
        return mask

    @cached_property
    def depths(self) -> Tensor:
        """Depth of each node [1 or B, N]; the root has depth 0."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def earlier_siblings(self) -> Tensor:
        """Whether node j is an earlier sibling of i, [1 or B, N, N] bool."""
        same = self.parents[..., :, None] == self.parents[..., None, :]
        return same & torch.ones_like(same).tril(-1)

    @cached_property
    def ranks(self) -> Tensor:
        """Rank of each node among its siblings [1 or B, N]; the root has rank 0."""
        return self.earlier_siblings.sum(-1)

    @cached_property
    def ancestor_words(self) -> Tensor:
        """The ancestor mask in int64 words [1 or B, N, ceil(N / 64)]: bit j % 64 of word j // 64
        for node j.
        """
        words = -(-self.size // 64)
        bits = torch.zeros(
            *self.ancestors.shape[:2], words * 64, dtype=torch.int64, device=self.parents.device
        )
        bits[..., : self.size] = self.ancestors
        return (bits.unflatten(-1, (words, 64)) << torch.arange(64, device=bits.device)).sum(-1)

    @cached_property
    def inner(self) -> Tensor:
        """Nodes that may have children [P], ascending: the true ones of a shared shape, else all N."""
        if not self.shared:
            return torch.arange(self.size, device=self.parents.device)
        return self.parents[0, 1:].unique()

    @cached_property
    def children(self) -> Tensor:
        """Children of each inner node by rank [1 or B, P, K], padded with -1."""
        rows = self.parents.shape[0]
        if self.width == 0:
            return self.parents.new_empty(rows, len(self.inner), 0)
        table = torch.full((rows, (self.size + 1) * self.width + 1), -1, device=self.parents.device)
        slot = (
            (self.parents + 1) * self.width + self.ranks + 1
        )  # the root's parent -1 takes the first slots
        table.scatter_(1, slot, torch.arange(self.size, device=table.device).expand(rows, -1))
        return table[:, 1:].unflatten(1, (self.size + 1, self.width))[:, 1:][:, self.inner]


@dataclass
class DraftTree:
    """Tokens of one round's drafts and where they came from.

    ``tokens`` [B, N] int64, ``tokens[:, 0]`` the root. ``probs`` [B, N, V] holds for each node the
    distribution it was drawn from *given its earlier siblings* (row 0 is unused); ``None`` means
    every node is a point mass, chosen and not drawn. That one convention covers independent
    siblings, sampling without replacement and top-k trees. ``drafted`` counts the levels of a chain
    that any row asked for, where filler stands after them (None: all).
    """

    tokens: Tensor
    shape: TreeShape
    probs: Tensor | None = None
    drafted: int | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.shape[1] != self.shape.size:
            raise ValueError(
                f"tokens must be [B, {self.shape.size}], got {list(self.tokens.shape)}"
            )
        if self.probs is not None and self.probs.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"probs must be [B, N, V] for tokens {list(self.tokens.shape)}, got {list(self.probs.shape)}"
            )

    @property
    def levels(self) -> int:
        """Drafts of the longest row, filler not counted."""
        return self.shape.depth if self.drafted is None else self.drafted
