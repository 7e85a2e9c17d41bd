"""Exact rules that walk from the root down: greedy match, recursive rejection, point masses, greedy
multi-draft.

Shape letters: B batch, N nodes, P families (inner nodes), K most children, F families tested, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.tree import DraftTree
from specmm.verify.families import Trial, normalised, one_hot, spread, take, top_down
from specmm.verify.rule import Decisions


@dataclass(frozen=True)
class GreedyMatch:
    """Keep a draft when it is the target's most likely token: the exact rule of greedy decoding.

    Any increasing function of the logits serves as ``p``; the next token is the argmax, too. Ties
    go to the lowest id.
    """

    name: str = "greedy match"
    exact: bool = True

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Decisions for the target's distributions or logits ``p`` [B, N, V]."""
        best = p.argmax(-1)  # [B, N]
        parents = tree.shape.parents.clamp(min=0).expand_as(best)
        return Decisions((best.gather(1, parents) == tree.tokens).to(p.dtype), one_hot(best, p))


def ratio_test(target: Tensor, trial: Trial, probs: Tensor) -> Tensor:
    """min(1, p / q) at the drafts [B, F]."""
    drawn = take(probs, trial.token).clamp(min=torch.finfo(target.dtype).tiny)
    return (take(target, trial.token) / drawn).clamp(max=1)


def strict_step(target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
    """Accept with min(1, p / q), else p <- norm((p - q)+): Leviathan et al. 2023; a point mass has
    q = 1.
    """
    if trial.probs is None:
        rest = target.scatter(-1, trial.token.unsqueeze(-1), 0.0)
        return take(target, trial.token), normalised(rest, target)
    rest = (target - trial.probs).clamp_(min=0)
    return ratio_test(target, trial, trial.probs), normalised(rest, target)


@dataclass(frozen=True)
class Recursive:
    """Siblings in turn: accept with min(1, p / q_k), else p <- norm((p - q_k)+), q_k the
    distribution the node was drawn from.

    One rule for many papers, for the tree's distributions say how each node was drawn given its
    earlier siblings: one draft (Leviathan et al. 2023), independent siblings (SpecInfer), siblings
    without replacement (RSD, Sequoia), and, with no distributions, point masses (EAGLE-2, MSD:
    accept with p(x), else take x out). Exact if the shape does not depend on the realised draws;
    for point masses tokens and shape may come about in any way.
    """

    name: str = "recursive"
    exact: bool = True

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Decisions for the target's processed distributions ``p`` [B, N, V]."""
        return point_masses(tree, p) if tree.probs is None else top_down(tree, p, strict_step)


@dataclass(frozen=True)
class PointMass:
    """Drafts taken as chosen, whatever distributions the tree carries: accept with p(x), else take
    x out and renormalise.

    Exact however the drafts came about, for it never asks; where they were drawn, ``Recursive``
    keeps more of them.
    """

    name: str = "point mass"
    exact: bool = True

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Decisions for the target's processed distributions ``p`` [B, N, V]."""
        return point_masses(tree, p)


def point_masses(tree: DraftTree, p: Tensor) -> Decisions:
    """The recursion for point masses in closed form: chance_k = p(x_k) / (p(no sibling) + sum_{j >=
    k} p(x_j)).

    Only sums of positive numbers, no loop over siblings and no cancellation. A repeated sibling has
    chance 0.
    """
    if not tree.shape.width:
        return Decisions(torch.ones_like(p[..., 0]), p)
    inner, children = tree.shape.inner, tree.shape.children  # [P], [1 or B, P, K]
    target = p.index_select(1, inner)  # [B, P, V]
    wide = children.clamp(min=0).expand(len(p), -1, -1)
    token = tree.tokens.gather(1, wide.flatten(1)).view_as(wide)  # [B, P, K]
    repeated = (token[..., :, None] == token[..., None, :]).tril(-1).any(-1)
    mass = torch.where((children >= 0) & ~repeated, take(target, token), 0.0)
    rest = target.scatter_add(-1, token, -mass)  # x - x is 0 exactly
    none = rest.sum(-1, keepdim=True)
    left = none + mass.flip(-1).cumsum(-1).flip(-1)
    chance = (mass / left.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1)
    probs = p.index_copy(1, inner, torch.where(none > 0, rest, target))
    return Decisions(spread(tree, children.flatten(1), chance.flatten(1)), probs)


@dataclass(frozen=True)
class GreedyMultiDraft:
    """The k - 1 likeliest tokens of q and one sample X of the rest: accepts p(Top) + sum over the
    rest of min(p, q').

    Convention: the sibling of rank 0 is X, and the distribution of its node is q', q restricted to
    the rest and renormalised; the others are chosen, and their rows of ``probs`` are never read. X
    is tested first with min(1, p / q'), then the chosen ones as point masses, which reaches the
    optimum for such drafts (Hu et al. 2025, greedy multi-draft).
    """

    name: str = "greedy multi-draft"
    exact: bool = True

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Decisions for the target's processed distributions ``p`` [B, N, V]; ``tree.probs`` must
        hold q' at rank 0.
        """
        if tree.probs is None and tree.shape.width:
            raise ValueError(
                "probs must hold the distribution of each rank-0 sibling for greedy multi-draft, got None"
            )
        return top_down(tree, p, _greedy_step)


def _greedy_step(target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
    chosen = Trial(trial.token, None, trial.rank, trial.sizes)
    return strict_step(target, trial if trial.rank == 0 else chosen)
