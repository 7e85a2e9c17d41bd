"""Every path of a small lattice, one by one: what the searches are tested against.

Shape letters: none.
"""

from __future__ import annotations

from collections.abc import Iterator

from specmm.diffusion_drafters.diffuspec.lattice import Lattice
from specmm.diffusion_drafters.diffuspec.search import Objective, Path


def every_path(lattice: Lattice, objective: Objective) -> list[Path]:
    """All complete paths, the best first."""
    return sorted(_from(lattice, objective, Path(finished=not len(lattice))), key=lambda path: path.rank)


def _from(lattice: Lattice, objective: Objective, path: Path) -> Iterator[Path]:
    if path.finished:
        yield path
        return
    for longer in objective.extend(lattice, path):
        yield from _from(lattice, objective, longer)
