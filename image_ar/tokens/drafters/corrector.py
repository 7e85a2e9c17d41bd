"""What the target would say of a place, had the token before it not been another.

A round of Jacobi decoding scores its drafts up to the end. Where one is rejected another token
takes its place, and the state that the next token would be drawn from is that after the rejected
one. The corrector reads this state and both tokens and gives the state after the new one: two
linear layers, neither attention nor a cache, a hundredth of a target's step. The target's head
makes logits of it, as of its own states.

Shape letters: R rows, N places, C width, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.drawing import Sizes


@dataclass(frozen=True)
class CorrectorConfig:
    """Sizes of a corrector for a ``target``; ``inner`` is F, 0 for the target's."""

    target: Sizes
    inner: int = 0

    def facts(self) -> dict[str, object]:
        """What ``config.json`` says of a corrector."""
        return {"model": "Corrector", "inner": self.inner}


class Corrector(nn.Module):
    """The network; it begins as one that corrects nothing."""

    def __init__(self, config: CorrectorConfig) -> None:
        super().__init__()
        width = config.target.dim
        inner = config.inner or config.target.ffn_dim
        self.config = config
        self.read = nn.Linear(3 * width, inner)
        self.write = nn.Linear(inner, width)
        nn.init.zeros_(self.write.weight)
        nn.init.zeros_(self.write.bias)

    def forward(self, stale: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """States [R, N, C] after the tokens embedded as ``new`` [R, N, C], of those after ``old``
        ones, ``stale`` [R, N, C], which are behind the target's final norm.
        """
        change = self.write(F.silu(self.read(torch.cat([stale, new, old], dim=-1))))
        return stale + change
