"""Relaxed rules for any vocabulary: typical acceptance (Medusa) and grouped acceptance (GSD).

Shape letters: B batch, N nodes, F families tested, V vocabulary, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.tree import DraftTree
from specmm.verify.exact import strict_step
from specmm.verify.families import Step, Trial, normalised, one_hot, take, top_down, top_down_measured
from specmm.verify.rule import Decisions


@dataclass(frozen=True)
class Typical:
    """Typical acceptance (Cai et al. 2024, Medusa): keep x if p(x) > min(epsilon, delta exp(-H(p))).

    Siblings are tried in turn and the first that passes is kept (Medusa takes the longest path); where none passes,
    the next token is drawn from p itself.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    name: str = "typical"
    exact: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1 or self.delta <= 0:
            raise ValueError(f"epsilon must be in (0, 1] and delta positive, got {self.epsilon} and {self.delta}")

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Decisions for the target's processed laws ``p`` [B, N, V]."""
        return top_down_measured(tree, p, self._step, strict_step) if measure else top_down(tree, p, self._step)

    def _step(self, target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
        entropy = torch.special.entr(target).sum(-1)
        bar = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        return (take(target, trial.token) > bar).to(target.dtype), target


@dataclass(frozen=True)
class Grouped:
    """Grouped acceptance (GSD, So et al. 2025) with fixed groups: keep x with min(1, p(group of x) / q(group of x)).

    ``groups`` [V] int64 names each token's group. After a rejection the groups' mass is (p(G) - q(G))+, spread within
    a group as p is: so the *group* of the emitted token keeps the target's law; which of its tokens is the drafter's
    choice when a draft is kept.
    """

    groups: Tensor
    name: str = "grouped"
    exact: bool = False

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Decisions for the target's processed laws ``p`` [B, N, V]."""
        if self.groups.shape != p.shape[-1:]:
            raise ValueError(f"groups must be [{p.shape[-1]}], got {list(self.groups.shape)}")
        step: Step = self._step
        return top_down_measured(tree, p, step, strict_step) if measure else top_down(tree, p, step)

    def _step(self, target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
        law = one_hot(trial.token, target) if trial.law is None else trial.law
        p, q = self._mass(target), self._mass(law)  # [B, F, V]: of each token's group
        tiny = torch.finfo(target.dtype).tiny
        chance = (take(p, trial.token) / take(q, trial.token).clamp(min=tiny)).clamp(max=1)
        rest = target * ((p - q).clamp_(min=0) / p.clamp(min=tiny))
        return chance, normalised(rest, target)

    def _mass(self, law: Tensor) -> Tensor:
        groups = self.groups.expand_as(law)
        return torch.zeros_like(law).scatter_add_(-1, groups, law).gather(-1, groups)
