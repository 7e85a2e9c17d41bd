"""Acceptance rules: which drafts a round keeps and where the next token comes from.

Exact: ``GreedyMatch``, ``Recursive`` (and ``single_draft()``), ``PointMass``, ``GreedyMultiDraft``, ``KSeq``,
``Block``, ``Traversal``. Relaxed: ``Lantern``, ``LanternPP``, ``Typical``, ``Grouped``.
"""

from specmm.verify.bottom_up import Block, Traversal
from specmm.verify.exact import GreedyMatch, GreedyMultiDraft, PointMass, Recursive, single_draft
from specmm.verify.kseq import KSeq
from specmm.verify.lantern import Lantern, LanternPP
from specmm.verify.neighbours import neighbour_table
from specmm.verify.outcomes import endings, expected_tokens
from specmm.verify.relaxed import Grouped, Typical
from specmm.verify.rule import Decisions, Rule, Verdict, decide
from specmm.verify.transport import ot_bound

__all__ = [
    "Block",
    "Decisions",
    "GreedyMatch",
    "GreedyMultiDraft",
    "Grouped",
    "KSeq",
    "Lantern",
    "LanternPP",
    "PointMass",
    "Recursive",
    "Rule",
    "Traversal",
    "Typical",
    "Verdict",
    "decide",
    "endings",
    "expected_tokens",
    "neighbour_table",
    "ot_bound",
    "single_draft",
]
