"""Exact rules that walk from the root down, and the loop that all top-down rules share.

Rules: greedy match, recursive rejection, point masses, greedy multi-draft.

A family is an inner node with its children. :func:`top_down` tests the siblings of all families of
the batch at once, rank by rank. A rule of this kind is a *step*: from the family's current target
and one draft to the probability of keeping the draft, and to the target that the next sibling (or
the recovered token) faces once the draft is rejected.

Shape letters: B batch, N nodes, P families, K most children, F families that have a child of the
current rank (P for shapes that differ by row), M nodes that are children, V vocabulary. A leading 1
means "shared by all rows".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.core.sorting import likeliest
from specmm.core.tree import DraftTree, TreeShape, at_nodes
from specmm.shape.trees import Siblings
from specmm.verify.rule import Decisions


def normalised(residual: Tensor, fallback: Tensor) -> Tensor:
    """``residual`` [..., V] scaled to total 1; ``fallback`` where its total is 0."""
    total = residual.sum(-1, keepdim=True)
    return torch.where(total > 0, residual / total, fallback)


def take(probs: Tensor, token: Tensor) -> Tensor:
    """The probability in ``probs`` [..., V] of ``token`` [...] or [..., M], in token's shape."""
    if token.ndim < probs.ndim:
        return probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return probs.gather(-1, token)


def one_hot(token: Tensor, like: Tensor) -> Tensor:
    """Point masses [..., V] at ``token`` [...], of the dtype and width of ``like`` [..., V]."""
    return like.new_zeros(*token.shape, like.shape[-1]).scatter_(-1, token.unsqueeze(-1), 1.0)


@dataclass(frozen=True)
class Trial:
    """One sibling of each family: its token [B, F] and the distribution it was drawn from.

    ``probs`` [B, F, V] is None for point masses; ``rank`` is the sibling's rank.
    """

    token: Tensor
    probs: Tensor | None
    rank: int


Chance: TypeAlias = Callable[[Tensor, Trial], Tensor]
"""(target [B, F, V] of total 1, trial) -> probability of keeping the draft [B, F]."""

Step: TypeAlias = Callable[[Tensor, Trial], tuple[Tensor, Tensor]]
"""As :data:`Chance`, together with the target [B, F, V] once the draft is rejected."""


@dataclass(frozen=True)
class Families:
    """The families of a shape: ``ranks`` holds the nodes of each rank, [1 or B, F].

    ``inner`` [P] are the parents, ``nodes`` [1 or B, M] the ranks joined. In a shared shape the
    largest families come first, and F shrinks with the rank, so that no step meets a missing child.
    Otherwise F is P, and ``real`` [B, P] of each rank marks the nodes that exist.
    """

    inner: Tensor
    ranks: list[Tensor]
    nodes: Tensor
    real: list[Tensor] | None

    @property
    def starts(self) -> Iterator[tuple[int, int]]:
        """(first, end) of each rank within ``nodes``."""
        end = 0
        for rank in self.ranks:
            first = end
            end += rank.shape[1]
            yield first, end


def families_of(shape: TreeShape) -> Families:
    """The families of ``shape``, made once for each shape object."""
    return shape.once("families", _shared if shape.shared else _ragged)


def families_by_level(shape: TreeShape) -> list[Families]:
    """The families by the depth of their parents, the root's first."""
    return shape.once("families by level", _by_level)


def _by_level(shape: TreeShape) -> list[Families]:
    of_level = _shared if shape.shared else _ragged
    levels = [of_level(shape, depth) for depth in range(shape.depth)]
    return [level for level in levels if level.ranks]  # a bound on the depth may exceed the depth


