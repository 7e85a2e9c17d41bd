"""Reference search: a beam that builds every path of a small lattice."""

from __future__ import annotations

from specmm.diffusion_drafters.lattice_search import Lattice, Objective, Path


def best_paths(
    lattice: Lattice, objective: Objective, width: int | None = None, end: int | None = None
) -> list[Path]:
    """The paths left in a beam of ``width`` (None: all that there are), the best first.

    As in the paper the token ``end`` finishes a path, which stays in the beam and competes.
    """
    beam = [Path()]
    for place in range(len(lattice)):
        grown = []
        for path in beam:
            ended = path.tokens[-1:] == (end,)
            grown += [path] if ended else _longer(lattice, objective, path, place)
        beam = sorted(grown, key=lambda path: path.rank)[:width]
    return beam


def _longer(lattice: Lattice, objective: Objective, path: Path, place: int) -> list[Path]:
    """``path`` with each candidate of the position ``place`` after it."""
    rest = 1 - objective.weight
    count = objective.proxy.order - 1
    context = (objective.before + path.tokens)[-count:] if count else ()
    found = []
    for token, score in zip(lattice.tokens[place], lattice.scores[place], strict=True):
        causal = objective.proxy.log_probs([context], [token])[0][0] if rest else 0.0
        total = path.score + objective.weight * score + rest * causal
        found.append(Path((*path.tokens, token), total))
    return found
