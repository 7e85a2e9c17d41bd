"""Acceptance rules: which drafts a round keeps, and where the next token comes from.

Exact: ``GreedyMatch``, ``Recursive``, ``PointMass``, ``GreedyMultiDraft``, ``Block``,
``Traversal``. Relaxed: ``Grouped``, ``Lantern``, ``LanternPP``, ``Typical``.
"""

from specmm.verify.bottom_up import Block, Traversal
from specmm.verify.exact import GreedyMatch, GreedyMultiDraft, PointMass, Recursive
from specmm.verify.grouped import Grouped
from specmm.verify.lantern import Lantern, LanternPP, neighbour_table
from specmm.verify.relaxed import Typical
from specmm.verify.rule import Decisions, Rule, VerifyResult, endings

__all__ = [
    "Block",
    "Decisions",
    "GreedyMatch",
    "GreedyMultiDraft",
    "Grouped",
    "Lantern",
    "LanternPP",
    "PointMass",
    "Recursive",
    "Rule",
    "Traversal",
    "Typical",
    "VerifyResult",
    "endings",
    "neighbour_table",
]
