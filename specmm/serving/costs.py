"""Learns what rounds and prompts cost as they are played and read; drafts, and pieces of prompts,
are chosen by it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specmm.kernels.tree_attention import MOST_NODES

FORGET = 0.98  # weight of all that was measured, after one more measurement
SOON = 1e-3  # how firmly nothing is assumed before
PIECE = 64  # tokens of a prompt read beside a round, until it is known what they cost
STEP = 2.5  # usual rounds that a piece and a round may take together
PART = 0.75, 1.25  # usual rounds that a piece takes at least, and at most
LONGER = 1.25  # times as long as without drafts a round may take in any case
THOUSAND = 1000
NEWEST = 0.05  # weight of the latest round in what is usual


class ForwardSeconds:
    """Seconds of an engine's forward and all that belongs to it, as a linear function of its
    ``FEATURES``, with a constant, by least squares with forgetting: ``rows``, their ``drafts``,
    thousands of tokens that they ``attend``, tokens of prompts that are ``read``, and thousands of
    ``pairs`` of these with tokens before them.
    """

    FEATURES = 5

    def __init__(self) -> None:
        self.squares = SOON * np.eye(self.FEATURES + 1)
        self.moments = np.zeros(self.FEATURES + 1)
        self.known = np.zeros(self.FEATURES + 1)

    def observe(self, seconds: float, *some: float) -> None:
        """Learn that a forward with the first features ``some``, the others 0, took ``seconds``."""
        seen = np.zeros(self.FEATURES + 1)
        seen[: len(some) + 1] = 1.0, *some
        # relative errors count: a long round is not measured more exactly than a short one
        weight = 1 / max(seconds, 1e-6) ** 2
        self.squares = FORGET * self.squares + weight * np.outer(seen, seen)
        self.moments = FORGET * self.moments + weight * seconds * seen
        ridge = 1e-6 * np.trace(self.squares) * np.eye(len(seen))
        self.known = np.linalg.solve(self.squares + ridge, self.moments).clip(min=0)

    def of(self, *some: Any) -> Any:
        """Predicted seconds of a forward with the first features ``some`` (numbers or arrays); 0
        before any observation.
        """
        return sum((c * x for c, x in zip(self.known[1:], some, strict=False)), self.known[0])

    def read(self, tokens: int, pairs: float) -> float:
        """Seconds that ``tokens`` of prompts with so many ``pairs`` add to a forward."""
        return float(self.of(0, 0, 0, tokens, pairs) - self.known[0])


class Pieces:
    """Chooses how many tokens of a prompt are read beside a round, so that nobody waits long for
    the next tokens: within ``STEP`` usual rounds of the last ones, if the round can be that short.
    """

    LEAST, MOST = 32, MOST_NODES

    def __init__(self, costs: ForwardSeconds) -> None:
        self.costs = costs
        self.usual = 0.0  # seconds of a round

    def size(self, before: int = 0, spent: float = 0.0, plain: float = 0.0) -> int:
        """Tokens of the next piece after ``before`` tokens, ``spent`` seconds after the last round
        and beside one that takes ``plain`` seconds without drafts; a forward's constant seconds do
        not count.
        """
        if not self.usual or not (each := self.costs.read(1, before / THOUSAND)):
            return PIECE
        least, most = (part * self.usual for part in PART)
        free = self.left(spent + LONGER * plain)
        wanted = min(max(free, least), most) / each
        return int(min(max(wanted, self.LEAST), self.MOST))

    def left(self, spent: float) -> float:
        """Seconds that are left of a step of which ``spent`` are over."""
        return STEP * self.usual - spent if self.usual else math.inf

    def ride(self, before: int, tokens: int) -> bool:
        """Whether to read a piece in a round's forward: a prompt's only one not if that would take
        longer than reading it alone, which would delay its first token.
        """
        alone = self.costs.of(0, 0, 0, tokens, before * tokens / THOUSAND)
        return bool(before or self.usual <= alone)

    def played(self, seconds: float) -> None:
        """Learn that a round took ``seconds``."""
        self.usual += NEWEST * (seconds - self.usual) if self.usual else seconds
