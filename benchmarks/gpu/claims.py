"""What was published of such models: tokens a round and speed-ups, and where."""

from __future__ import annotations

from typing import NamedTuple


class Claim(NamedTuple):
    """A published number: of ``model`` by ``method``; ``tau`` or ``speedup`` may not be stated."""

    model: str
    method: str
    tau: float | None
    speedup: float | None
    source: str


CLAIMS = (
    Claim("Qwen3-8B", "DFlash, greedy", 6.5, 4.86, "arXiv 2602.06036"),
    Claim("Qwen3-8B", "DEER, greedy", 4.61, 2.83, "arXiv 2512.15176"),
    Claim("Qwen3-8B", "EAGLE-3, greedy", 3.45, 2.48, "arXiv 2512.15176, its comparison"),
    Claim("LLaVA-1.5-7B", "MSD, at most", None, 2.29, "arXiv 2505.14260"),
    Claim("LlamaGen-XL 256", "LANTERN++, at most (of any model)", None, 2.56, "arXiv 2502.06352"),
)


def claims_of(model: str) -> list[Claim]:
    """Those about ``model``."""
    return [claim for claim in CLAIMS if claim.model == model]
