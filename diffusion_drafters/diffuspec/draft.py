"""One DiffuSpec draft: prune the block, search the tokens in front of its end, then say the end
token.

Source: DiffuSpec (arXiv 2510.02358); the end token is handled as ``search`` explains.

Shape letters: K block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specmm.diffusion_drafters.diffuspec.lattice import Lattice, prune
from specmm.diffusion_drafters.diffuspec.search import CausalProxy, Objective, beam_path, best_path


@dataclass(frozen=True)
class Search:
    """The paper's settings: mass ``tau`` and ``most`` candidates a position, the block's ``weight``
    (lambda) against the proxy, the beam's ``width``; ``width`` 0 finds the exact optimum.
    """

    tau: float = 0.8
    most: int = 15
    weight: float = 0.5
    width: int = 3


@dataclass(frozen=True)
class Draft:
    """``tokens`` to verify as point masses, and ``generated``, L_gen, the drafts in front of an end
    token.
    """

    tokens: tuple[int, ...]
    generated: int


def draft(
    log_probs: Tensor,
    prefix: Sequence[int],
    end: int | None,
    proxy: CausalProxy | None,
    search: Search,
) -> Draft:
    """The draft after ``prefix`` from a block's ``log_probs`` [K, V]; without ``proxy`` the
    likeliest tokens.

    A block that begins with the end token drafts it alone; one without any possible token drafts
    nothing.
    """
    lattice = prune(log_probs, search.tau, search.most)
    length = lattice.before(end)
    ends = (end,) if end is not None and length < len(lattice) else ()
    body = tuple(lattice.likeliest[:length])
    if proxy is not None:
        free = lattice.first(length)
        body = _path(free if end is None else free.without(end), proxy, prefix, search)
    return Draft(body + ends, length)


def _path(
    lattice: Lattice, proxy: CausalProxy, prefix: Sequence[int], search: Search
) -> tuple[int, ...]:
    objective = Objective(proxy, prefix, search.weight)
    found = (
        beam_path(lattice, objective, search.width)
        if search.width
        else best_path(lattice, objective)
    )
    return found.tokens
