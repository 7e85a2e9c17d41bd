"""Rules of one's own: one that is exact, and one that trades exactness for longer drafts.

    specmm --load demos/own/rule.py bench pocket/llamagen --methods "draft(rule=generous(factor=2))"

A rule is deterministic. From the drafts and the target's distributions it computes how likely each
draft is kept and what the next token is drawn from; the uniforms are compared elsewhere. Rules that
walk from the root down are a *step*: from the target [B, F, V] and one draft of each of F families
to the chance of keeping it [B, F] and to the target once it is rejected [B, F, V].

``exact = True`` is a claim. specmm enumerates it on the trees of a run before a certificate says
so, and names this file as its author. ``bottom_up = False`` says that no decision about a draft
looks at those after it, which drafts that stay from round to round (``sjd``) need. A relaxed rule
measures by how much it differs: ``top_down_measured`` runs it beside the strict step on the same
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import specmm
from specmm.core.tree import DraftTree
from specmm.verify.exact import Trial, normalised, strict_step, take, top_down, top_down_measured
from specmm.verify.rule import Decisions


@specmm.register("rule", "plain-ratio")
@dataclass(frozen=True)
class PlainRatio:
    """Speculative sampling: a draft x is kept with min(1, p(x) / q(x)), siblings in turn."""

    name: str = "plain-ratio"
    exact: bool = True
    bottom_up: ClassVar[bool] = False

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """See :class:`specmm.verify.rule.Rule`; ``p`` is [B, N, V]."""
        return top_down(tree, p, self._step)

    def _step(self, target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
        if trial.probs is None:  # chosen drafts: kept with p(x), then without it
            left = target.scatter(-1, trial.token[..., None], 0.0)
            return take(target, trial.token), normalised(left, target)
        drawn = take(trial.probs, trial.token).clamp(min=1e-30)
        chance = (take(target, trial.token) / drawn).clamp(max=1)
        return chance, normalised((target - trial.probs).clamp(min=0), target)


@specmm.register("rule", "generous")
@dataclass(frozen=True)
class Generous:
    """A draft is kept ``factor`` times as readily: with min(1, factor p(x) / q(x))."""

    factor: float = 1.5
    name: str = "generous"
    exact: bool = False
    bottom_up: ClassVar[bool] = False

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """See :class:`specmm.verify.rule.Rule`."""
        if measure:
            return top_down_measured(tree, p, self._step, strict_step)
        return top_down(tree, p, self._step)

    def _step(self, target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
        chance, rest = strict_step(target, trial)
        return (self.factor * chance).clamp(max=1), rest