def _shared(shape: TreeShape, level: int | None = None) -> Families:
    """The families of a shape that all rows share, the largest first."""
    families: dict[int, list[int]] = {}
    for node, parent in enumerate(shape.parents[0].tolist()[1:], start=1):
        families.setdefault(parent, []).append(node)
    if level is not None:
        depths = shape.depths[0].tolist()
        families = {parent: kids for parent, kids in families.items() if depths[parent] == level}
    largest = sorted(families.items(), key=lambda item: -len(item[1]))
    width = len(largest[0][1]) if largest else 0
    integers = partial(torch.tensor, dtype=torch.int64, device=shape.parents.device)
    ranks = [integers([[kids[k] for _, kids in largest if len(kids) > k]]) for k in range(width)]
    nodes = torch.cat(ranks, dim=1) if ranks else shape.parents[:, :0]
    return Families(integers([parent for parent, _ in largest]), ranks, nodes, None)


def _ragged(shape: TreeShape, level: int | None = None) -> Families:
    """The families of shapes that differ by row: all nodes, absent children marked."""
    children = shape.children  # [B, N, K]
    if level is not None:
        children = torch.where((shape.depths == level)[..., None], children, -1)
    ranks = list(children.unbind(-1))
    nodes = torch.cat(ranks, dim=1) if ranks else shape.parents[:, :0]
    return Families(shape.inner, ranks, nodes, [rank >= 0 for rank in ranks])


def trials(tree: DraftTree, walk: Families) -> Iterator[Trial]:
    """The siblings of every family of ``walk``, rank by rank."""
    row = torch.arange(len(tree.tokens), device=tree.tokens.device)[:, None]
    shared = tree.shape.shared
    tokens = tree.tokens.index_select(1, walk.nodes[0]) if shared else tree.tokens[row, walk.nodes]
    probs = tree.probs.index_select(1, walk.nodes[0]) if shared and tree.probs is not None else None
    for rank, (first, end) in enumerate(walk.starts):
        if tree.probs is not None and not shared:
            dist: Tensor | None = tree.probs[row, walk.ranks[rank]]
        else:
            dist = None if probs is None else probs[:, first:end]
        yield Trial(tokens[:, first:end], dist, rank)


def by_node(tree: DraftTree, nodes: Tensor, chances: Tensor) -> Tensor:
    """A table [B, N] of the ``chances`` [B, M] of ``nodes`` [1 or B, M] (-1: none); 1 elsewhere."""
    # missing nodes fall into the spare column
    table = chances.new_ones(len(tree.tokens), tree.shape.size + 1)
    return table.scatter_(1, nodes.expand_as(chances) % table.shape[1], chances)[:, :-1]


def finished(
    tree: DraftTree, p: Tensor, chances: list[Tensor], target: Tensor, excess: Tensor | None = None
) -> Decisions:
    """The decisions, from the ranks' chances [B, F] and the last ``target`` [B, P, V]."""
    walk = families_of(tree.shape)
    joined = torch.cat(chances, dim=1) if chances else p.new_ones(len(p), 0)
    if excess is not None:
        excess = p.new_zeros(p.shape[:2]).index_copy(1, walk.inner, excess)
    after = p.index_copy(1, walk.inner, target)
    return Decisions(by_node(tree, walk.nodes, joined), after, excess=excess)


def top_down(tree: DraftTree, p: Tensor, step: Step, chance: Chance | None = None) -> Decisions:
    """The decisions of the rule defined by ``step`` for the target's distributions ``p`` [B, N, V].

    With ``chance``, which is ``step`` without its residual, only the residual that is sampled is
    computed on a chain.
    """
    if chance is not None and tree.shape.is_chain and tree.shape.width:
        return _along_a_chain(tree, p, step, chance)
    walk = families_of(tree.shape)
    target = p.index_select(1, walk.inner)  # [B, P, V]
    chances = []
    for trial in trials(tree, walk):
        kept, target = _try(walk, target, trial, step)
        chances.append(kept)
    return finished(tree, p, chances, target)


