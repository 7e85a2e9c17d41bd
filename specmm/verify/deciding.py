"""A round's result: by one launch on a GPU, or from the rule's decisions and the uniforms.

Shape letters: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from specmm.kernels.acceptance import decide_fused
from specmm.kernels.backend import backend
from specmm.randomness import UniformSource
from specmm.tree import DraftTree
from specmm.verify.rule import Rule, VerifyResult, settle, throw


def decide(
    rule: Rule, tree: DraftTree, p: Tensor, uniforms: UniformSource, *, measure: bool = False
) -> VerifyResult:
    """Draw the uniforms for ``rule``: N uniforms a row for the nodes and one for the next token
    (see ``throw``).

    On a GPU the rules that ``specmm.kernels.acceptance`` knows are one launch.
    """
    if not measure and backend(p.device) == "triton":
        result = decide_fused(rule, tree, p, uniforms)
        if result is not None:
            return result
    decisions = rule.decisions(tree, p, measure=measure)
    return settle(decisions, tree.shape, throw(tree.shape, uniforms))
