"""LANTERN and LANTERN++: a draft image token may borrow the target's mass of its nearest codes.

``relaxed(x) = target(x) + S_x`` (see ``neighbours``). What happens after a rejection is
``residual``:

``"corrected"`` (default): drafts of distribution q are kept with mass ``a(x) = min(q(x),
relaxed(x))`` and the rest is drawn
    from ``norm((p - a)+)``. The distribution emitted is *stated*: ``r = a + (1 - sum a) norm((p -
    a)+)``, of all distributions that dominate a the nearest to p in total variation. Its residual
    is the strict rule's, ``norm((p - q)+)``: where q <= p + S, a is q; elsewhere q > p + S >= p and
    a = p + S >= p, so that ``(p - a)+`` and ``(p - q)+`` are both 0. Relaxation raises the chance
    of a draft and leaves what follows a rejection as it is; a point mass leaves p without x. The
    residual needs no S, and an excluded token (p = 0) never comes out of it.
``"official"``: as released. Point masses: x and, if any neighbour qualified, x's first k + 1
neighbours leave the
    target. Drawn drafts: ``(p - q)+`` with those neighbours taken out of q. Zero mass: uniform over
    the whole vocabulary, which can emit a token the processor excluded. No residual of any relaxed
    distribution; for comparisons.
``"lumina"``: as released for Lumina-mGPT: ``(p - q)+`` with the neighbours taken out of p; else as
``"official"``.

The release accepts at u <= ratio; here, as everywhere, u < ratio.
Shape letters: B batch, N nodes, F families, V vocabulary, M nodes but the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from specmm.tree import DraftTree
from specmm.verify.bottom_up import deepest_first
from specmm.verify.exact import strict_step
from specmm.verify.families import (
    Step,
    Trial,
    normalised,
    one_hot,
    take,
    top_down,
    top_down_measured,
)
from specmm.verify.neighbours import Neighbourhood
from specmm.verify.rule import Decisions

Residual: TypeAlias = Literal["corrected", "official", "lumina"]


@dataclass(frozen=True)
class Lantern:
    """LANTERN: S_x is the largest sum over the nearest codes that does not exceed ``delta`` (then
    S_x is the TV spent).

    ``table`` [W, J] from ``neighbour_table`` (J >= k, and k + 1 for the official residual).
    ``greedy`` is the rule of temperature 0: p is then the softmax of the logits. ``offset``: id of
    the first image token.
    """

    table: Tensor
    k: int = 1000
    delta: float = 0.1
    residual: Residual = "corrected"
    greedy: bool = False
    offset: int = 0
    name: str = "lantern"
    exact: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta must be in [0, 1], got {self.delta}")
        _check(self.residual)
        Neighbourhood(self.table, self.k, 0.0)  # refuses a table with fewer columns

    @cached_property
    def neighbourhood(self) -> Neighbourhood:
        """What a token may borrow."""
        return Neighbourhood(self.table, self.k, self.delta, offset=self.offset)

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Decisions for the target's processed distributions ``p`` [B, N, V]."""
        return _decisions(self.neighbourhood, self.residual, self.greedy, tree, p, measure)


@dataclass(frozen=True)
class LanternPP:
    """LANTERN++: S_x is the largest sum over the nearest codes that does not exceed ``(lambda_ - 1)
    target(x)``.

    The other fields are ``Lantern``'s.
    """

    table: Tensor
    k: int = 10
    lambda_: float = 2.0
    residual: Residual = "corrected"
    greedy: bool = False
    offset: int = 0
    name: str = "lantern++"
    exact: bool = False

    def __post_init__(self) -> None:
        if self.lambda_ < 1:
            raise ValueError(f"lambda_ must be at least 1, got {self.lambda_}")
        _check(self.residual)
        Neighbourhood(self.table, self.k, 0.0)  # refuses a table with fewer columns

    @cached_property
    def neighbourhood(self) -> Neighbourhood:
        """What a token may borrow."""
        return Neighbourhood(self.table, self.k, self.lambda_, factor=True, offset=self.offset)

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Decisions for the target's processed distributions ``p`` [B, N, V]."""
        return _decisions(self.neighbourhood, self.residual, self.greedy, tree, p, measure)


