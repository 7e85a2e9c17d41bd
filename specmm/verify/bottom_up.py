"""Exact rules that test nodes from the leaves up: block verification and traversal verification.

Drafts must be drawn from the distributions the tree records, siblings without replacement, or be
point masses, without distributions.

Shape letters: B batch, N nodes, M nodes but the root, P families of one level, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specmm.core.tree import DraftTree, TreeShape
from specmm.verify.exact import Families, Trial, families_by_level, one_hot, take, trials
from specmm.verify.rule import Decisions


def deepest_first(shape: TreeShape) -> Tensor:
    """Nodes but the root from the deepest level up: [M], or [B, M] for per-row shapes."""
    return shape.once("orders", _both_orders)[0]


def leaves_first(shape: TreeShape) -> Tensor:
    """Nodes but the root in post-order, siblings by rank: [M], or [B, M] for per-row shapes."""
    return shape.once("orders", _both_orders)[1]


def _both_orders(shape: TreeShape) -> tuple[Tensor, Tensor]:
    deep = shape.depths.argsort(dim=-1, descending=True, stable=True)[:, :-1]
    post = _earlier(shape).sum(-1).argsort(dim=-1, stable=True)[:, :-1]
    return (deep[0], post[0]) if shape.shared else (deep, post)


def _earlier(shape: TreeShape) -> Tensor:
    """Whether node j comes before i in post-order, [1 or B, N, N].

    It does if it is below i, or if it or one of its ancestors is an earlier sibling of i or of one
    of i's ancestors.
    """
    up = shape.ancestors.float()
    aside = (up @ shape.earlier_siblings.float() @ up.mT) > 0
    below = shape.ancestors.mT & ~torch.eye(shape.size, dtype=torch.bool, device=up.device)
    return aside | below


@dataclass(frozen=True)
class Block:
    """Block verification of a chain (Sun et al. 2025).

    With p_0 = 1 and p_i = min(1, p_{i-1} p/q) at draft i, and S_i = sum((p_i p - q)+) after it:
    draft i is kept with h_i = S_i / (S_i + 1 - p_i), the last with p_i; the largest i kept ends the
    path, and the next token is drawn from norm((p_i p - q)+), after the last draft from p.
    """

    bottom_up: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    name: str = "block"

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """See :class:`specmm.verify.rule.Rule`; raises ``ValueError`` unless a chain."""
        if tree.shape.width > 1:
            raise ValueError(
                f"tree must be a chain for block verification, got {tree.shape.width} siblings"
            )
        token = tree.tokens[:, 1:]  # [B, M]
        before = p[:, :-1]  # [B, M, V]
        probs = one_hot(token, p) if tree.probs is None else tree.probs[:, 1:]
        ratio = take(before, token) / take(probs, token).clamp(min=torch.finfo(p.dtype).tiny)
        reach = _running(ratio)  # [B, N]
        residual = (reach[:, :-1, None] * before - probs).clamp_(min=0)
        total = residual.sum(-1)
        keep = torch.cat([_raised(reach[:, :-1], total), reach[:, -1:]], dim=1)
        residual = torch.where(total[..., None] > 0, residual, before)
        next_probs = torch.cat([residual, p[:, -1:]], dim=1)
        return Decisions(keep, next_probs, deepest_first(tree.shape))


def _running(ratio: Tensor) -> Tensor:
    """p_0 = 1, p_i = min(1, p_{i-1} ratio_i) along the chain: [B, M] to [B, M + 1]."""
    steps = [torch.ones_like(ratio[:, 0]) if ratio.shape[1] else ratio.new_ones(len(ratio))]
    for step in ratio.unbind(1):
        steps.append((steps[-1] * step).clamp(max=1))
    return torch.stack(steps, dim=1)


def _raised(reach: Tensor, total: Tensor) -> Tensor:
    """S / (S + 1 - r), the chance of a node once the draft after it is rejected; 1 stays 1."""
    return torch.where(reach < 1, total / (total + 1 - reach), 1.0)


@dataclass(frozen=True)
class Traversal:
    """Traversal verification (Weng et al. 2025) of any tree drawn without replacement.

    On a chain it is block verification. A node v with parent u starts with r_v = min(1, r_u p_u(v)
    / q(v)). Rejecting v, with S = sum((r_u p_u - q)+), sets p_u <- norm((r_u p_u - q)+) and r_u <-
    S / (S + 1 - r_u); the next sibling's q is the one the tree records, without v. Nodes are tested
    in post-order, each with the r left after its children were rejected; an updated r is never
    recomputed from the parent.
    """

    bottom_up: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    name: str = "traversal"

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Acceptance and distributions by level, from the root's children down."""
        if tree.shape.is_chain and tree.shape.width:
            return Block().decisions(tree, p)  # the same numbers in a quarter of the operations
        # missing children (-1) fall into the spare column
        reach = p.new_ones(len(p), tree.shape.size + 1)
        probs = p
        for walk in families_by_level(tree.shape):
            target = probs.index_select(1, walk.inner)
            remaining = reach.index_select(1, walk.inner)
            entered = []
            for trial in trials(tree, walk):
                kept, target, remaining = _reject(walk, target, remaining, trial)
                entered.append(kept)
            probs = probs.index_copy(1, walk.inner, target)
            reach = reach.index_copy(1, walk.inner, remaining)
            children = walk.nodes.expand(len(p), -1) % reach.shape[1]
            reach.scatter_(1, children, torch.cat(entered, dim=1))
        return Decisions(reach[:, :-1], probs, leaves_first(tree.shape))


def _reject(
    walk: Families, target: Tensor, remaining: Tensor, trial: Trial
) -> tuple[Tensor, Tensor, Tensor]:
    """A child's initial r [B, F]; its parents' target [B, P, V] and r [B, P] after rejecting it."""
    count = trial.token.shape[1]
    now = target[:, :count]
    r = remaining[:, :count]
    probs = one_hot(trial.token, target) if trial.probs is None else trial.probs
    drawn = take(probs, trial.token).clamp(min=torch.finfo(target.dtype).tiny)
    ratio = (r * take(now, trial.token) / drawn).clamp(max=1)
    residual = (r[..., None] * now - probs).clamp_(min=0)
    total = residual.sum(-1)
    raised = _raised(r, total)
    probs_after = torch.where(total[..., None] > 0, residual / total[..., None], now)
    if walk.real is not None:
        real = walk.real[trial.rank]
        return ratio, torch.where(real[..., None], probs_after, now), torch.where(real, raised, r)
    if count < target.shape[1]:
        probs_after = torch.cat([probs_after, target[:, count:]], dim=1)
        raised = torch.cat([raised, remaining[:, count:]], dim=1)
    return ratio, probs_after, raised
