"""A tree of one's own: a function of numbers that says who is whose parent.

specmm --load demos/own/tree.py bench pocket/llamagen --methods "draft(tree=comb(3, 2))"
"""

from __future__ import annotations

import torch

import specmm
from specmm.core.tree import TreeShape


@specmm.register("tree", "comb")
def comb(teeth: int = 3, length: int = 2, *, device: torch.device | str = "cpu") -> TreeShape:
    """Several chains of one length from the root: for drafts that often go wrong at once."""
    if teeth < 1 or length < 1:
        raise ValueError(f"teeth and length must be at least 1, got {teeth} and {length}")
    # numbered level by level; node 0 is the root, whose parent is -1
    parents = [-1] + [0] * teeth + [node + 1 for node in range(teeth * (length - 1))]
    return TreeShape.from_parents(parents, device)
