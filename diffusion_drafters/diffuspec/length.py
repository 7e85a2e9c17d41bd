"""Adaptive draft length: drafts as long as lately they came out, and longer while all of them are
accepted.

Source: DiffuSpec (arXiv 2510.02358), equations 10 and 11. The length that a round asks for depends
on earlier rounds only, so verification stays exact.

Shape letters: none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class AdaptiveLength:
    """The controller of one row: ``length`` is the next block's. The averages start at 0 and the
    length at ``most``; fractions are cut, which the paper leaves open. Raises ``ValueError`` for
    bounds that are none.
    """

    least: int = 20
    most: int = 30
    step: float = 10.0
    rate: float = 0.5
    generated: float = field(default=0.0, init=False)
    accepted: float = field(default=0.0, init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(
                f"lengths must have 1 <= least <= most, got {self.least} and {self.most}"
            )
        if not 0 < self.rate <= 1 or not self.step >= 0:
            raise ValueError(
                f"rate must be in (0, 1] and step at least 0, got {self.rate} and {self.step}"
            )
        self.length = self.most

    def observe(self, generated: int, accepted: int) -> None:
        """Learn from a round that drafted ``generated`` tokens in front of an end token and kept
        ``accepted``.
        """
        self.generated += self.rate * (generated - self.generated)
        self.accepted += self.rate * (accepted - self.accepted)
        wanted = self.generated + (self.step if self.accepted >= self.generated else 0)
        self.length = math.floor(min(max(wanted, self.least), self.most))
