"""What a round costs, learnt as rounds are played: the ground on which drafts are chosen.

Shape letters: B rows, K drafts of a row.
"""

from __future__ import annotations

import numpy as np

from specmm.kernels.tree_attention import MOST_NODES

FORGET = 0.98  # weight of all that was measured, after one more measurement
SOON = 1e-3  # how firmly nothing is assumed before
PIECE = 64  # tokens of a prompt read beside a round, until it is known what they cost
BESIDE = 1.0  # rounds that a piece may take
PAIRS = 1000
NEWEST = 0.1  # weight of the latest measurement


class ForwardSeconds:
    """Seconds of a forward: a + b·load + c·tokens, by least squares that forget."""

    def __init__(self) -> None:
        self.squares = SOON * np.eye(3)
        self.moments = np.zeros(3)
        self.known = np.zeros(3)

    def observe(self, load: float, tokens: int, seconds: float) -> None:
        """A forward of so many ``tokens`` took ``seconds``."""
        seen = np.array([1.0, load, tokens])
        # relative errors count: a long round is not measured more exactly than a short one
        weight = 1 / max(seconds, 1e-6) ** 2
        self.squares = FORGET * self.squares + weight * np.outer(seen, seen)
        self.moments = FORGET * self.moments + weight * seconds * seen
        ridge = 1e-6 * np.trace(self.squares) * np.eye(3)
        self.known = np.linalg.solve(self.squares + ridge, self.moments).clip(min=0)

    def of(self, load: float, tokens: np.ndarray) -> np.ndarray:
        """Seconds of forwards of ``tokens`` [n]; 0 before anything is known."""
        return self.known[0] + self.known[1] * load + self.known[2] * tokens


class Pieces:
    """How many tokens of a prompt are read beside a round: what takes ``BESIDE`` rounds."""

    LEAST, MOST = 32, MOST_NODES

    def __init__(self) -> None:
        self.seconds = ForwardSeconds()  # whose load is PAIRS of tokens with those before them
        self.round_seconds = 0.0

    def size(self, before: int = 0) -> int:
        """Tokens of the next piece, where so many were read ``before``; what any forward takes
        does not count.
        """
        _, pair, token = self.seconds.known
        if not token or not self.round_seconds:
            return PIECE
        wanted = BESIDE * self.round_seconds / (token + pair * before / PAIRS)
        return int(min(max(wanted, self.LEAST), self.MOST))

    def ride(self, before: int, tokens: int) -> bool:
        """Whether a piece is read in a round's forward: not if that takes longer than the piece by
        itself, for then its first token comes later.
        """
        start, pair, token = self.seconds.known
        alone = start + (token + pair * before / PAIRS) * tokens
        return bool(self.round_seconds <= alone)

    def read(self, before: int, tokens: int, seconds: float) -> None:
        """A piece of ``tokens`` took so long, where so many were read ``before``."""
        self.seconds.observe(before * tokens / PAIRS, tokens, seconds)

    def played(self, seconds: float) -> None:
        """A round took so long."""
        last = self.round_seconds
        self.round_seconds = last + NEWEST * (seconds - last) if last else seconds
