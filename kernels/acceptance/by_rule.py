"""Fused acceptance by the core's own rules and PyTorch's operators: for CPUs, and where Triton does
not run.

Shape letters: B batch, N nodes, V vocabulary, D deepest level, W codes, J columns of the neighbour
table.
"""

from __future__ import annotations

from torch import Tensor

from specmm.processors import Processor
from specmm.tree import DraftTree, TreeShape
from specmm.verify.bottom_up import Traversal
from specmm.verify.exact import Recursive
from specmm.verify.lantern import Lantern, LanternPP
from specmm.verify.rule import Rule, sample_result


def accept(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    uniforms: Tensor,
    depth: int,
    drafts: Tensor | None,
    table: Tensor | None,
    near: int,
    bound: float,
    factor: bool,
    offset: int,
    processing: list[float] | None,
    leaves_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, kept and next token; for the arguments see ``op.accept``."""
    if processing is not None:
        temperature, top_k, top_p, top_p_first = processing
        probs = Processor(temperature, int(top_k), top_p, bool(top_p_first))(probs)
    tree = DraftTree(tokens, TreeShape(parents, depth, tokens.shape[1]), drafts)
    rule = Traversal() if leaves_first else _rule(table, near, bound, factor, offset)
    result = sample_result(rule.decisions(tree, probs), tree.shape, uniforms)
    return result.path, result.kept, result.next_token


def _rule(table: Tensor | None, near: int, bound: float, factor: bool, offset: int) -> Rule:
    if table is None:
        return Recursive()
    if factor:
        return LanternPP(table, near, bound, offset=offset)
    return Lantern(table, near, bound, offset=offset)
