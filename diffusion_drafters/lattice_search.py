"""DiffuSpec's lattice of a block, and its path that both the block and a causal proxy prefer.

The lattice holds at each position the likeliest tokens, as many as carry the mass tau (DiffuSpec,
arXiv 2510.02358, equations 7 and 9). Causal-consistency path search maximises (equation 8)

    S(path) = Σ weight · log q_i(token) + (1 - weight) · log p_proxy(token | prefix, path before).

A path is a deterministic function of the prefix: verify it as point masses. S is a sum of negative
terms, so if a path could end early, ending at once would often be best. The end token's position is
therefore taken from the block, and the search fixes the number of tokens before it.

Shape letters: K block, V vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

from torch import Tensor

from specmm.core.sorting import by_columns

# Decimals of a score: paths that agree so far are equal, and the one with smaller tokens is taken.
SAME = 11
TIE = 10.0**-SAME


@dataclass(frozen=True)
class Lattice:
    """Each position's candidate ``tokens``, likeliest first, and their ``scores``
    (log-probabilities, nats). ``likeliest``: the block's likeliest token at each position.
    """

    tokens: list[list[int]]
    scores: list[list[float]]
    likeliest: list[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, length: int) -> Lattice:
        """The lattice of the first ``length`` positions."""
        return Lattice(self.tokens[:length], self.scores[:length], self.likeliest[:length])

    def without(self, token: int) -> Lattice:
        """The lattice without ``token``, up to the first position that has no other candidate."""
        if not any(token in row for row in self.tokens):
            return self
        columns = [[i for i, t in enumerate(row) if t != token] for row in self.tokens]
        stop = next((i for i, row in enumerate(columns) if not row), len(columns))
        tokens = [[self.tokens[i][j] for j in columns[i]] for i in range(stop)]
        scores = [[self.scores[i][j] for j in columns[i]] for i in range(stop)]
        return Lattice(tokens, scores, self.likeliest[:stop])

    def before(self, end: int | None) -> int:
        """The number of positions before the first whose likeliest token is ``end``, if any."""
        return self.likeliest.index(end) if end in self.likeliest else len(self)


def prune(log_probs: Tensor, tau: float = 0.8, most: int = 15) -> Lattice:
    """The lattice of ``log_probs`` [K, V]: the fewest likeliest tokens with mass ``tau``, at most
    ``most``.

    Ties are broken by id. ``tau`` 1 keeps ``most`` tokens everywhere. Tokens of zero probability
    are left out, and the lattice ends before a position without other tokens. Raises ``ValueError``
    for options out of range.
    """
    if not 0 < tau <= 1 or most < 1:
        raise ValueError(f"tau must be in (0, 1] and most at least 1, got {tau} and {most}")
    if log_probs.ndim != 2:
        raise ValueError(f"log_probs must be [K, V], got {list(log_probs.shape)}")
    tokens: list[list[int]] = []
    scores: list[list[float]] = []
    for values, ids in zip(*_likeliest(log_probs, min(most, log_probs.shape[1])), strict=True):
        count = _carrying(values, tau)
        if not count:
            break
        tokens.append(ids[:count])
        scores.append(values[:count])
    return Lattice(tokens, scores, [row[0] for row in tokens])


def _carrying(values: list[float], tau: float) -> int:
    """The number of likeliest tokens, by log-probabilities ``values``, with total mass ``tau``."""
    possible = values
    if not math.isfinite(values[-1]):
        possible = [value for value in values if math.isfinite(value)]
    if tau == 1:
        return len(possible)
    masses = list(accumulate(map(math.exp, possible)))
    return min(bisect_left(masses, tau) + 1, len(masses))


def _likeliest(log_probs: Tensor, count: int) -> tuple[list[list[float]], list[list[int]]]:
    """The ``count`` largest of each row and their ids, equal ones by id."""
    largest = by_columns(log_probs, min(count + 1, log_probs.shape[1]))
    values, ids = (found.tolist() for found in largest)
    if any(len(set(row)) < len(row) for row in values):  # a tie needs a full, stable sort
        ordered = log_probs.sort(dim=1, descending=True, stable=True)
        return ordered.values[:, :count].tolist(), ordered.indices[:, :count].tolist()
    return [row[:count] for row in values], [row[:count] for row in ids]


class CausalProxy(Protocol):
    """A cheap causal model that reads ``order`` - 1 tokens."""

    order: int

    def log_probs(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int]
    ) -> list[list[float]]:
        """Log-probabilities (nats) of each of ``tokens`` after each of ``contexts``."""


class Path(NamedTuple):
    """Tokens chosen, and their score S in nats."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0

    @property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """Sorts better paths first."""
        return _rank((self.score, self.tokens, ()))


# A path in a beam: its score, its tokens, the proxy's context after it.
OpenPath = tuple[float, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Objective:
    """S for one ``prefix``, with the ``weight`` of the block (the paper's lambda).

    Raises ``ValueError`` for a weight outside [0, 1].
    """

    proxy: CausalProxy
    prefix: Sequence[int]
    weight: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be in [0, 1], got {self.weight}")

    @cached_property
    def before(self) -> tuple[int, ...]:
        """The last tokens of the prefix, as many as the proxy reads."""
        return tuple(self.prefix[max(len(self.prefix) - self.proxy.order + 1, 0) :])

    def scores(
        self, paths: Sequence[OpenPath], tokens: Sequence[int], block: Sequence[float]
    ) -> list[float]:
        """S of each of ``paths`` with each of ``tokens`` after it; ``block`` scores the tokens."""
        rest = 1 - self.weight
        block = [self.weight * score for score in block]
        if not rest:
            return [before + score for before, _, _ in paths for score in block]
        causal = self.proxy.log_probs([read for _, _, read in paths], tokens)
        scores: list[float] = []
        for (before, _, _), row in zip(paths, causal, strict=True):
            pairs = zip(block, row, strict=True)
            scores += [before + score + rest * proxy for score, proxy in pairs]
        return scores


def beam_path(lattice: Lattice, objective: Objective, width: int = 3) -> Path:
    """The best of the paths that a beam of ``width`` finds.

    Raises ``ValueError`` for a width below 1. An empty lattice has the empty path.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    beam: list[OpenPath] = [(0.0, (), objective.before)]
    for tokens, block in zip(lattice.tokens, lattice.scores, strict=True):
        beam = _grown(objective, beam, tokens, block, width)
        if len(beam) > width:
            beam = sorted(beam, key=_rank)[:width]
    score, path, _ = min(beam, key=_rank)
    return Path(path, score)


def _grown(
    objective: Objective,
    going: Sequence[OpenPath],
    tokens: Sequence[int],
    block: Sequence[float],
    count: int,
) -> list[OpenPath]:
    """The ``count`` best of the paths ``going``, each with one of ``tokens`` appended, and ties.

    Paths with worse scores are never built.
    """
    scores = objective.scores(going, tokens, block)
    read = objective.proxy.order - 1
    worst = sorted(scores)[-count:][0] - TIE
    longer: list[OpenPath] = []
    for i, score in enumerate(scores):
        if score >= worst:
            _, path, context = going[i // len(tokens)]
            token = tokens[i % len(tokens)]
            longer.append((score, (*path, token), (*context, token)[-read:] if read else ()))
    return longer


def _rank(path: OpenPath) -> tuple[float, tuple[int, ...]]:
    """Sorts better paths first."""
    return -round(path[0], SAME), path[1]
