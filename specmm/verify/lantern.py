"""LANTERN and LANTERN++: a drafted image token may borrow the target's mass of its nearest codes.

``relaxed(x) = target(x) + S_x``. S_j sums the target over the j nearest codes of x; S_x is the
largest S_j, j <= k, within the bound: ``delta`` for LANTERN (Jang et al. 2025), ``(lambda - 1)
target(x)`` for LANTERN++ (Park et al. 2025). A draft is kept with chance ``min(1, relaxed / q)``.
``residual`` chooses the distribution from which the next token is drawn after a rejection:

``"corrected"`` (default): the strict rule's ``norm((p - q)+)``; a point mass leaves p without x. A
token that the processor excluded (p = 0) is never emitted. The output distribution is known: with
the kept mass ``a(x) = min(q(x), relaxed(x))`` it is ``r = a + (1 - sum a) norm((p - a)+)``, of all
distributions that dominate a the nearest to p in total variation. ``(p - a)+`` is ``(p - q)+``:
where q <= p + S, a is q; elsewhere q > p + S >= p and a = p + S >= p, so that both are 0.
``"release"``: as the authors' code, for comparisons. Point masses: x and, if any neighbour
qualified, x's first k + 1 neighbours leave the target. Drawn drafts: ``(p - q)+`` with those
neighbours taken out of q. Zero mass: uniform over the whole vocabulary. It is no residual of the
relaxed distribution, and it can emit a token that the processor excluded. ``"lumina"``: the
authors' code for Lumina-mGPT: ``(p - q)+`` with the neighbours taken out of p; else as
``"release"``.

The release accepts at u <= ratio; here, as everywhere, u < ratio.
Shape letters: B batch, N nodes, F families, V vocabulary, W codes in the table, C code width, J
table columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from specmm.core.sorting import likeliest
from specmm.core.tree import DraftTree
from specmm.extending.kinds import check_at_least
from specmm.verify.bottom_up import deepest_first
from specmm.verify.exact import (
    Step,
    Trial,
    kept_with,
    normalised,
    one_hot,
    strict_residual,
    strict_step,
    take,
    top_down,
    top_down_measured,
)
from specmm.verify.rule import Decisions

Residual: TypeAlias = Literal["corrected", "release", "lumina"]
CHUNK = 1 << 23  # distances between codes at a time


def neighbour_table(codebook: Tensor, columns: int) -> Tensor:
    """The ``columns`` nearest other codes of each code by L2 distance, nearest first: [W, columns]
    int64.

    ``codebook`` [W, C]: raw rows, not normalised. The release's residual reads k + 1 columns.
    """
    codes = len(codebook)
    if not 0 <= columns < codes:
        raise ValueError(f"columns must be in [0, {codes}) for {codes} codes, got {columns}")
    rows = codebook.double()
    step = max(1, CHUNK // codes)
    nearest = []
    for start in range(0, codes, step):
        distance = torch.cdist(
            rows[start : start + step], rows, compute_mode="donot_use_mm_for_euclid_dist"
        )
        itself = torch.arange(start, start + len(distance), device=rows.device)[:, None]
        distance.scatter_(1, itself, torch.inf)
        nearest.append(distance.sort(dim=1, stable=True).indices[:, :columns])
    return torch.cat(nearest)


def checked_residual(name: str) -> Residual:
    """``name`` as a residual; raises ``ValueError`` for another."""
    if name not in get_args(Residual):
        raise ValueError(f"residual must be one of {', '.join(get_args(Residual))}, got {name!r}")
    return cast(Residual, name)


@dataclass(frozen=True)
class Neighbourhood:
    """The mass S_x that a token borrows: up to ``bound`` or, if ``factor``, (bound - 1) target(x).

    Token ``offset + c`` is code c of ``table`` [W, J]; tokens that are no code borrow nothing.
    """

    table: Tensor
    k: int
    bound: float
    factor: bool = False
    offset: int = 0

    def __post_init__(self) -> None:
        codes, columns = self.table.shape
        if not 0 <= self.k <= columns:
            raise ValueError(
                f"k must be in [0, {columns}] for a table of {codes} x {columns}, got {self.k}"
            )

    def borrowed(self, target: Tensor, token: Tensor, token_prob: Tensor) -> tuple[Tensor, Tensor]:
        """S of ``token`` [B, F] under ``target`` [B, F, V], and whether any neighbour qualifies:
        [B, F] both.

        ``token_prob`` [B, F] is target(token).
        """
        if not self.k:
            return torch.zeros_like(token_prob), torch.zeros_like(token_prob, dtype=torch.bool)
        near, is_code = self.near(token, self.k)
        total = target.gather(-1, near).cumsum(-1)
        bound = (self.bound - 1) * token_prob[..., None] if self.factor else self.bound
        over = (total > bound) | ~is_code[..., None]
        return total.masked_fill_(over, 0.0).amax(-1), ~over[..., 0]

    def near(self, token: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Nearest ids [..., count] of ``token`` [...], and whether it is a code [...]."""
        code = token - self.offset
        is_code = (code >= 0) & (code < len(self.table))
        near = self.table[:, :count][code.clamp(0, len(self.table) - 1)]
        return near + self.offset if self.offset else near, is_code


