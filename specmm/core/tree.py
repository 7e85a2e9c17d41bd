"""Draft trees: the proposed tokens, their parents, and the distributions they were drawn from.

Node 0 is the root: the last committed token. Every other node is a draft.

Shape letters: B batch, N nodes, D deepest level, P inner nodes (those that may have children), K
most children of a node, V vocabulary. A leading 1 means "shared by all rows".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")


class computed_once(Generic[T]):
    """``functools.cached_property`` without its lock, which PyTorch cannot compile: a dynamic
    drafter's shapes are made inside compiled programs.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make = make
        self.name = make.__name__
        self.__doc__ = make.__doc__

    def __get__(self, shape: Any, owner: type | None = None) -> T:
        """The result of ``make``, stored in ``shape`` for later reads."""
        if shape is None:
            return self  # type: ignore[return-value]
        value = self.make(shape)
        setattr(shape, self.name, value)
        return value


class TreeShape:
    """The parent of each node: ``parents`` [1 or B, N], each less than its node, -1 for the root.

    Siblings are ranked by node number. A shape shared by all rows is made once and serves every
    round. A dynamic drafter makes a shape every round. It passes upper bounds of the ``depth`` (D)
    and ``width`` (K), so that the host need not wait for values from the device.
    """

    def __init__(self, parents: Tensor, depth: int, width: int) -> None:
        self.parents = parents
        self.depth = depth
        self.width = width
        self.fixed = False
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[TreeShape], T]) -> T:
        """``make(self)``, computed at the first call with ``name``."""
        if name not in self._made:
            self._made[name] = make(self)
        value: T = self._made[name]
        return value

    def to(self, device: torch.device | str) -> TreeShape:
        """This shape on ``device``."""
        parents = self.parents.to(device)
        if parents is self.parents:
            return self
        shape = TreeShape(parents, self.depth, self.width)
        shape.fixed = self.fixed
        return shape

    @classmethod
    def from_parents(cls, parents: Sequence[int], device: torch.device | str = "cpu") -> TreeShape:
        """A shape shared by all rows; ``ValueError`` unless parents precede their children."""
        if not parents or parents[0] != -1:
            raise ValueError(f"parents must start with -1 (the root), got {list(parents[:1])}")
        depths = [0]
        counts = [0] * len(parents)
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"parent of node {node} must be in [0, {node}), got {parent}")
            depths.append(depths[parent] + 1)
            counts[parent] += 1
        shape = cls(torch.tensor([parents], device=device), max(depths), max(counts))
        shape.fixed = True
        return shape

    @classmethod
    def from_choices(
        cls, choices: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> TreeShape:
        """The shape of rank paths ``[[0], [1], [0, 0], …]`` (Medusa's ``tree_choices``)."""
        paths = sorted((tuple(c) for c in choices), key=lambda c: (len(c), c))
        number: dict[tuple[int, ...], int] = {(): 0}
        number |= {path: n for n, path in enumerate(paths, start=1)}
        for path in paths:
            if path[:-1] not in number:
                raise ValueError(f"tree choice {list(path)} has no parent in the list")
        return cls.from_parents([-1, *(number[p[:-1]] for p in paths)], device)

    @classmethod
    def chain(cls, length: int, device: torch.device | str = "cpu") -> TreeShape:
        """A root followed by ``length`` drafts, one after the other, at least 0."""
        if length < 0:
            raise ValueError(f"a chain must have at least 0 drafts, got {length}")
        shape = cls.from_parents(list(range(-1, length)), device)
        nodes = torch.ones(1, length + 1, length + 1, dtype=torch.bool, device=device)
        shape.ancestors = nodes.tril()  # at once: paths of a long chain would take seconds
        return shape

    def parents_of(self, row: int) -> list[int]:
        """The parent of each node of a ``row``, -1 for the root."""
        parents: list[int] = self.parents[row if len(self.parents) > 1 else 0].tolist()
        return parents

    @property
    def size(self) -> int:
        """N, the root included."""
        return self.parents.shape[1]

    @property
    def shared(self) -> bool:
        """Whether one shape serves every row."""
        return self.parents.shape[0] == 1

    @property
    def is_chain(self) -> bool:
        """Whether one chain serves every row: node n lies at depth n."""
        return self.shared and self.width <= 1

    @computed_once
    def ancestors(self) -> Tensor:
        """Whether node j is i or an ancestor of i, [1 or B, N, N] bool: the tree-attention mask."""
        eye = torch.eye(self.size, dtype=torch.bool, device=self.parents.device)
        is_draft = (self.parents >= 0)[..., None]
        step = eye[self.parents.clamp(min=0)] & is_draft  # row n: only n's parent
        mask = eye | step
        reach = step
        for _ in range(self.depth - 1):
            reach = (reach.float() @ step.float()) > 0
            mask = mask | reach
        return mask

    @computed_once
    def depths(self) -> Tensor:
        """Depth of each node [1 or B, N]; the root has depth 0."""
        return self.ancestors.sum(-1) - 1

    @computed_once
    def earlier_siblings(self) -> Tensor:
        """Whether node j is an earlier sibling of i, [1 or B, N, N] bool."""
        same = self.parents[..., :, None] == self.parents[..., None, :]
        return same & torch.ones_like(same).tril(-1)

    @computed_once
    def ranks(self) -> Tensor:
        """Rank of each node among its siblings [1 or B, N]; the root has rank 0."""
        return self.earlier_siblings.sum(-1)

    @computed_once
    def ancestor_words(self) -> Tensor:
        """``ancestors`` in int64 words [1 or B, N, ceil(N / 64)]: node j is bit j % 64 of one."""
        words = -(-self.size // 64)
        bits = F.pad(self.ancestors.long(), (0, words * 64 - self.size))
        return (bits.unflatten(-1, (words, 64)) << torch.arange(64, device=bits.device)).sum(-1)

    @computed_once
    def inner(self) -> Tensor:
        """Nodes that may have children [P] of a tree of fixed shape. For other trees all N nodes,
        because finding them would make the host wait for the GPU in every round.
        """
        waits = not self.fixed and self.parents.device.type != "cpu"
        if waits or not self.shared:
            return torch.arange(self.size, device=self.parents.device)
        return self.parents[0, 1:].unique()

    @computed_once
    def children(self) -> Tensor:
        """Children of each inner node by rank [1 or B, P, K], padded with -1."""
        rows = self.parents.shape[0]
        if self.width == 0:
            return self.parents.new_empty(rows, len(self.inner), 0)
        table = torch.full((rows, (self.size + 1) * self.width + 1), -1, device=self.parents.device)
        # the root, whose parent is -1, goes to the first slots, which are cut off
        slot = (self.parents + 1) * self.width + self.ranks + 1
        table.scatter_(1, slot, torch.arange(self.size, device=table.device).expand(rows, -1))
        by_parent = table[:, 1:].unflatten(1, (self.size + 1, self.width))[:, 1:]
        return by_parent[:, self.inner]


def at_nodes(x: Tensor, nodes: Tensor) -> Tensor:
    """``x`` [R, N, C] at ``nodes`` [R, n]: [R, n, C]."""
    rows, count = x.shape[:2]
    if rows > 1:
        nodes = nodes + torch.arange(0, rows * count, count, device=nodes.device)[:, None]
    # whole rows are copied, in a fifth of the time of gathering their entries one by one
    return x.flatten(0, 1).index_select(0, nodes.flatten()).unflatten(0, nodes.shape)


@dataclass
class DraftTree:
    """The drafts of one round, and the distributions they were drawn from.

    ``tokens`` [B, N] int64, ``tokens[:, 0]`` the root. ``probs`` [B, N, V] holds for each node the
    distribution it was drawn from *given its earlier siblings* (node 0's is unused). ``None`` means
    that every node is a point mass: chosen, not drawn. This one convention covers independent
    siblings, sampling without replacement and top-k trees. ``drafted`` is the number of levels of a
    chain that hold drafts; padding tokens follow (None: all levels). If rows' chains have different
    ``sizes`` [B], a target need not score the nodes beyond them. ``chances`` [B, N] are the
    drafter's probabilities of each node after its parent, if it records them.
    """

    tokens: Tensor
    shape: TreeShape
    probs: Tensor | None = None
    drafted: int | None = None
    sizes: Tensor | None = None
    chances: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.shape[1] != self.shape.size:
            raise ValueError(
                f"tokens must be [B, {self.shape.size}], got {list(self.tokens.shape)}"
            )
        if self.probs is not None and self.probs.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"probs must be [B, N, V] for tokens {list(self.tokens.shape)}, "
                f"got {list(self.probs.shape)}"
            )

    @property
    def levels(self) -> int:
        """Drafts of the longest row, without padding."""
        return self.shape.depth if self.drafted is None else self.drafted


def paths(tree: DraftTree | None, row: int) -> list[tuple[int, list[int]]]:
    """For each node of a row's tree: its parent (-1: none) and the tokens from the root to it;
    without a tree one empty path.
    """
    if tree is None:
        return [(-1, [])]
    result: list[tuple[int, list[int]]] = []
    nodes = zip(tree.tokens[row].tolist(), tree.shape.parents_of(row), strict=True)
    for token, parent in nodes:
        result.append((parent, [*(result[parent][1] if parent >= 0 else []), token]))
    return result