def _check(residual: str) -> None:
    if residual not in get_args(Residual):
        raise ValueError(
            f"residual must be one of {', '.join(get_args(Residual))}, got {residual!r}"
        )


def _decisions(
    near: Neighbourhood, residual: Residual, greedy: bool, tree: DraftTree, p: Tensor, measure: bool
) -> Decisions:
    if greedy:
        return _greedy(near, tree, p, measure)
    corrected = residual == "corrected"
    step: Step = _corrected(near) if corrected else _official(near, lumina=residual == "lumina")
    if measure:
        return top_down_measured(tree, p, step, strict_step)
    return top_down(tree, p, step, partial(_relaxed_chance, near) if corrected else None)


def _chance(relaxed: Tensor, trial: Trial) -> Tensor:
    """min(1, relaxed / q) [B, F]."""
    if trial.probs is None:
        return relaxed.clamp(max=1)
    return (
        relaxed / take(trial.probs, trial.token).clamp(min=torch.finfo(relaxed.dtype).tiny)
    ).clamp(max=1)


def _relaxed_chance(near: Neighbourhood, target: Tensor, trial: Trial) -> Tensor:
    """min(1, relaxed / q) [B, F] of the drafts, with what they borrow of ``target`` [B, F, V]."""
    own = take(target, trial.token)
    return _chance(own + near.borrowed(target, trial.token, own)[0], trial)


def _corrected(near: Neighbourhood) -> Step:
    def step(target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
        _, rest = strict_step(target, trial)
        return _relaxed_chance(near, target, trial), rest

    return step


def _official(near: Neighbourhood, *, lumina: bool) -> Step:
    def step(target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
        own = take(target, trial.token)
        borrowed, found = near.borrowed(target, trial.token, own)
        if trial.probs is None:
            rest = _cleared(near, target, trial.token, found).scatter(
                -1, trial.token[..., None], 0.0
            )
        elif lumina:
            rest = (_cleared(near, target, trial.token, found) - trial.probs).clamp_(min=0)
        else:
            rest = (target - _cleared(near, trial.probs, trial.token, found)).clamp_(min=0)
        everywhere = torch.full_like(target, 1 / target.shape[-1])
        return _chance(own + borrowed, trial), normalised(rest, everywhere)

    return step


def _cleared(near: Neighbourhood, probs: Tensor, token: Tensor, where: Tensor) -> Tensor:
    """``probs`` [B, F, V] without the first k + 1 neighbours of ``token`` [B, F] ``where`` [B, F]
    that is wanted.
    """
    if not near.k:
        return probs
    codes = near.near(token, near.k + 1)[0]
    return probs.scatter(-1, codes, torch.where(where[..., None], 0.0, probs.gather(-1, codes)))


def _greedy(near: Neighbourhood, tree: DraftTree, p: Tensor, measure: bool) -> Decisions:
    """Keep x iff it is the argmax once its entry is its relaxed mass; of the paths kept, the first
    of the longest.
    """
    best = p.argmax(-1)  # [B, N]
    parents = tree.shape.parents.clamp(min=0).expand_as(best)
    row = torch.arange(len(p), device=p.device)[:, None]
    before = p[row, parents]  # [B, N, V]: what each node's parent predicts
    own = take(before, tree.tokens)
    relaxed = own + near.borrowed(before, tree.tokens, own)[0]
    likeliest = best.gather(1, parents)
    top = take(before, likeliest)
    wins = (
        (tree.tokens == likeliest)
        | (relaxed > top)
        | ((relaxed == top) & (tree.tokens < likeliest))
    )
    wins[:, 0] = True
    kept = ~(tree.shape.ancestors & ~wins[:, None]).any(-1)
    excess = None
    # a kept child other than the argmax: what follows the parent may differ from greedy decoding
    if measure:
        wrong = (kept & (tree.tokens != likeliest)).to(p.dtype)
        excess = torch.zeros_like(own).scatter_reduce(
            1, parents, wrong.index_fill(1, parents.new_zeros(1), 0), "amax"
        )
    return Decisions(kept.to(p.dtype), one_hot(best, p), deepest_first(tree.shape), excess)
