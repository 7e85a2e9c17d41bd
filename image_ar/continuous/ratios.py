"""Acceptance of whole tokens between two models, as CSpD's paper states it and as its release
computes it.

Source: CSpD (arXiv 2411.11925, section 3 and algorithm 1). A token's chain ends in a step whose
Gaussian has a mean (the token itself, since no noise is added there) and a width that is never
used; both versions take that Gaussian for the density of the token, which is why neither is exact.
Arrays are numpy's, float64: ratios reach e^-200. Shape letters: N tokens, C token width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
RELAX = 42.0  # the release's factor on standard deviations
TURNS = 100  # the release's proposals for a rejected token


@dataclass
class Trace:
    """How chains ended: last ``mean`` and ``std`` [N, C], and the sum over the steps before of log
    σ [N, C].
    """

    mean: Array
    std: Array
    log_stds: Array

    def __getitem__(self, rows: npt.NDArray[np.bool_]) -> Trace:
        return Trace(self.mean[rows], self.std[rows], self.log_stds[rows])

    def log_density(self, x: Array, widen: float = 1.0) -> Array:
        """log density [N] of ``x`` under the last step's Gaussian, less a constant that ratios do
        not see.
        """
        std = widen * self.std
        found: Array = -(0.5 * ((x - self.mean) / std) ** 2 + np.log(std)).sum(-1)
        return found


def check_widths(*traces: Trace) -> None:
    """Raise ``ValueError`` for standard deviations that no density has."""
    for trace in traces:
        if not (np.isfinite(trace.std).all() and (trace.std > 0).all()):
            raise ValueError(
                "standard deviations to compare must be above 0 and finite, got others: is temperature 0?"
            )


class Version(Protocol):
    """One way to compare a drafted token with the target's distribution; ``turns`` proposals are
    made for a rejected one.
    """

    turns: int

    def log_ratio(self, x: Array, p: Trace, q: Trace) -> Array:
        """log r [N] of drafted tokens ``x`` [N, C]: they are kept with probability min(1, r)."""
        ...

    def log_residual(self, y: Array, p: Trace, q: Trace) -> Array:
        """log q/(F p) [N] of proposals ``y`` ~ p: they are taken with probability 1 - q/(F p)."""
        ...


class Paper:
    """r = Π √|Σq|/√|Σp| · p(x)/q(x): the spreads of the steps before, then the last Gaussians."""

    turns = TURNS

    def log_ratio(self, x: Array, p: Trace, q: Trace) -> Array:
        """See ``Version``."""
        return -self.log_residual(x, p, q)

    def log_residual(self, y: Array, p: Trace, q: Trace) -> Array:
        """See ``Version``: p itself is the bound of (F p - q)+ / F, so that no probability is ever
        above 1.
        """
        spreads: Array = (q.log_stds - p.log_stds).sum(-1)
        return q.log_density(y) - p.log_density(y) - spreads


@dataclass
class Release:
    """The same with the factor of the spreads upside down, and standard deviations ``relax`` times
    too wide in r.
    """

    relax: float = RELAX
    turns: int = TURNS

    def __post_init__(self) -> None:
        if not self.relax > 0:
            raise ValueError(
                f"relax must be above 0 (it widens a standard deviation), got {self.relax}"
            )

    def log_ratio(self, x: Array, p: Trace, q: Trace) -> Array:
        """See ``Version``."""
        return self._spreads(p, q) + p.log_density(x, self.relax) - q.log_density(x, self.relax)

    def log_residual(self, y: Array, p: Trace, q: Trace) -> Array:
        """See ``Version``; not relaxed."""
        return q.log_density(y) - p.log_density(y) - self._spreads(p, q)

    def _spreads(self, p: Trace, q: Trace) -> Array:
        factor: Array = (p.log_stds - q.log_stds).sum(-1)
        return factor


class Aligned:
    """No draft is kept and nothing proposed in its place, which leaves the target's sample of the
    draft's noise.

    The baseline that a rule between two models must beat: as many passes of the target, and no
    question of acceptance.
    """

    turns = 0

    def log_ratio(self, x: Array, p: Trace, q: Trace) -> Array:
        """See ``Version``."""
        return np.full(len(x), -np.inf)

    def log_residual(self, y: Array, p: Trace, q: Trace) -> Array:
        """See ``Version``; never asked."""
        return np.zeros(len(y))


class PictureNumbers(Protocol):
    """Numbers for one picture's tokens."""

    def normal(self, rows: int, width: int) -> Array:
        """Standard normal numbers [rows, width]."""
        ...

    def uniform(self, rows: int) -> Array:
        """Uniform numbers [rows] in [0, 1)."""
        ...


def accept(
    version: Version, x: Array, p: Trace, q: Trace, numbers: PictureNumbers
) -> npt.NDArray[np.bool_]:
    """Which drafted tokens ``x`` [N, C] are kept [N]."""
    check_widths(p, q)
    with np.errstate(over="ignore", divide="ignore"):
        kept: npt.NDArray[np.bool_] = np.exp(version.log_ratio(x, p, q)) > numbers.uniform(len(x))
    return kept


def resample(
    version: Version, p: Trace, q: Trace, numbers: PictureNumbers, last: bool
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Tokens [N, C] of what p has more of than q, and which of them were found within the version's
    turns [N].

    Proposals go on until every row has one; ``last`` says that a row takes the last of its own (the
    release), not the first. Rows without any are zero: what to do with them is the caller's.
    """
    made, found = np.zeros_like(p.mean), np.zeros(len(p.mean), dtype=bool)
    for _ in range(version.turns):
        y = p.mean + p.std * numbers.normal(*p.mean.shape)
        with np.errstate(over="ignore"):
            taken = numbers.uniform(len(y)) < 1 - np.exp(version.log_residual(y, p, q))
        fresh = taken if last else taken & ~found
        made[fresh] = y[fresh]
        found |= taken
        if found.all():
            break
    return made, found