class _Borrowing:
    """Base class of both rules, with their ``neighbourhood``."""

    residual: Residual
    greedy: bool
    name: str

    @property
    def neighbourhood(self) -> Neighbourhood:
        """The mass that a token may borrow."""
        raise NotImplementedError

    def _begin(self) -> None:
        object.__setattr__(self, "residual", checked_residual(self.residual))
        if self.residual == "release":  # so that certificates tell it from the default
            object.__setattr__(self, "name", f"{self.name.removesuffix('-release')}-release")
        _ = self.neighbourhood  # refuses a table with fewer columns

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        near = self.neighbourhood
        if self.greedy:
            return _greedy(near, tree, p, measure)
        corrected = self.residual == "corrected"
        step = _corrected(near) if corrected else _released(near, lumina=self.residual == "lumina")
        if measure:
            return top_down_measured(tree, p, step, strict_step)
        return top_down(tree, p, step, partial(_relaxed_chance, near) if corrected else None)


@dataclass(frozen=True)
class Lantern(_Borrowing):
    """LANTERN: a draft may borrow up to ``delta`` of the probability of its ``k`` nearest codes.

    The amount borrowed is the total variation spent.

    ``table`` [W, J] from ``neighbour_table`` (J >= k, and k + 1 for the release's residual).
    ``greedy`` is the rule of temperature 0: p is then the softmax of the logits. ``offset``: id of
    the first image token.
    """

    exact: ClassVar[bool] = False
    table: Tensor
    k: int = 1000
    delta: float = 0.1
    residual: Residual = "corrected"
    greedy: bool = False
    offset: int = 0
    name: str = "lantern"

    def __post_init__(self) -> None:
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta must be in [0, 1], got {self.delta}")
        self._begin()

    @cached_property
    def neighbourhood(self) -> Neighbourhood:
        return Neighbourhood(self.table, self.k, self.delta, offset=self.offset)


@dataclass(frozen=True)
class LanternPP(_Borrowing):
    """LANTERN++: a draft borrows at most ``(lambda_ - 1) target(x)`` of its ``k`` nearest codes.

    Other fields as in ``Lantern``.
    """

    exact: ClassVar[bool] = False
    table: Tensor
    k: int = 10
    lambda_: float = 2.0
    residual: Residual = "corrected"
    greedy: bool = False
    offset: int = 0
    name: str = "lantern++"

    def __post_init__(self) -> None:
        check_at_least(1, lambda_=self.lambda_)
        self._begin()

    @cached_property
    def neighbourhood(self) -> Neighbourhood:
        return Neighbourhood(self.table, self.k, self.lambda_, factor=True, offset=self.offset)


def _relaxed_chance(near: Neighbourhood, target: Tensor, trial: Trial) -> Tensor:
    """min(1, relaxed / q) [B, F] of the drafts, with mass borrowed from ``target`` [B, F, V]."""
    token_prob = take(target, trial.token)
    return kept_with(token_prob + near.borrowed(target, trial.token, token_prob)[0], trial)


def _corrected(near: Neighbourhood) -> Step:
    def step(target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
        return _relaxed_chance(near, target, trial), strict_residual(target, trial)

    return step


def _released(near: Neighbourhood, *, lumina: bool) -> Step:
    """The step of the release's residual, or of Lumina-mGPT's."""

    def step(target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
        token_prob = take(target, trial.token)
        borrowed, any_near = near.borrowed(target, trial.token, token_prob)
        if trial.probs is None:
            residual = _cleared(near, target, trial.token, any_near).scatter(
                -1, trial.token[..., None], 0.0
            )
        elif lumina:
            residual = (_cleared(near, target, trial.token, any_near) - trial.probs).clamp_(min=0)
        else:
            residual = (target - _cleared(near, trial.probs, trial.token, any_near)).clamp_(min=0)
        everywhere = torch.full_like(target, 1 / target.shape[-1])
        return kept_with(token_prob + borrowed, trial), normalised(residual, everywhere)

    return step


def _cleared(near: Neighbourhood, probs: Tensor, token: Tensor, where: Tensor) -> Tensor:
    """``probs`` [B, F, V] without the first k + 1 neighbours of ``token`` [B, F] if ``where``."""
    if not near.k:
        return probs
    codes = near.near(token, near.k + 1)[0]
    return probs.scatter(-1, codes, torch.where(where[..., None], 0.0, probs.gather(-1, codes)))


def _greedy(near: Neighbourhood, tree: DraftTree, p: Tensor, measure: bool) -> Decisions:
    """Keep x if it is the argmax once its mass is relaxed; the path is the longest kept one."""
    best = likeliest(p)  # [B, N]
    parents = tree.shape.parents.clamp(min=0).expand_as(best)
    chosen = best.gather(1, parents)
    row = torch.arange(len(p), device=p.device)[:, None]
    before = p[row, parents]  # [B, N, V]: what each node's parent predicts
    token_prob = take(before, tree.tokens)
    relaxed = token_prob + near.borrowed(before, tree.tokens, token_prob)[0]
    top = take(before, chosen)
    wins = (tree.tokens == chosen) | (relaxed > top) | ((relaxed == top) & (tree.tokens < chosen))
    wins[:, 0] = True
    accepted = ~(tree.shape.ancestors & ~wins[:, None]).any(-1)
    excess = None
    if measure:  # a kept child other than the argmax: greedy decoding may go on otherwise
        wrong = (accepted & (tree.tokens != chosen)).to(p.dtype)
        excess = torch.zeros_like(token_prob).scatter_reduce(
            1, parents, wrong.index_fill(1, parents.new_zeros(1), 0), "amax"
        )
    return Decisions(accepted.to(p.dtype), one_hot(best, p), deepest_first(tree.shape), excess)
