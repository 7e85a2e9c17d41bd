"""Methods of image tokens (LlamaGen): each names a drafter, a tree and a rule."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

from specmm.methods.base import Choice, Composed, Tree, check_rejected_weight


@dataclass(frozen=True)
class SJD(Composed):
    """Speculative Jacobi decoding (arXiv 2410.01699): no drafter, ``window`` guesses a round.

    Drafts are drawn from the target's own earlier distributions at these positions; exact.
    """

    name: ClassVar[str] = "sjd"
    window: int = 8

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        return Choice("jacobi", f"chain({self.window})", "recursive")


@dataclass(frozen=True)
class Speculative(Composed):
    """A tree of siblings drawn without replacement from recorded distributions; exact.

    A block drafter draws from a mixture with the target's distributions at rejected positions,
    which have the weight ``rejected_weight``.
    """

    name: ClassVar[str] = "speculative"
    drafter: Literal["block", "eagle"] = "block"
    tree: Tree = None
    rule: str = "traversal"
    rejected_weight: float = 0.3

    def __post_init__(self) -> None:
        check_rejected_weight(self.rejected_weight)

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        return Choice(self.drafter, self.tree, self.rule, self.rejected_weight)


@dataclass(frozen=True)
class Eagle(Composed):
    """EAGLE-2 (arXiv 2406.16858): a dynamic tree of the likeliest tokens, exact as point masses."""

    name: ClassVar[str] = "eagle"
    total: int = 24
    depth: int = 4
    top_k: int = 6

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        return Choice("eagle", _dynamic(self), "point-mass")


@dataclass(frozen=True)
class Lantern(Composed):
    """LANTERN (arXiv 2410.03355): a token may borrow its ``k`` nearest codes' mass up to ``delta``.

    ``residual``, what is drawn from after a rejection, never emits an excluded token; "release" is
    the authors' code's, for comparisons. ``total``, ``depth`` and ``top_k`` are of EAGLE-2's tree;
    a block drafter has its own.
    """

    name: ClassVar[str] = "lantern"
    claims: ClassVar[str] = "bounded"
    k: int = 20
    delta: float = 0.1
    residual: Literal["corrected", "release", "official"] = "corrected"
    drafter: Literal["block", "eagle"] = "eagle"
    total: int = 24
    depth: int = 4
    top_k: int = 6

    def __post_init__(self) -> None:
        _current_residual(self)

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        rule = _lantern_rule(self, f"k={self.k}, delta={self.delta}")
        return Choice(self.drafter, _dynamic(self) if self.drafter == "eagle" else None, rule)


@dataclass(frozen=True)
class LanternPP(Composed):
    """LANTERN++ (arXiv 2502.06352): LANTERN on a static tree, borrowing at most (λ - 1) p(x).

    ``residual`` is LANTERN's: by default it never emits an excluded token.
    """

    name: ClassVar[str] = "lantern++"
    claims: ClassVar[str] = "bounded"
    lambda_: float = 20.0
    k: int = 60
    residual: Literal["corrected", "release", "official"] = "corrected"
    drafter: Literal["block", "eagle"] = "block"
    tree: Tree = None
    rejected_weight: float = 0.3  # as Speculative's

    def __post_init__(self) -> None:
        check_rejected_weight(self.rejected_weight)
        _current_residual(self)

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        rule = _lantern_rule(self, f"k={self.k}, lambda_={self.lambda_}")
        return Choice(self.drafter, self.tree, rule, self.rejected_weight)


def _dynamic(method: Eagle | Lantern) -> str:
    return f"dynamic(total={method.total}, depth={method.depth}, top_k={method.top_k})"


def _current_residual(method: Lantern | LanternPP) -> None:
    """Take the residual's old name, "official", for the one that it has now; it warns."""
    if method.residual == "official":  # until version 0.3
        warnings.warn('residual "official" is called "release" now', FutureWarning, stacklevel=4)
        object.__setattr__(method, "residual", "release")


def _lantern_rule(method: Lantern | LanternPP, bounds: str) -> str:
    """The rule by name: the release's has its own, so that certificates tell them apart."""
    return f"{method.name}{'-release' if method.residual == 'release' else ''}({bounds})"
