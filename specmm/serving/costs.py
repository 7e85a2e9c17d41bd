"""Learns the cost of rounds as they are played; drafts are chosen by it.

Shape letters: F features of a forward.
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
    """Seconds of a forward as a linear function of ``count`` features (F), with a constant, by
    least squares with forgetting.
    """

    def __init__(self, count: int) -> None:
        self.squares = SOON * np.eye(count + 1)
        self.moments = np.zeros(count + 1)
        self.known = np.zeros(count + 1)

    def observe(self, seconds: float, *some: float) -> None:
        """Learn that a forward with features ``some`` took ``seconds``."""
        seen = np.array([1.0, *some])
        # relative errors count: a long round is not measured more exactly than a short one
        weight = 1 / max(seconds, 1e-6) ** 2
        self.squares = FORGET * self.squares + weight * np.outer(seen, seen)
        self.moments = FORGET * self.moments + weight * seconds * seen
        ridge = 1e-6 * np.trace(self.squares) * np.eye(len(seen))
        self.known = np.linalg.solve(self.squares + ridge, self.moments).clip(min=0)

    def of(self, *some: Any) -> Any:
        """Predicted seconds of a forward with features ``some`` (numbers or arrays); 0 before any
        observation.
        """
        return sum((c * x for c, x in zip(self.known[1:], some, strict=True)), self.known[0])


class RoundCosts:
    """The seconds of an engine's rounds."""

    def __init__(self) -> None:
        self.target = ForwardSeconds(3)  # without the network: rows, drafts, and places of neither
        self.network = ForwardSeconds(1)  # rows


class Pieces:
    """Chooses how many tokens of a prompt are read beside a round: those of ``BESIDE`` rounds."""

    LEAST, MOST = 32, MOST_NODES

    def __init__(self) -> None:
        self.seconds = ForwardSeconds(2)  # PAIRS of tokens with those before them, and tokens
        self.round_seconds = 0.0

    def size(self, before: int = 0) -> int:
        """Tokens of the next piece after ``before`` tokens; a forward's constant seconds do not
        count.
        """
        _, pair, token = self.seconds.known
        if not token or not self.round_seconds:
            return PIECE
        wanted = BESIDE * self.round_seconds / (token + pair * before / PAIRS)
        return int(min(max(wanted, self.LEAST), self.MOST))

    def ride(self, before: int, tokens: int) -> bool:
        """Whether to read a piece in a round's forward: not if that would take longer than reading
        it alone, which would delay its first token.
        """
        alone = self.seconds.of(before * tokens / PAIRS, tokens)
        return bool(self.round_seconds <= alone)

    def read(self, before: int, tokens: int, seconds: float) -> None:
        """Learn that a piece of ``tokens`` after ``before`` took ``seconds``."""
        self.seconds.observe(seconds, before * tokens / PAIRS, tokens)

    def played(self, seconds: float) -> None:
        """Learn that a round took ``seconds``."""
        last = self.round_seconds
        self.round_seconds = last + NEWEST * (seconds - last) if last else seconds
