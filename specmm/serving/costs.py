"""What a round costs, learnt as rounds are played: the ground on which drafts are chosen.

Shape letters: F things that a forward has some of.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specmm.kernels.tree_attention import MOST_NODES

FORGET = 0.98  # weight of all that was measured, after one more measurement
SOON = 1e-3  # how firmly nothing is assumed before
PIECE = 64  # tokens of a prompt read beside a round, until it is known what they cost
BESIDE = 1.0  # rounds that a piece may take
PAIRS = 1000
NEWEST = 0.1  # weight of the latest measurement


class ForwardSeconds:
    """Seconds of a forward: what any takes, and so much for each of ``count`` things (F) that it
    may have some of, by least squares that forget.
    """

    def __init__(self, count: int) -> None:
        self.squares = SOON * np.eye(count + 1)
        self.moments = np.zeros(count + 1)
        self.known = np.zeros(count + 1)

    def observe(self, seconds: float, *some: float) -> None:
        """A forward that had ``some`` of each took ``seconds``."""
        seen = np.array([1.0, *some])
        # relative errors count: a long round is not measured more exactly than a short one
        weight = 1 / max(seconds, 1e-6) ** 2
        self.squares = FORGET * self.squares + weight * np.outer(seen, seen)
        self.moments = FORGET * self.moments + weight * seconds * seen
        ridge = 1e-6 * np.trace(self.squares) * np.eye(len(seen))
        self.known = np.linalg.solve(self.squares + ridge, self.moments).clip(min=0)

    def of(self, *some: Any) -> Any:
        """Seconds of a forward that has ``some`` of each, numbers or arrays of them; 0 before
        anything is known.
        """
        return sum((c * x for c, x in zip(self.known[1:], some, strict=True)), self.known[0])


class RoundCosts:
    """What rounds have taken."""

    def __init__(self) -> None:
        self.target = ForwardSeconds(3)  # without the network: rows, drafts, and places of neither
        self.network = ForwardSeconds(1)  # rows


class Pieces:
    """How many tokens of a prompt are read beside a round: what takes ``BESIDE`` rounds."""

    LEAST, MOST = 32, MOST_NODES

    def __init__(self) -> None:
        self.seconds = ForwardSeconds(2)  # PAIRS of tokens with those before them, and tokens
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
        alone = self.seconds.of(before * tokens / PAIRS, tokens)
        return bool(self.round_seconds <= alone)

    def read(self, before: int, tokens: int, seconds: float) -> None:
        """A piece of ``tokens`` took so long, where so many were read ``before``."""
        self.seconds.observe(seconds, before * tokens / PAIRS, tokens)

    def played(self, seconds: float) -> None:
        """A round took so long."""
        last = self.round_seconds
        self.round_seconds = last + NEWEST * (seconds - last) if last else seconds
