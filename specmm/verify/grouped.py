"""GSD's grouped acceptance: tokens that are about as likely as a draft share their mass with it.

Of the draft x and the target p, the group G of x holds x and those of its ``span`` neighbours to
either side in the order of p whose probability differs from p(x) by less than ``gap`` (So et al.
2025, arXiv 2508.07747: dynamic groups). The authors' code also asks that codes look alike, by a
threshold on the distance of their embeddings; here ``k`` asks that they are among the k nearest
codes of x, which needs no scale (0: any). A draft is kept with chance ``min(1, p(G) / q(G))``. Once
it is rejected the next token comes from the strict rule's ``norm((p - q)+)``, as in the paper.

One draft of distribution q thus emits ``a + (1 - sum a) norm((p - q)+)`` with the kept mass ``a(x)
= q(x) min(1, p(G) / q(G))``. Groups overlap, so this is not an exact rule even about groups: its
deviation is measured.

Shape letters: B batch, N nodes, F families, V vocabulary, W codes in the table, J table columns, M
tokens of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from specmm.core.tree import DraftTree
from specmm.verify.exact import (
    Trial,
    strict_residual,
    strict_step,
    take,
    top_down,
    top_down_measured,
)
from specmm.verify.lantern import Neighbourhood
from specmm.verify.rule import Decisions


@dataclass(frozen=True)
class Grouped:
    """A draft is kept with min(1, p(G) / q(G)), G the tokens about as likely as it.

    ``table`` [W, J] from ``neighbour_table`` (J >= k), None for k = 0. ``offset``: id of the first
    image token. For greedy decoding, where no token is as likely as the draft, use ``GreedyMatch``.
    """

    exact: ClassVar[bool] = False
    table: Tensor | None = None
    span: int = 7
    gap: float = 0.15
    k: int = 0
    offset: int = 0
    name: str = "grouped"

    def __post_init__(self) -> None:
        if self.span < 0 or not 0 <= self.gap <= 1:
            raise ValueError(
                f"span must be at least 0 and gap in [0, 1], got {self.span} and {self.gap}"
            )
        if self.k and self.table is None:
            raise ValueError(f"k must be 0 without a table of nearest codes, got {self.k}")
        _ = self.neighbourhood  # refuses a table with fewer columns

    @cached_property
    def neighbourhood(self) -> Neighbourhood | None:
        """The nearest codes of a token; None: all tokens count."""
        if not self.k or self.table is None:
            return None
        return Neighbourhood(self.table, self.k, 0.0, offset=self.offset)

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        if measure:
            return top_down_measured(tree, p, self._step, strict_step)
        return top_down(tree, p, self._step, self._chance)

    def _step(self, target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
        return self._chance(target, trial), strict_residual(target, trial)

    def _chance(self, target: Tensor, trial: Trial) -> Tensor:
        """min(1, p(G) / q(G)) [B, F] of the drafts under ``target`` [B, F, V]."""
        group, member = self._group(target, trial.token)
        mass = (take(target, group) * member).sum(-1)
        if trial.probs is None:
            return mass.clamp(max=1)
        drawn = (take(trial.probs, group) * member).sum(-1)
        return (mass / drawn.clamp(min=torch.finfo(mass.dtype).tiny)).clamp(max=1)

    def _group(self, target: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates [B, F, M] for the groups of ``token`` [B, F], and which are in them: bool."""
        order = target.argsort(dim=-1, descending=True, stable=True)
        rank = (order == token[..., None]).int().argmax(-1, keepdim=True)
        places = rank + torch.arange(-self.span, self.span + 1, device=rank.device)
        inside = (places >= 0) & (places < target.shape[-1])
        group = order.gather(-1, places.clamp(0, target.shape[-1] - 1))
        token_prob = take(target, token)[..., None]
        alike = (take(target, group) - token_prob).abs() < self.gap
        if self.neighbourhood is not None:
            near, is_code = self.neighbourhood.near(token, self.k)
            members = (group[..., None] == near[..., None, :]).any(-1)
            alike &= members & is_code[..., None]
        return group, inside & (alike | (group == token[..., None]))
