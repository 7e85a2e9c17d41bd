"""The trees by name: published lists, and shapes by their numbers.

A new shape is a function from numbers to a :class:`specmm.tree.TreeShape` and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specmm.registry import unknown
from specmm.shape.delayed import delayed
from specmm.shape.eagle2 import Dynamic
from specmm.shape.sequoia import best_tree
from specmm.shape.static import NAMED, branching, spine
from specmm.spec import parse_spec
from specmm.tree import TreeShape

Tree = str | tuple[int, ...]  # a name with its numbers, parents (-1, 0, …), or a spine's children


@dataclass(frozen=True)
class TreeKind:
    """A family of shapes: what makes one of numbers on a device, how it is spelt, what it is."""

    make: Callable[..., TreeShape | Dynamic]
    spelling: str
    what: str


def _chain(length: int, device: Any = "cpu") -> TreeShape:
    return TreeShape.chain(length, device)


def _numbers(make: Callable[..., TreeShape], *widths: int, device: Any = "cpu") -> TreeShape:
    return make(widths, device)


def _dynamic(total: int = 24, depth: int = 4, top_k: int = 6, device: Any = "cpu") -> Dynamic:
    return Dynamic(top_k, depth, total)


TREES: Mapping[str, TreeKind] = {
    "chain": TreeKind(_chain, "chain(6)", "one draft after the other"),
    "spine": TreeKind(
        partial(_numbers, spine), "spine(3, 2, 2, 1)", "a chain with siblings, or plainly 3,2,2,1"
    ),
    "branching": TreeKind(
        partial(_numbers, branching), "branching(4, 2, 1)", "so many children a node, by level"
    ),
    "delayed": TreeKind(
        delayed, "delayed(trunk=2, branches=3, length=2)", "a chain that branches at its end"
    ),
    "dynamic": TreeKind(
        _dynamic,
        "dynamic(total=24, depth=4, top_k=6)",
        "EAGLE-2's, of the likeliest tokens, another each round",
    ),
}


def make_tree(
    tree: Tree, device: torch.device | str = "cpu", acceptance: Sequence[Sequence[float]] = ()
) -> TreeShape | Dynamic:
    """The shape that ``tree`` names.

    Parents (from -1 on) or children by level of a spine serve, too. ``sequoia(n)`` is the best
    tree of n nodes for the drafter's ``acceptance`` by level and rank. Raises ``ValueError`` for a
    name or numbers that make no tree.
    """
    if not isinstance(tree, str):
        parents = tree[:1] == (-1,)
        return TreeShape.from_parents(tree, device) if parents else spine(tree, device)
    if tree in NAMED:
        return TreeShape.from_choices(NAMED[tree], device)
    name, values, options = parse_spec(tree)
    if name == "sequoia":
        return _sequoia(device, acceptance, *values, **options)
    if name not in TREES:
        raise unknown("tree", name, [*TREES, "sequoia", *NAMED])
    try:
        return TREES[name].make(*values, **options, device=device)
    except TypeError as error:
        raise ValueError(f"a tree must read as {TREES[name].spelling}, got {tree!r}") from error


def _sequoia(
    device: torch.device | str, acceptance: Sequence[Sequence[float]], total: int = 12
) -> TreeShape:
    if not acceptance:
        raise ValueError("tree sequoia needs a drafter whose acceptance was measured, got none")
    return best_tree(acceptance, total, len(acceptance), device)[0]


def static_tree(
    tree: Tree, device: torch.device | str = "cpu", acceptance: Sequence[Sequence[float]] = ()
) -> TreeShape:
    """As :func:`make_tree`, of fixed shape; raises ``ValueError`` for one that is not."""
    found = make_tree(tree, device, acceptance)
    if isinstance(found, Dynamic):
        raise ValueError(
            f"tree must be of fixed shape to be drawn, got {tree}; give spine(3, 2, 1)"
        )
    return found
