"""Classifier-free guidance over branches, and masks of the tokens that may be drawn.

Shape letters: B batch, G guidance branches ([cond; uncond] under guidance), R = G·B rows, N tree
nodes, V vocabulary, K masks, T tokens of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specmm.extending.kinds import check_at_least, check_whole


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: ``scale`` ≥ 0 (1: off), of tokens 0 … n + 1 if n = ``interval`` ≥
    0.
    """

    scale: float = 1.0
    interval: int = -1

    def __post_init__(self) -> None:
        check_at_least(0, ", use 1 for no guidance", cfg=self.scale)
        check_whole(cfg_interval=self.interval)
        if self.interval < -1:
            raise ValueError(
                f"cfg_interval must be at least -1, which guides all tokens, got {self.interval}"
            )

    @property
    def branches(self) -> int:
        """G: as in LlamaGen, only scales above 1 guide."""
        return 2 if self.scale > 1 else 1

    @property
    def settings(self) -> dict[str, float]:
        """The options that shape the distribution, for certificates."""
        if self.branches == 1:
            return {"cfg": 1.0}
        last = {"cfg_interval": self.interval} if self.interval > -1 else {}
        return {"cfg": self.scale} | last

    def mix(self, logits: Tensor, positions: Tensor, prompt: Tensor | int) -> Tensor:
        """Guided logits [B, N, V] from ``logits`` [R, N, V] of all branches.

        ``positions`` [1 or R, N] are the nodes' positions; ``prompt`` ([B, 1] or one number) counts
        the tokens before the first drawn token.
        """
        if self.branches == 1:
            return logits
        cond, uncond = logits.chunk(2)
        if self.interval < 0:
            return torch.lerp(uncond, cond, self.scale)
        drawn = positions[: len(cond)] - prompt + 1  # the token that these logits predict
        scale = torch.where(drawn <= self.interval + 1, self.scale, 1.0)
        return torch.lerp(uncond, cond, scale[..., None])


@dataclass(frozen=True)
class AllowedTokens:
    """The tokens that may be drawn: ``masks`` [K, V] bool, and the mask's index for each token,
    ``places`` [T].

    The last entry of ``places`` applies to all later tokens.
    """

    masks: Tensor
    places: Tensor

    @classmethod
    def everywhere(cls, mask: Tensor) -> AllowedTokens:
        """The same ``mask`` [V] bool for every token."""
        return cls(mask[None], torch.zeros(1, dtype=torch.int64, device=mask.device))

    @cached_property
    def everything(self) -> bool:
        """Whether any token may come anywhere."""
        return bool(self.masks.all())

    def to(self, device: torch.device) -> AllowedTokens:
        """A copy on ``device``."""
        return AllowedTokens(self.masks.to(device), self.places.to(device))

    def at(self, drawn: Tensor) -> Tensor:
        """Masks [..., V] for tokens number ``drawn`` [...] of their answers, counted from 0."""
        if len(self.masks) == 1:
            return self.masks[0].expand(*drawn.shape, -1)
        return self.masks[self.places[drawn.clamp(max=len(self.places) - 1)]]

    def __call__(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """``logits`` [B, N, V], ``-inf`` for tokens not allowed as number ``drawn`` [1 or B, N]."""
        if self.everything:
            return logits
        if len(self.masks) == 1:  # one row of V is inverted, not one a node
            return logits.masked_fill(~self.masks[0], float("-inf"))
        return logits.masked_fill(~self.at(drawn), float("-inf"))
