"""Static tree shapes: fixed before the run, shared by all rows and rounds.

A static shape does not depend on the realised draws, which is what the ratio rules need to be exact
(LANTERN++ and EAGLE-1 use named lists, Medusa's ``tree_choices``; SpecInfer and RSD use branching
factors).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specmm.tree import TreeShape

Choices = tuple[tuple[int, ...], ...]


def _paths(text: str) -> Choices:
    """Rank paths of a list such as ``"0 1 00"``; every rank is one digit."""
    return tuple(tuple(int(digit) for digit in path) for path in text.split())


MC_SIM_7B_63: Choices = _paths(
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)
"""25 drafts, 4/8/8/3/2 by depth: EAGLE-1's default tree, also in LANTERN's release."""

NAIVE_EXTEND_57: Choices = _paths(
    "0 1 2 3 4 00 01 02 03 10 11 12 20 21 22 30 31 40 "
    "000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200 "
    "0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200 "
    "00000 00001 00002 00010 00011 00100 00101 00110 00200"
)
"""57 drafts, 5/13/16/14/9 by depth: the tree LANTERN++ uses for LlamaGen and Anole."""

NAMED: dict[str, Choices] = {"mc_sim_7b_63": MC_SIM_7B_63, "naive_extend_57": NAIVE_EXTEND_57}


def named(name: str, device: torch.device | str = "cpu") -> TreeShape:
    """Shape of a published list. Raises ``ValueError`` for a name not in ``NAMED``."""
    if name not in NAMED:
        raise ValueError(f"tree name must be one of {sorted(NAMED)}, got {name!r}")
    return TreeShape.from_choices(NAMED[name], device)


def branching(widths: Sequence[int], device: torch.device | str = "cpu") -> TreeShape:
    """Every node of depth d has ``widths[d]`` children: [4, 2, 1] drafts 4 + 8 + 8 nodes, level by
    level.
    """
    _check(widths)
    parents, level = [-1], [0]
    for width in widths:
        first = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return TreeShape.from_parents(parents, device)


def spine(widths: Sequence[int], device: torch.device | str = "cpu") -> TreeShape:
    """A main chain of rank-0 nodes whose node of depth d has ``widths[d]`` children; the others
    have none.

    The caterpillar of top-heavy drafting: one drafter row a level, sum(widths) drafts.
    """
    _check(widths)
    parents, node = [-1], 0
    for width in widths:
        first = len(parents)
        parents += [node] * width
        node = first
    return TreeShape.from_parents(parents, device)


def _check(widths: Sequence[int]) -> None:
    if not widths or min(widths) < 1:
        raise ValueError(
            f"widths must be a non-empty list of numbers of at least 1, got {list(widths)}"
        )
