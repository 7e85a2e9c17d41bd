"""Every path of a small lattice, one by one, and a beam that makes every path: what the searches
are tested against.

Shape letters: none.
"""

from __future__ import annotations

from collections.abc import Iterator

from specmm.diffusion_drafters.diffuspec.lattice import Lattice
from specmm.diffusion_drafters.diffuspec.search import Objective, Path


def every_path(lattice: Lattice, objective: Objective) -> list[Path]:
    """All complete paths, the best first."""
    return sorted(
        _from(lattice, objective, Path(finished=not len(lattice))), key=lambda path: path.rank
    )


def _from(lattice: Lattice, objective: Objective, path: Path) -> Iterator[Path]:
    if path.finished:
        yield path
        return
    for longer in _longer(lattice, objective, path):
        yield from _from(lattice, objective, longer)


def beam_path(lattice: Lattice, objective: Objective, width: int) -> Path:
    """As ``search.beam_path``."""
    beam = [Path(finished=not len(lattice))]
    while not all(path.finished for path in beam):
        grown = [
            p
            for path in beam
            for p in ([path] if path.finished else _longer(lattice, objective, path))
        ]
        beam = sorted(grown, key=lambda path: path.rank)[:width]
    return beam[0]


def _longer(lattice: Lattice, objective: Objective, path: Path) -> list[Path]:
    """``path`` with each candidate of the next position after it."""
    place, rest, found = len(path.tokens), 1 - objective.weight, []
    for token, score in zip(lattice.tokens[place], lattice.scores[place], strict=True):
        causal = (
            objective.proxy.log_probs([objective.context(path)], [token])[0][0] if rest else 0.0
        )
        ended = place + 1 == len(lattice) or token == objective.end
        found.append(
            Path(
                (*path.tokens, token), path.score + objective.weight * score + rest * causal, ended
            )
        )
    return found
