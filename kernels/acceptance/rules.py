"""Which of the core's rules the fused acceptance serves, and how.

Shape letters: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specmm.kernels.acceptance.op import accept
from specmm.randomness import UniformSource
from specmm.tree import DraftTree
from specmm.verify.bottom_up import Block, Traversal
from specmm.verify.exact import GreedyMatch, PointMass, Recursive
from specmm.verify.lantern import Lantern, LanternPP
from specmm.verify.rule import Rule, VerifyResult, draw_uniforms

GREEDY = [0.0, 0.0, 1.0, 0.0]  # processing that leaves the argmax


def decide_fused(
    rule: Rule, tree: DraftTree, p: Tensor, uniforms: UniformSource
) -> VerifyResult | None:
    """The result of ``decide`` by one launch, on the same uniforms; None for rules the kernel does
    not know.

    It knows greedy match, recursive, point mass, LANTERN and LANTERN++ with the corrected residual,
    block and traversal verification. It measures no excess.
    """
    options = _options(rule, tree)
    if options is None:
        return None
    probs = p.float() if "processing" in options else p
    numbers = draw_uniforms(tree.shape, uniforms)
    path, kept, following = accept(
        probs, tree.tokens, tree.shape.parents, numbers, tree.shape.depth, **options
    )
    return VerifyResult(path, kept, following)


def _options(rule: Rule, tree: DraftTree) -> dict[str, Any] | None:
    match rule:
        case GreedyMatch():
            return {"processing": GREEDY}
        case PointMass():
            return {}
        case Recursive():
            return {"drafts": tree.probs}
        case Block() if tree.shape.width > 1:
            return None  # it refuses trees
        case Block() | Traversal():
            return {"drafts": tree.probs, "leaves_first": True}
        case (
            Lantern(residual="corrected", greedy=False)
            | LanternPP(residual="corrected", greedy=False)
        ):
            factor = isinstance(rule, LanternPP)
            bound = rule.lambda_ if isinstance(rule, LanternPP) else rule.delta
            near = {
                "table": rule.table,
                "near": rule.k,
                "bound": bound,
                "factor": factor,
                "offset": rule.offset,
            }
            return {"drafts": tree.probs, **near}
    return None
