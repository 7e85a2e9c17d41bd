"""How a token image model is meant to be sampled: what is read from ``settings.json`` beside it.

Shape letters: D levels of a block drafter, K ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Recommended sampling, class names by id, recommended trees (children by level) by method, and
    the block drafter's acceptance by level and rank [D, K] (the chance that this child is the one
    kept).
    """

    cfg: float = 1.0
    cfg_interval: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    classes: tuple[str, ...] = ()
    trees: dict[str, tuple[int, ...]] = field(default_factory=dict)
    acceptance: tuple[tuple[float, ...], ...] = ()
