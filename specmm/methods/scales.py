"""Methods of models that draw scale by scale (VAR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specmm.methods.base import Declared


@dataclass(frozen=True)
class CoDe(Declared):
    """CoDe (arXiv 2411.17787): the large model draws ``n`` coarse scales, the small one the rest.

    Nothing is verified. ``n``: from 0 (the small model alone) to all scales, or -1 to let the
    planner choose. ``release`` draws the same tokens as the released code.
    """

    name: ClassVar[str] = "code"
    claims: ClassVar[str] = "heuristic"
    static_shapes: ClassVar[bool] = True
    n: int = -1
    release: bool = False

    @property
    def timed(self) -> bool:
        """The planner's ``n`` rests on measured seconds."""
        return self.n == -1

    @property
    def one_generator(self) -> bool:
        """The release draws all pictures from one generator."""
        return self.release


@dataclass(frozen=True)
class ScaleSpeculative(Declared):
    """The small model drafts ``window`` scales at a time, the large one verifies; exact.

    ``until`` is how many coarse scales are drafted. -1 takes those whose tokens cost the large
    model hardly more together than one by one.
    """

    name: ClassVar[str] = "speculative"
    window: int = 3
    until: int = -1