def _along_a_chain(tree: DraftTree, p: Tensor, step: Step, chance: Chance) -> Decisions:
    """``top_down`` on a chain, where only the recovered token faces a draft's residual."""
    probs = tree.probs
    drafts = Trial(tree.tokens[:, 1:], None if probs is None else probs[:, 1:], 0)
    accept = F.pad(chance(p[:, :-1], drafts), (1, 0), value=1.0)

    def after(node: Tensor) -> Tensor:
        node = node[:, None]
        draft = (node + 1).clamp(max=tree.shape.size - 1)
        dist = None if probs is None else at_nodes(probs, draft)
        before = at_nodes(p, node)
        _, residual = step(before, Trial(tree.tokens.gather(1, draft), dist, 0))
        is_last = (draft == node)[..., None]  # no draft follows it
        return torch.where(is_last, before, residual)[:, 0]

    return Decisions(accept, after)


def _try(walk: Families, target: Tensor, trial: Trial, step: Step) -> tuple[Tensor, Tensor]:
    """``step`` on one rank; ``target`` [B, P, V] of families without a child of this rank stays."""
    count = trial.token.shape[1]
    now = target[:, :count]
    chance, residual = step(now, trial)
    if walk.real is not None:
        real = walk.real[trial.rank]
        return torch.where(real, chance, 0.0), torch.where(real[..., None], residual, now)
    if count < target.shape[1]:
        residual = torch.cat([residual, target[:, count:]], dim=1)
    return chance, residual


def top_down_measured(tree: DraftTree, p: Tensor, step: Step, strict: Step) -> Decisions:
    """``top_down`` of a relaxed ``step`` with its excess over the ``strict`` step.

    Both run on the same drafts and uniforms. They differ at sibling k with probability
    ``prod_{j<k}(1 - max(a_j, s_j)) |a_k - s_k|`` and, if both reject all siblings, with the total
    variation of their residuals. This coupling bounds the total variation of what they emit.
    """
    walk = families_of(tree.shape)
    loose = tight = p.index_select(1, walk.inner)
    excess = loose.new_zeros(loose.shape[:2])
    both_rejected = loose.new_ones(loose.shape[:2])  # both have rejected all siblings so far
    chances = []
    for trial in trials(tree, walk):
        a, loose = _try(walk, loose, trial, step)
        s, tight = _try(walk, tight, trial, strict)
        chances.append(a)
        pad = (0, loose.shape[1] - a.shape[1])
        either = F.pad(torch.maximum(a, s), pad)
        excess = excess + both_rejected * F.pad((a - s).abs(), pad)
        both_rejected = both_rejected * (1 - either)
    excess = excess + both_rejected * (loose - tight).abs().sum(-1) / 2
    return finished(tree, p, chances, loose, excess)


@dataclass(frozen=True)
class GreedyMatch:
    """Keep a draft if it is the target's most likely token: the exact rule of greedy decoding.

    ``p`` may be any increasing function of the logits. The next token is the argmax, too; ties go
    to the lowest id.
    """

    greedy: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    name: str = "greedy match"

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        best = likeliest(p)  # [B, N]
        parents = tree.shape.parents.clamp(min=0).expand_as(best)
        return Decisions((best.gather(1, parents) == tree.tokens).to(p.dtype), one_hot(best, p))


