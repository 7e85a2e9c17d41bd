"""Methods of continuous image tokens (MAR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from specmm.methods.base import Declared


@dataclass(frozen=True)
class CSpD(Declared):
    """Continuous speculative decoding (arXiv 2411.11925), as published or ``exact``.

    ``exact`` drafts ``window`` steps of a token's denoising chain by ``predictor``: the target's
    last answer and its trend (``gaussian``), that answer alone (``frozen``), or the small model's
    head (``small``). ``paper`` and ``release`` (the released code) draft ``window`` iterations with
    the small model, after the target's own for the share ``prefill``; ``relax`` widens the
    release's densities. ``aligned``, the baseline of ``release``, always takes the target's sample
    under the draft's noise.
    """

    name: ClassVar[str] = "cspd"
    claims: ClassVar[str] = "as its variant"
    variant: Literal["exact", "paper", "release", "aligned"] = "exact"
    window: int = 0  # 0: the variant's own, 16 steps or 8 iterations
    predictor: Literal["gaussian", "frozen", "small"] = "gaussian"
    prefill: float = 0.05
    relax: float = 42.0
