"""How a next-scale model is meant to be sampled: what is read from ``settings.json`` beside it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Recommended sampling (``cfg`` 0 is no guidance), class names by id, FID by CoDe's N (as text)
    if measured, and the ``n`` that the two models were specialised for, -1 if none.
    """

    cfg: float = 1.5
    temperature: float | tuple[float, ...] = 1.0
    top_k: int = 0
    top_p: float = 1.0
    more_smooth: bool = False
    classes: tuple[str, ...] = ()
    fid: dict[str, float] = field(default_factory=dict)
    n: int = -1
