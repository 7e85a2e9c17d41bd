"""Delayed tree expansion: draft a trunk, then branch (Thomas et al., arXiv 2602.16994).

Near the root draft and target agree and one draft is enough; deeper they diverge, and that is where
more drafts pay. The branches are drawn independently, so the rule must be one for siblings drawn
with replacement.
"""

from __future__ import annotations

import torch

from specmm.shape.static import branching
from specmm.tree import TreeShape


def delayed(
    trunk: int, branches: int, length: int, device: torch.device | str = "cpu"
) -> TreeShape:
    """A chain of ``trunk`` drafts whose end carries ``branches`` chains of ``length`` drafts each.

    ``trunk`` 0 gives independent rollouts from the root, ``branches`` 1 a plain chain of trunk +
    length.
    """
    for name, value, least in (
        ("trunk", trunk, 0),
        ("branches", branches, 1),
        ("length", length, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    return branching([1] * trunk + [branches] + [1] * (length - 1), device)
