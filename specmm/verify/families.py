"""The loop every top-down rule shares: siblings are tested in turn, in all families of the batch at
once.

A family is an inner node with its children. A rule of this kind is a *step*: from the family's
current target and one draft to the probability of keeping the draft, and the target that the next
sibling (or the recovered token) faces once it is rejected.

Shape letters: B batch, N nodes, P families, K most children, F families that have a child of the
rank at hand (P for shapes that differ by row), V vocabulary. A leading 1 stands for "shared by all
rows".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from specmm.tree import DraftTree, TreeShape
from specmm.verify.rule import Decisions


@dataclass(frozen=True)
class Trial:
    """One sibling of each family: its token [B, F], the distribution it was drawn from [B, F, V]
    (None: a point mass).

    ``rank`` is its place among its siblings; ``sizes`` [1 or B, F] counts them.
    """

    token: Tensor
    probs: Tensor | None
    rank: int
    sizes: Tensor


Step: TypeAlias = Callable[[Tensor, Trial], tuple[Tensor, Tensor]]
"""(target [B, F, V] of total 1, trial) -> (chance of keeping the draft [B, F], target once it is
rejected).
"""

Chance: TypeAlias = Callable[[Tensor, Trial], Tensor]
"""The first of what a step gives."""


@dataclass(frozen=True)
class Plan:
    """How a shape is walked: its inner nodes [P], the larger families first, and the nodes of each
    rank [1 or B, F].

    In a shared shape F shrinks with the rank, so that no step meets a missing child; otherwise F is
    P and ``real`` marks the nodes that exist. ``nodes`` [1 or B, M] joins the ranks. ``sizes`` [1
    or B, P].
    """

    inner: Tensor
    ranks: list[Tensor]
    nodes: Tensor
    sizes: Tensor
    real: list[Tensor] | None

    @property
    def starts(self) -> Iterator[tuple[int, int]]:
        """(first, end) of each rank within ``nodes``."""
        end = 0
        for rank in self.ranks:
            first, end = end, end + rank.shape[1]
            yield first, end


def plan(shape: TreeShape) -> Plan:
    """The plan of ``shape``, made once for each shape object."""
    return shape.once("plan", _shared_plan if shape.shared else _ragged_plan)


def level_plans(shape: TreeShape) -> list[Plan]:
    """The plan cut by the depth of the inner node, the root's family first."""
    return shape.once("level plans", _cut)


def _cut(shape: TreeShape) -> list[Plan]:
    cut = _shared_plan if shape.shared else _ragged_plan
    plans = [cut(shape, depth) for depth in range(shape.depth)]
    return [plan for plan in plans if plan.ranks]  # a bound on the depth may exceed the depth


def _shared_plan(shape: TreeShape, level: int | None = None) -> Plan:
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
    sizes = integers([[len(kids) for _, kids in largest]])
    nodes = torch.cat(ranks, dim=1) if ranks else shape.parents[:, :0]
    return Plan(integers([parent for parent, _ in largest]), ranks, nodes, sizes, None)


def _ragged_plan(shape: TreeShape, level: int | None = None) -> Plan:
    children = shape.children  # [B, N, K]
    if level is not None:
        children = torch.where((shape.depths == level)[..., None], children, -1)
    ranks = list(children.unbind(-1))
    nodes = torch.cat(ranks, dim=1) if ranks else shape.parents[:, :0]
    return Plan(shape.inner, ranks, nodes, (children >= 0).sum(-1), [rank >= 0 for rank in ranks])


def normalised(rest: Tensor, fallback: Tensor) -> Tensor:
    """``rest`` [..., V] scaled to total 1; ``fallback``, which keeps the processed support, where
    nothing is left.
    """
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, fallback)


def take(probs: Tensor, token: Tensor) -> Tensor:
    """The mass of ``token`` [..., M] in ``probs`` [..., V]: [..., M]; without M when token has one
    axis less.
    """
    if token.ndim < probs.ndim:
        return probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return probs.gather(-1, token)


def one_hot(token: Tensor, like: Tensor) -> Tensor:
    """Point masses [..., V] at ``token`` [...], of the dtype and width of ``like`` [..., V]."""
    return like.new_zeros(*token.shape, like.shape[-1]).scatter_(-1, token.unsqueeze(-1), 1.0)


def trials(tree: DraftTree, walk: Plan) -> Iterator[Trial]:
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
        yield Trial(tokens[:, first:end], dist, rank, walk.sizes[:, : end - first])


