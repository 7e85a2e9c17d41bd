"""Fused acceptance: ``torch.ops.specmm.accept``, a round's result from its distributions, drafts
and uniforms in one launch; its PyTorch twin ``by_rule``; and ``decide_fused`` for the core's rules.

Shape letters: B batch, N nodes, V vocabulary, D deepest level.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from specmm.core.randomness import UniformSource
from specmm.core.tree import DraftTree, TreeShape
from specmm.extending.registry import maker_of
from specmm.kernels.backend import backend
from specmm.verify.bottom_up import Block, Traversal
from specmm.verify.exact import GreedyMatch, PointMass, Recursive
from specmm.verify.rule import Rule, VerifyResult, draw_uniforms, sample_result


@torch.library.custom_op("specmm::accept", mutates_args=())
def accept(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    uniforms: Tensor,
    depth: int,
    drafts: Tensor | None = None,
    leaves_first: bool = False,
    greedy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Path [B, D + 1] padded with -1, number of accepted nodes [B] and next token [B], as in
    ``specmm.verify.rule.VerifyResult``.

    ``probs`` [B, N, V] (float32 or float64) are the target's distributions, ``tokens`` [B, N] and
    ``parents`` [1 or B, N] the tree's, D = ``depth`` its deepest level, ``drafts`` [B, N, V] the
    distributions the nodes were drawn from (None: point masses), ``uniforms`` [B, N + 1] uniforms
    in [0, 1): one for each node, the last for the next token.

    Siblings are tested in turn: min(1, p / q), then p <- norm((p - q)+)
    (``specmm.verify.exact.Recursive``). With ``leaves_first`` nodes are tested in post-order
    instead (``specmm.verify.bottom_up.Traversal``; on a chain that is block verification). If
    ``greedy``, a draft is kept if it is the target's likeliest token, and nothing is drawn
    (``specmm.verify.exact.GreedyMatch``). Raises ``ValueError`` on sizes and types that do not fit
    together.
    """
    _check(probs, tokens, parents, uniforms, drafts)
    run = by_rule
    if backend(probs.device) == "triton":
        from specmm.kernels.acceptance.triton import accept as run
    return run(probs, tokens, parents, uniforms, depth, drafts, leaves_first, greedy)


@accept.register_fake
def _(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    uniforms: Tensor,
    depth: int,
    *others: object,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    batch = len(tokens)
    return tokens.new_empty(batch, depth + 1), tokens.new_empty(batch), tokens.new_empty(batch)


def _check(
    probs: Tensor, tokens: Tensor, parents: Tensor, uniforms: Tensor, drafts: Tensor | None
) -> None:
    """Raise ``ValueError`` for sizes and dtypes that do not fit together."""
    batch, nodes = tokens.shape
    if probs.shape[:2] != tokens.shape or parents.shape not in ((1, nodes), (batch, nodes)):
        raise ValueError(
            f"probs must be [{batch}, {nodes}, V] and parents [1 or {batch}, {nodes}] for tokens "
            f"{list(tokens.shape)}, got {list(probs.shape)} and {list(parents.shape)}"
        )
    if uniforms.shape != (batch, nodes + 1) or (drafts is not None and drafts.shape != probs.shape):
        raise ValueError(
            f"uniforms must be [{batch}, {nodes + 1}] and drafts of the distributions' shape "
            f"{list(probs.shape)}, got {list(uniforms.shape)} and "
            f"{None if drafts is None else list(drafts.shape)}"
        )
    if probs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"probs must be float32 or float64, got {probs.dtype}; convert them")


def by_rule(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    uniforms: Tensor,
    depth: int,
    drafts: Tensor | None,
    leaves_first: bool,
    greedy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``accept`` by the core's rules and PyTorch's operators, for devices without Triton."""
    rule: Rule = GreedyMatch() if greedy else Traversal() if leaves_first else Recursive()
    tree = DraftTree(tokens, TreeShape(parents, depth, tokens.shape[1]), drafts)
    result = sample_result(rule.decisions(tree, probs), tree.shape, uniforms)
    return result.path, result.kept, result.next_token


class FusedOptions(TypedDict, total=False):
    """The arguments of ``accept`` that depend on the rule."""

    drafts: Tensor | None
    leaves_first: bool
    greedy: bool


def decide_fused(
    rule: Rule, tree: DraftTree, p: Tensor, uniforms: UniformSource
) -> VerifyResult | None:
    """The result of ``decide`` in one launch, on the same uniforms; None for rules that the kernel
    does not know.

    It knows greedy match, recursive, point mass, block and traversal verification.
    """
    options = fused_options(rule, tree)
    if options is None:
        return None
    numbers = draw_uniforms(tree.shape, uniforms)
    path, kept, following = accept(
        p, tree.tokens, tree.shape.parents, numbers, tree.shape.depth, **options
    )
    return VerifyResult(path, kept, following)


def fused_options(rule: Rule, tree: DraftTree) -> FusedOptions | None:
    """The arguments that make ``accept`` equal to ``rule``; None for unsupported rules. Third-party
    rules are unsupported: they may subclass ours and decide differently.
    """
    if maker_of(rule):
        return None
    match rule:
        case GreedyMatch():
            return {"greedy": True}
        case PointMass():
            return {}
        case Recursive():
            return {"drafts": tree.probs}
        case Block() if tree.shape.width > 1:
            return None  # the rule refuses trees
        case Block() | Traversal():
            return {"drafts": tree.probs, "leaves_first": True}
    return None