def strict_step(target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
    """Accept with min(1, p / q), else p <- norm((p - q)+): Leviathan et al. 2023.

    A point mass has q = 1 at its token.
    """
    return strict_chance(target, trial), strict_residual(target, trial)


def strict_chance(target: Tensor, trial: Trial) -> Tensor:
    """min(1, p / q) [B, F] of the drafts."""
    return kept_with(take(target, trial.token), trial)


def kept_with(mass: Tensor, trial: Trial) -> Tensor:
    """min(1, ``mass`` / q) [B, F] of the drafts, which the target gives ``mass`` [B, F]."""
    if trial.probs is None:
        return mass.clamp(max=1)
    drawn = take(trial.probs, trial.token).clamp(min=torch.finfo(mass.dtype).tiny)
    return (mass / drawn).clamp(max=1)


def strict_residual(target: Tensor, trial: Trial) -> Tensor:
    """norm((p - q)+) [B, F, V], what is left once the drafts are rejected."""
    if trial.probs is None:
        residual = target.scatter(-1, trial.token.unsqueeze(-1), 0.0)
    else:
        residual = (target - trial.probs).clamp_(min=0)
    return normalised(residual, target)


@dataclass(frozen=True)
class Recursive:
    """Siblings in turn: accept with min(1, p / q_k), else p <- norm((p - q_k)+).

    q_k is the distribution that sibling k was drawn from, given its earlier siblings, as the tree
    records it. This unifies the rules of several papers: one draft (Leviathan et al. 2023),
    independent siblings (SpecInfer), siblings without replacement (RSD, Sequoia) and, without
    distributions, point masses (EAGLE-2, MSD: accept with p(x), else take x out). Exact if the
    shape does not depend on the tokens drawn; for point masses tokens and shape may be chosen in
    any way.
    """

    exact: ClassVar[bool] = True
    name: str = "recursive"

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        if tree.probs is None:
            return point_masses(tree, p)
        return top_down(tree, p, strict_step, strict_chance)


@dataclass(frozen=True)
class PointMass:
    """Treats all drafts as point masses: accept x with p(x), else remove x from p.

    Exact for any drafts. If they were drawn from recorded distributions, ``Recursive`` keeps more.
    """

    exact: ClassVar[bool] = True
    name: str = "point mass"

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        return point_masses(tree, p)


def point_masses(tree: DraftTree, p: Tensor) -> Decisions:
    """The recursion for point masses in closed form, without a loop over siblings.

    chance_k = p(x_k) / (p(no sibling) + sum_{j >= k} p(x_j)): sums of positive numbers only, no
    cancellation. A repeated sibling has chance 0.
    """
    if not tree.shape.width:
        return Decisions(torch.ones_like(p[..., 0]), p)
    inner = tree.shape.inner  # [P]
    children = tree.shape.children  # [1 or B, P, K]
    target = p.index_select(1, inner)  # [B, P, V]
    wide = children.clamp(min=0).expand(len(p), -1, -1)
    token = tree.tokens.gather(1, wide.flatten(1)).view_as(wide)  # [B, P, K]
    repeated = (token[..., :, None] == token[..., None, :]).tril(-1).any(-1)
    mass = torch.where((children >= 0) & ~repeated, take(target, token), 0.0)
    residual = target.scatter_add(-1, token, -mass)  # x - x is 0 exactly
    none = residual.sum(-1, keepdim=True)
    remaining = none + mass.flip(-1).cumsum(-1).flip(-1)
    chance = (mass / remaining.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1)
    probs = p.index_copy(1, inner, torch.where(none > 0, residual, target))
    return Decisions(by_node(tree, children.flatten(1), chance.flatten(1)), probs)


@dataclass(frozen=True)
class GreedyMultiDraft:
    """The k - 1 likeliest tokens of q and one sample X of the other tokens (Hu et al. 2025).

    The sibling of rank 0 must be X, and its recorded distribution q', which is q without the
    likeliest, renormalised. The other siblings are chosen, and their recorded distributions are not
    read. X is tested first with min(1, p / q'), then the chosen siblings as point masses. That
    accepts p(chosen) + sum over the rest of min(p, q'), the optimum for such drafts.
    """

    exact: ClassVar[bool] = True
    siblings: ClassVar[Siblings] = "likeliest and one"
    name: str = "greedy multi-draft"

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """See :class:`specmm.verify.rule.Rule`; raises ``ValueError`` for a tree without probs."""
        if tree.probs is None and tree.shape.width:
            raise ValueError(
                "probs must hold the distribution of each rank-0 sibling for greedy multi-draft, "
                "got None"
            )
        return top_down(tree, p, _greedy_step)


def _greedy_step(target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
    chosen = Trial(trial.token, None, trial.rank)
    return strict_step(target, trial if trial.rank == 0 else chosen)