def spread(tree: DraftTree, nodes: Tensor, chances: Tensor) -> Tensor:
    """``chances`` [B, M] of ``nodes`` [1 or B, M] (-1: none) as a table by node [B, N]; the root's
    is 1.
    """
    table = chances.new_ones(
        len(tree.tokens), tree.shape.size + 1
    )  # missing nodes fall into the spare column
    return table.scatter_(1, nodes.expand_as(chances) % table.shape[1], chances)[:, :-1]


def finished(
    tree: DraftTree, p: Tensor, chances: list[Tensor], target: Tensor, excess: Tensor | None = None
) -> Decisions:
    """Decisions from the chances of each rank ([B, F] each) and what the families are left with [B,
    P, V].
    """
    walk = plan(tree.shape)
    accept = spread(
        tree, walk.nodes, torch.cat(chances, dim=1) if chances else p.new_ones(len(p), 0)
    )
    if excess is not None:
        excess = p.new_zeros(p.shape[:2]).index_copy(1, walk.inner, excess)
    return Decisions(accept, p.index_copy(1, walk.inner, target), excess=excess)


def top_down(tree: DraftTree, p: Tensor, step: Step, chance: Chance | None = None) -> Decisions:
    """Decisions of the rule made of ``step`` for the target's distributions ``p`` [B, N, V].

    With ``chance``, which is ``step`` without its residual, a chain's residual is left until its
    path has ended.
    """
    if chance is not None and tree.shape.shared and tree.shape.width == 1:
        return _one_by_one(tree, p, step, chance)
    walk = plan(tree.shape)
    target = p.index_select(1, walk.inner)  # [B, P, V]
    chances = []
    for trial in trials(tree, walk):
        kept, target = _try(walk, target, trial, step)
        chances.append(kept)
    return finished(tree, p, chances, target)


def _one_by_one(tree: DraftTree, p: Tensor, step: Step, chance: Chance) -> Decisions:
    """``top_down`` on a chain: nobody faces a draft's residual but the token that is drawn in its
    place.
    """
    sizes, probs = plan(tree.shape).sizes, tree.probs
    drafts = Trial(tree.tokens[:, 1:], None if probs is None else probs[:, 1:], 0, sizes)
    accept = torch.nn.functional.pad(chance(p[:, :-1], drafts), (1, 0), value=1.0)

    def after(node: Tensor) -> Tensor:
        row, draft = (
            torch.arange(len(node), device=node.device),
            (node + 1).clamp(max=tree.shape.size - 1),
        )
        dist, before = None if probs is None else probs[row, draft, None], p[row, node]
        _, rest = step(before[:, None], Trial(tree.tokens[row, draft, None], dist, 0, sizes[:, :1]))
        return torch.where(
            (draft == node)[:, None], before, rest[:, 0]
        )  # after the last draft there is none

    return Decisions(accept, after)


def _try(walk: Plan, target: Tensor, trial: Trial, step: Step) -> tuple[Tensor, Tensor]:
    """One rank of ``step`` on all families [B, P, V], leaving those without a child of this rank as
    they are.
    """
    count = trial.token.shape[1]
    now = target[:, :count]
    chance, rest = step(now, trial)
    if walk.real is not None:
        real = walk.real[trial.rank]
        return torch.where(real, chance, 0.0), torch.where(real[..., None], rest, now)
    return chance, rest if count == target.shape[1] else torch.cat([rest, target[:, count:]], dim=1)


def top_down_measured(tree: DraftTree, p: Tensor, step: Step, strict: Step) -> Decisions:
    """``top_down`` of a relaxed ``step`` with its excess over ``strict``, both run on the same
    drafts and uniforms.

    The two part at sibling k with probability ``prod_{j<k}(1 - max(a_j, s_j)) |a_k - s_k|`` and,
    when both reject all, with the total variation of their residuals: the coupling bounds the total
    variation of what they emit.
    """
    walk = plan(tree.shape)
    loose = tight = p.index_select(1, walk.inner)
    excess, both = loose.new_zeros(loose.shape[:2]), loose.new_ones(loose.shape[:2])
    chances = []
    for trial in trials(tree, walk):
        a, loose = _try(walk, loose, trial, step)
        s, tight = _try(walk, tight, trial, strict)
        chances.append(a)
        pad = (0, loose.shape[1] - a.shape[1])
        part, either = (
            torch.nn.functional.pad(x, pad) for x in ((a - s).abs(), torch.maximum(a, s))
        )
        excess = excess + both * part
        both = both * (1 - either)
    excess = excess + both * (loose - tight).abs().sum(-1) / 2
    return finished(tree, p, chances, loose, excess)
