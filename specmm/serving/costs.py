"""What a round costs, learnt as rounds are played: the ground on which drafts are chosen.

Shape letters: B rows, K drafts of a row.
"""

from __future__ import annotations

import numpy as np

FORGET = 0.98  # weight of all that was measured, after one more measurement
SOON = 1e-3  # how firmly nothing is assumed before


class Costs:
    """Seconds of a forward: a + b·rows + c·tokens, by least squares that forget."""

    def __init__(self) -> None:
        self.squares = SOON * np.eye(3)
        self.moments = np.zeros(3)
        self.known = np.zeros(3)

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """A forward of ``tokens`` of so many ``rows`` took ``seconds``."""
        seen = np.array([1.0, rows, tokens])
        # relative errors count: a long round is not measured more exactly than a short one
        weight = 1 / max(seconds, 1e-6) ** 2
        self.squares = FORGET * self.squares + weight * np.outer(seen, seen)
        self.moments = FORGET * self.moments + weight * seconds * seen
        ridge = 1e-6 * np.trace(self.squares) * np.eye(3)
        self.known = np.linalg.solve(self.squares + ridge, self.moments).clip(min=0)

    def of(self, rows: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds of forwards of ``tokens`` [n] of so many ``rows``; 0 before anything is known."""
        return self.known[0] + self.known[1] * rows + self.known[2] * tokens
