"""Causal-consistency path search: the path of a lattice that both the block and a causal proxy
believe in.

S(path) = sum over positions of weight * log q_i(token) + (1 - weight) * log p_proxy(token | prefix,
path before). Paths are a deterministic function of the prefix, or drawn from nothing: verify them
as point masses. Source: DiffuSpec (arXiv 2510.02358), equation 8. Its objective is a raw sum of
negative terms, so that with an end token on offer the best path often is to end at once; ``search``
therefore takes the end token from the block's own draft, and looks for the best path of exactly the
tokens in front of it.

Shape letters: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from specmm.diffusion_drafters.diffuspec.lattice import Lattice

# decimals of a score; paths that agree so far are equal, and the one with smaller tokens is taken
SAME = 11
TIE = 10.0**-SAME


class CausalProxy(Protocol):
    """A cheap causal model that reads ``order`` - 1 tokens."""

    order: int

    def log_probs(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int]
    ) -> list[list[float]]:
        """Log-probabilities (nats) of each of ``tokens`` after each of ``contexts``, ``order`` - 1
        tokens at least.
        """
        ...


class Path(NamedTuple):
    """Tokens chosen, their score S in nats, and whether nothing can follow."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    finished: bool = False

    @property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """Sorts better paths first."""
        return _rank((self.score, self.tokens, ()))

    @property
    def rate(self) -> tuple[float, tuple[int, ...]]:
        """Sorts paths of more score a token first."""
        return -round(self.score / max(len(self.tokens), 1), SAME), self.tokens


Open = tuple[
    float, tuple[int, ...], tuple[int, ...]
]  # of a path in a beam: its score, tokens, what the proxy reads


@dataclass(frozen=True)
class Objective:
    """S for one prefix: the ``proxy``, the ``weight`` of the block (the paper's lambda), and the
    token that ends a path. Raises ``ValueError`` for a weight outside [0, 1].
    """

    proxy: CausalProxy
    prefix: Sequence[int]
    weight: float = 0.5
    end: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be in [0, 1], got {self.weight}")

    @cached_property
    def before(self) -> tuple[int, ...]:
        """What the proxy reads of the prefix, at most."""
        return tuple(self.prefix[max(len(self.prefix) - self.proxy.order + 1, 0) :])

    def scores(
        self, going: Sequence[Open], tokens: Sequence[int], block: Sequence[float]
    ) -> list[float]:
        """S of each of ``going`` with each of ``tokens`` after it, in turn; ``block`` are the
        tokens' own scores.
        """
        own, rest = self.weight, 1 - self.weight
        block = [own * score for score in block]
        if not rest:
            return [before + score for before, _, _ in going for score in block]
        causal, found = self.proxy.log_probs([read for _, _, read in going], tokens), list[float]()
        for (before, _, _), row in zip(going, causal, strict=True):
            found += [
                before + score + rest * proxy for score, proxy in zip(block, row, strict=True)
            ]
        return found

    def extend(self, lattice: Lattice, path: Path) -> list[Path]:
        """``path`` with every candidate of the next position after it."""
        place = len(path.tokens)
        tokens, last = lattice.tokens[place], place + 1 == len(lattice)
        scores = self.scores(
            [(path.score, path.tokens, self.context(path))], tokens, lattice.scores[place]
        )
        found = zip(tokens, scores, strict=True)
        return [
            Path((*path.tokens, token), score, last or token == self.end) for token, score in found
        ]

    def context(self, path: Path) -> tuple[int, ...]:
        """What the proxy reads after ``path``."""
        count = self.proxy.order - 1
        return (self.before + path.tokens)[-count:] if count else ()


def beam_path(lattice: Lattice, objective: Objective, width: int = 3) -> Path:
    """The best of the paths that a beam of ``width`` finds; finished ones stay in it and compete.

    Raises ``ValueError`` for a width below 1. An empty lattice has the empty path.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    going: list[Open] = [(0.0, (), objective.before)]
    done: list[Open] = []
    for tokens, block in zip(lattice.tokens, lattice.scores, strict=True):
        beam = done + _grown(objective, going, tokens, block, width)
        if len(beam) > width:
            beam = sorted(beam, key=_rank)[:width]
        if objective.end is None:
            going = beam
        else:
            done = [path for path in beam if path[1][-1] == objective.end]
            going = [path for path in beam if path[1][-1] != objective.end]
        if not going:
            break
    score, path, _ = min(going + done, key=_rank)
    return Path(path, score, True)


def _grown(
    objective: Objective,
    going: Sequence[Open],
    tokens: Sequence[int],
    block: Sequence[float],
    count: int,
) -> list[Open]:
    """The ``count`` best of ``going`` with one of ``tokens`` after, and those as good as the last."""
    scores, read, size = (
        objective.scores(going, tokens, block),
        objective.proxy.order - 1,
        len(tokens),
    )
    worst, found = (
        sorted(scores)[-count:][0] - TIE,
        list[Open](),
    )  # paths that cannot stay are never made
    for i, score in enumerate(scores):
        if score >= worst:
            _, path, context = going[i // size]
            token = tokens[i % size]
            found.append((score, (*path, token), (*context, token)[-read:] if read else ()))
    return found


def _rank(path: Open) -> tuple[float, tuple[int, ...]]:
    """Sorts better paths first."""
    return -round(path[0], SAME), path[1]


def best_path(lattice: Lattice, objective: Objective, per_token: bool = False) -> Path:
    """The best path of all, exactly: of those that the proxy cannot tell apart, only the best is
    followed.

    With M candidates a position and a proxy of order n that is K·M^n steps: for small lattices and
    low orders. ``per_token`` maximises S over the path's length instead, which does not favour
    short paths.
    """
    open_paths, done = [Path(finished=not len(lattice))], list[Path]()
    while open_paths:
        done += [path for path in open_paths if path.finished]
        grown = (
            p for path in open_paths if not path.finished for p in objective.extend(lattice, path)
        )
        open_paths = _leaders(objective, grown)
    return min(done, key=lambda path: path.rate if per_token else path.rank)


def _leaders(objective: Objective, paths: Iterable[Path]) -> list[Path]:
    """The best of ``paths`` (equally long) for each context of the proxy, and the best of those
    finished.
    """
    best: dict[tuple[int, ...] | None, Path] = {}
    for path in paths:
        key = None if path.finished else objective.context(path)
        if key not in best or path.rank < best[key].rank:
            best[key] = path
    return list(best.values())
