"""A relaxed rule for any vocabulary: typical acceptance (Medusa).

Shape letters: B batch, N nodes, F families, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specmm.core.tree import DraftTree
from specmm.verify.exact import Trial, strict_step, take, top_down, top_down_measured
from specmm.verify.rule import Decisions


@dataclass(frozen=True)
class Typical:
    """Typical acceptance (Medusa, Cai et al. 2024): p(x) > min(epsilon, delta exp(-H(p))).

    Siblings are tried in turn and the first that passes is kept (Medusa takes the longest path). If
    none passes, the next token is drawn from p itself.
    """

    exact: ClassVar[bool] = False
    epsilon: float = 0.09
    delta: float = 0.3
    name: str = "typical"

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1 or self.delta <= 0:
            raise ValueError(
                f"epsilon must be in (0, 1] and delta positive, got {self.epsilon} and {self.delta}"
            )

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        if measure:
            return top_down_measured(tree, p, self._step, strict_step)
        return top_down(tree, p, self._step)

    def _step(self, target: Tensor, trial: Trial) -> tuple[Tensor, Tensor]:
        entropy = torch.special.entr(target).sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        return (take(target, trial.token) > threshold).to(target.dtype), target
