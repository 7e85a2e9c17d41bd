"""Every path of a small lattice, and a beam that makes every path: references for the searches."""

from __future__ import annotations

from collections.abc import Iterator

from specmm.diffusion_drafters.lattice_search import Lattice, Objective, Path


def every_path(lattice: Lattice, objective: Objective) -> list[Path]:
    """All complete paths, the best first."""
    paths = _complete(lattice, objective, Path(finished=not len(lattice)))
    return sorted(paths, key=lambda path: path.rank)


def _complete(lattice: Lattice, objective: Objective, path: Path) -> Iterator[Path]:
    if path.finished:
        yield path
        return
    for longer in _longer(lattice, objective, path):
        yield from _complete(lattice, objective, longer)


def beam_path(lattice: Lattice, objective: Objective, width: int) -> Path:
    """As ``lattice_search.beam_path``."""
    beam = [Path(finished=not len(lattice))]
    while not all(path.finished for path in beam):
        grown = [path for path in beam if path.finished]
        for path in beam:
            grown += [] if path.finished else _longer(lattice, objective, path)
        beam = sorted(grown, key=lambda path: path.rank)[:width]
    return beam[0]


def _longer(lattice: Lattice, objective: Objective, path: Path) -> list[Path]:
    """``path`` with each candidate of the next position after it."""
    place = len(path.tokens)
    rest = 1 - objective.weight
    context = objective.context(path)
    found = []
    for token, score in zip(lattice.tokens[place], lattice.scores[place], strict=True):
        causal = objective.proxy.log_probs([context], [token])[0][0] if rest else 0.0
        ended = place + 1 == len(lattice) or token == objective.end
        total = path.score + objective.weight * score + rest * causal
        found.append(Path((*path.tokens, token), total, ended))
    return found
