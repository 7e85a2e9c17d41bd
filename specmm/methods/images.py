"""Methods of image models: of tokens (LlamaGen), scales (VAR) and continuous tokens (MAR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from specmm.methods.base import Choice, Composed, Declared, Draft, Tree, check_rejected_weight

Init: TypeAlias = Literal["last", "left", "above", "random"]
"""What Jacobi guesses begin from: see specmm/image_ar/tokens/drafters/jacobi.py."""


@dataclass(frozen=True)
class SJD(Composed):
    """Speculative Jacobi decoding (arXiv 2410.01699): no drafter, up to ``window`` guesses a round.

    Drafts are drawn from the target's own earlier distributions at these positions; exact. At new
    positions they begin, by ``init``, with the token above, the token to the left, the last
    position's distribution, or at random. ``coupled`` drafts change as rarely as they can from
    round to round (MC-SJD, arXiv 2510.24211), which rules "block" and "traversal" do not allow.
    """

    name: ClassVar[str] = "sjd"
    window: int = 15
    init: Init = "above"
    coupled: bool = True
    rule: str = "recursive"

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        return Choice("jacobi", f"chain({self.window})", self.rule, method=self)


@dataclass(frozen=True)
class GSD(Composed):
    """Grouped speculative decoding (arXiv 2508.07747): SJD's drafts, kept by groups.

    A draft shares the mass of tokens at most ``span`` ranks above or below it whose probabilities
    differ by less than ``gap``; with ``k``, only of tokens among its k nearest codes. ``window``,
    ``init`` and ``coupled`` are SJD's.
    """

    name: ClassVar[str] = "gsd"
    claims: ClassVar[str] = "bounded"
    span: int = 7
    gap: float = 0.15
    k: int = 0
    window: int = 8
    init: Init = "last"
    coupled: bool = False

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        rule = f"grouped(span={self.span}, gap={self.gap}, k={self.k})"
        return Choice("jacobi", f"chain({self.window})", rule, method=self)


@dataclass(frozen=True)
class Speculative(Draft):
    """A tree of siblings drawn without replacement from recorded distributions; exact.

    A block drafter draws from a mixture with the target's distributions at rejected positions,
    which have the weight ``rejected_weight``.
    """

    name: ClassVar[str] = "speculative"
    claims: ClassVar[str] = "exact"
    drafter: Literal["block", "eagle"] = "block"
    tree: Tree = None
    rule: str = "traversal"
    rejected_weight: float = 0.3


@dataclass(frozen=True)
class Eagle(Composed):
    """EAGLE-2 (arXiv 2406.16858): a dynamic tree of the likeliest tokens, exact as point masses."""

    name: ClassVar[str] = "eagle"
    here: ClassVar[str] = "0.89x plain decoding at best"
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

    ``residual`` is the distribution sampled after a rejection. The default never emits an excluded
    token; "release" reproduces the authors' code. ``drafter`` "any" is the drafter given when the
    model was opened, else the model's EAGLE head. ``total``, ``depth`` and ``top_k`` shape its
    tree; a block drafter has its own.
    """

    name: ClassVar[str] = "lantern"
    claims: ClassVar[str] = "bounded"
    k: int = 20
    delta: float = 0.1
    residual: Literal["corrected", "release"] = "corrected"
    drafter: Literal["any", "block", "eagle"] = "any"
    total: int = 24
    depth: int = 4
    top_k: int = 6

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        rule = _lantern_rule(self, f"k={self.k}, delta={self.delta}")
        return Choice(self.drafter, None if self.drafter == "block" else _dynamic(self), rule)


@dataclass(frozen=True)
class LanternPP(Composed):
    """LANTERN++ (arXiv 2502.06352): LANTERN on a static tree, borrowing at most (λ - 1) p(x).

    ``residual`` is LANTERN's: by default it never emits an excluded token.
    """

    name: ClassVar[str] = "lantern++"
    claims: ClassVar[str] = "bounded"
    lambda_: float = 20.0
    k: int = 60
    residual: Literal["corrected", "release"] = "corrected"
    drafter: Literal["block", "eagle"] = "block"
    tree: Tree = None
    rejected_weight: float = 0.3  # as Speculative's

    def __post_init__(self) -> None:
        check_rejected_weight(self.rejected_weight)

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule."""
        rule = _lantern_rule(self, f"k={self.k}, lambda_={self.lambda_}")
        return Choice(self.drafter, self.tree, rule, self.rejected_weight)


def _dynamic(method: Eagle | Lantern) -> str:
    return f"dynamic(total={method.total}, depth={method.depth}, top_k={method.top_k})"


@dataclass(frozen=True)
class CoDe(Declared):
    """CoDe (arXiv 2411.17787): the large model draws ``n`` coarse scales, the small one the rest.

    Nothing is verified. ``n``: from 0 (the small model alone) to all scales, or -1 to let the
    planner choose. ``release`` draws the same tokens as the released code.
    """

    name: ClassVar[str] = "code"
    claims: ClassVar[str] = "heuristic"
    static_shapes: ClassVar[bool] = True
    n: int = -1
    release: bool = False

    @property
    def timed(self) -> bool:
        """The planner's ``n`` rests on measured seconds."""
        return self.n == -1

    @property
    def one_generator(self) -> bool:
        """The release draws all pictures from one generator."""
        return self.release


@dataclass(frozen=True)
class CSpD(Declared):
    """Continuous speculative decoding (arXiv 2411.11925), as released or ``exact``.

    ``exact`` drafts ``window`` steps of a token's denoising chain by the target's last answer and
    its trend. ``release`` (the released code) drafts ``window`` iterations with the small model,
    after the target's own for the share ``prefill``; ``relax`` widens its densities.
    """

    name: ClassVar[str] = "cspd"
    here: ClassVar[str] = "exact 2.05x plain decoding, release 1.28x"
    claims: ClassVar[str] = "as its variant"
    variant: Literal["exact", "release"] = "exact"
    window: int = 0  # 0: the variant's own, 16 steps or 8 iterations
    prefill: float = 0.05
    relax: float = 42.0

    @property
    def static_shapes(self) -> bool:
        """Of rounds that are one call of the target's own head."""
        return self.variant == "exact"


def _lantern_rule(method: Lantern | LanternPP, bounds: str) -> str:
    """The rule by name; the release's variant has a name of its own, for certificates."""
    return f"{method.name}{'-release' if method.residual == 'release' else ''}({bounds})"
