"""Delayed tree expansion: draft a trunk, then branch (Thomas et al., arXiv 2602.16994).

Near the root draft and target agree and one draft is enough; deeper they diverge, and that is where more drafts pay.
The branches are drawn independently, so the rule must be one for siblings drawn with replacement.
"""

from __future__ import annotations

import torch

from specmm.shape.static import branching
from specmm.tree import TreeShape


def delayed(trunk: int, branches: int, length: int, device: torch.device | str = "cpu") -> TreeShape:
    """A chain of ``trunk`` drafts whose end carries ``branches`` chains of ``length`` drafts each.

    ``trunk`` 0 gives independent rollouts from the root, ``branches`` 1 a plain chain of trunk + length.
    """
    for name, value, least in (("trunk", trunk, 0), ("branches", branches, 1), ("length", length, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    return branching([1] * trunk + [branches] + [1] * (length - 1), device)


def delayed_candidates(total: int, max_depth: int, max_branches: int = 4) -> list[TreeShape]:
    """Every delayed shape of at most ``total`` nodes (root included), for a planner to choose from."""
    return [
        delayed(trunk, branches, length)
        for branches in range(1, max_branches + 1)
        for trunk in range(max_depth if branches > 1 else 1)  # a chain is a chain, however it is cut
        for length in range(1, max_depth - trunk + 1)
        if 1 + trunk + branches * length <= total
    ]
