"""The methods by name and their options: one frozen dataclass each, so that a misspelt option is an
error.

Image tokens: ``ar`` (plain), ``sjd`` (draft-free Jacobi), ``speculative`` (exact sampled tree),
``eagle`` (EAGLE-2's tree, exact by point masses), ``lantern`` (δ), ``lantern++`` (λ), ``auto`` (the
fastest exact choice on this machine). Continuous tokens: ``ar``, ``cspd`` (its variant ``exact``
speculates along the head's own denoising chain). Scales: ``ar``, ``code`` (two models in turn),
``speculative`` (the small one drafts, the large verifies), ``auto``. Questions about pictures:
``ar``, ``text-draft`` (a language model that sees no picture), ``vlm-draft`` (one that does),
``msd`` (a drafter on the target's features), ``prompt-lookup``, ``verdict`` (several answer, one
decides), ``auto``. Text: ``ar``, ``diffuspec`` (a diffusion model not trained for it, its block
searched for a causal path), ``specdiff`` (one in several denoising steps), ``deer`` (one trained to
draft a block at once), ``block`` (DFlash, on the target's hidden states), ``text-draft``,
``prompt-lookup``, ``auto``.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from specmm.registry import Registry, unknown

TreeName = str | tuple[int, ...]  # see specmm/shape/names.py
Tree = TreeName | None  # None: the one that the model's maker recommends


@dataclass(frozen=True)
class Choice:
    """Drafter, tree and rule of a method of image tokens, by name, and options of the drafter."""

    drafter: str
    tree: Tree
    rule: str
    rejected_weight: float = 0.0


def check_rejected_weight(weight: float) -> None:
    """Raise ``ValueError`` for a weight of the target's older distributions that is not in [0, 1)."""
    if not 0 <= weight < 1:
        raise ValueError(
            f"rejected positions must be in [0, 1), the weight of the target's older distributions, got {weight}"
        )


class Declared:
    """What a method says of itself, so that nobody asks its type."""

    claims: ClassVar[str] = "exact"  # of its runs; what a run may claim is in its certificate

    @property
    def drafts(self) -> bool:
        """Whether it drafts at all."""
        return True

    @property
    def can_refill(self) -> bool:
        """Whether rows that end may take up the next sample while others go on."""
        return False

    @property
    def static_shapes(self) -> bool:
        """Whether its rounds are all alike, so that they can be compiled into programs."""
        return False


@dataclass(frozen=True)
class AR(Declared):
    """Plain decoding: one token a step."""

    name: ClassVar[str] = "ar"

    @property
    def drafts(self) -> bool:
        """It does not."""
        return False

    @property
    def can_refill(self) -> bool:
        """Of answers and texts: the plain rows of pictures end together."""
        return True

    @property
    def static_shapes(self) -> bool:
        """One token a step."""
        return True


@dataclass(frozen=True)
class SJD(Declared):
    """Speculative Jacobi decoding (arXiv 2410.01699): no drafter, ``window`` tokens guessed at a
    time; exact.
    """

    name: ClassVar[str] = "sjd"
    window: int = 8

    @property
    def choice(self) -> Choice:
        """Target's own older distributions, a chain, strict."""
        return Choice("jacobi", f"chain({self.window})", "recursive")

    @property
    def can_refill(self) -> bool:
        """Its rows do not wait for one another."""
        return True

    @property
    def static_shapes(self) -> bool:
        """A fixed tree a round."""
        return True


@dataclass(frozen=True)
class Speculative(Declared):
    """The exact sampled tree: siblings drawn without replacement, with the distributions they were
    drawn from recorded.

    ``rejected_weight`` is the weight, in what a block drafter draws from, of the target's
    distributions after rejected drafts.
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
        """As its options say."""
        return Choice(self.drafter, self.tree, self.rule, self.rejected_weight)

    @property
    def can_refill(self) -> bool:
        """With a block drafter; EAGLE's reads its rows together."""
        return self.drafter == "block"

    @property
    def static_shapes(self) -> bool:
        """As for rows that are taken over by waiting samples."""
        return self.drafter == "block"


@dataclass(frozen=True)
class Eagle(Declared):
    """EAGLE-2 (arXiv 2406.16858): a dynamic tree of the most likely tokens, exact as point masses."""

    name: ClassVar[str] = "eagle"
    total: int = 24
    depth: int = 4
    top_k: int = 6

    @property
    def choice(self) -> Choice:
        """EAGLE's head and the likeliest tokens."""
        return Choice("eagle", _dynamic(self), "point-mass")


@dataclass(frozen=True)
class Lantern(Declared):
    """LANTERN (arXiv 2410.03355): a token stands for its ``k`` nearest codes while their mass is at
    most ``delta``.

    ``residual``, what is drawn from after a rejection, never emits an excluded token; "release" is
    the authors' code's, for comparisons.
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
        """EAGLE-2's tree, or the block drafter's own."""
        rule = _lantern_rule(self, f"k={self.k}, delta={self.delta}")
        return Choice(self.drafter, _dynamic(self) if self.drafter == "eagle" else None, rule)

    @property
    def can_refill(self) -> bool:
        """With a block drafter; EAGLE's reads its rows together."""
        return self.drafter == "block"

    @property
    def static_shapes(self) -> bool:
        """As for rows that are taken over by waiting samples."""
        return self.drafter == "block"


@dataclass(frozen=True)
class LanternPP(Declared):
    """LANTERN++ (arXiv 2502.06352): a static tree; the ``k`` nearest codes add at most (``lambda_``
    - 1) times p(x).

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
        _current_residual(self)
        check_rejected_weight(self.rejected_weight)

    @property
    def choice(self) -> Choice:
        """A tree of fixed shape, bounded relaxation."""
        rule = _lantern_rule(self, f"k={self.k}, lambda_={self.lambda_}")
        return Choice(self.drafter, self.tree, rule, self.rejected_weight)

    @property
    def can_refill(self) -> bool:
        """With a block drafter; EAGLE's reads its rows together."""
        return self.drafter == "block"

    @property
    def static_shapes(self) -> bool:
        """As for rows that are taken over by waiting samples."""
        return self.drafter == "block"


@dataclass(frozen=True)
class Draft(Declared):
    """Any drafter, tree and rule together (``specmm methods`` lists them); other methods are such
    choices.

    ``tree`` None is the one that the model's maker recommends. Answers and texts are drafted by the
    drafters of their methods: ``msd``, ``text-draft``, ``block`` and so on.
    """

    name: ClassVar[str] = "draft"
    claims: ClassVar[str] = "as its rule"
    drafter: str = "block"
    tree: Tree = None
    rule: str = "recursive"
    rejected_weight: float = 0.0

    def __post_init__(self) -> None:
        check_rejected_weight(self.rejected_weight)

    @property
    def choice(self) -> Choice:
        """As its options say."""
        return Choice(self.drafter, self.tree, self.rule, self.rejected_weight)

    @property
    def can_refill(self) -> bool:
        """But for EAGLE's head and models that draft, which read their rows together."""
        return self.drafter in ("block", "jacobi", "msd", "deer")

    @property
    def static_shapes(self) -> bool:
        """With a block drafter or none."""
        return self.drafter in ("block", "jacobi")


def _current_residual(method: Lantern | LanternPP) -> None:
    """Take the residual's old name, "official", for the one that it has now; it warns."""
    if method.residual == "official":  # until version 0.3
        warnings.warn('residual "official" is called "release" now', FutureWarning, stacklevel=4)
        object.__setattr__(method, "residual", "release")


def _lantern_rule(method: Lantern | LanternPP, bounds: str) -> str:
    """The rule by name: the release's has its own, so that certificates tell them apart."""
    return f"{method.name}{'-release' if method.residual == 'release' else ''}({bounds})"


def _dynamic(method: Any) -> str:
    return f"dynamic(total={method.total}, depth={method.depth}, top_k={method.top_k})"


@dataclass(frozen=True)
class Auto(Declared):
    """Measures this machine and takes the exact tree that should be fastest, or plain decoding."""

    name: ClassVar[str] = "auto"


@dataclass(frozen=True)
class TextDraft(Declared):
    """A small language model drafts without seeing the picture (arXiv 2404.08856); ``tree`` as
    children by level.
    """

    name: ClassVar[str] = "text-draft"
    tree: TreeName = (1, 1, 1, 1)
    rule: str = "recursive"


@dataclass(frozen=True)
class VLMDraft(Declared):
    """A small vision-language model drafts, and it is shown the picture; ``tree`` as children by
    level.
    """

    name: ClassVar[str] = "vlm-draft"
    tree: TreeName = (1, 1, 1, 1)
    rule: str = "recursive"


@dataclass(frozen=True)
class MSD(Declared):
    """MSD (Lin et al. 2025): an EAGLE-2 tree of ``total`` nodes by a drafter that takes text and
    picture apart.

    ``sampled`` draws a static ``tree`` with recorded distributions instead: exact, too, and better
    at high temperatures.
    """

    name: ClassVar[str] = "msd"
    total: int = 59
    depth: int = 5
    top_k: int = 10
    sampled: bool = False
    tree: TreeName = (3, 2, 2, 1, 1)
    rule: str = "recursive"

    @property
    def can_refill(self) -> bool:
        """Its rows do not wait for one another."""
        return True


@dataclass(frozen=True)
class PromptLookup(Declared):
    """Drafts what followed the last occurrence of the latest ``ngram`` tokens in prompt and answer."""

    name: ClassVar[str] = "prompt-lookup"
    ngram: int = 3
    length: int = 8

    @property
    def can_refill(self) -> bool:
        """Its rows do not wait for one another."""
        return True


@dataclass(frozen=True)
class Verdict(Declared):
    """Speculative Verdict (arXiv 2510.20812): several models answer, the ``keep`` most agreed upon
    go to the judge.
    """

    name: ClassVar[str] = "verdict"
    claims: ClassVar[str] = "heuristic"
    keep: int = 3


@dataclass(frozen=True)
class CoDe(Declared):
    """CoDe (arXiv 2411.17787): the large model draws the ``n`` coarsest scales, the small one the
    rest, unverified.

    ``n``: 0 (the small model alone) to all scales, or -1, the planner's; ``release`` draws the
    released code's tokens.
    """

    name: ClassVar[str] = "code"
    claims: ClassVar[str] = "heuristic"
    n: int = -1
    release: bool = False

    @property
    def static_shapes(self) -> bool:
        """A scale a pass."""
        return True


@dataclass(frozen=True)
class ScaleSpeculative(Declared):
    """The small model drafts ``window`` of the ``until`` coarsest scales at a time, the large
    verifies; exact.

    ``until`` -1 stands for the scales whose tokens cost the large model hardly more together than
    alone.
    """

    name: ClassVar[str] = "speculative"
    window: int = 3
    until: int = -1


@dataclass(frozen=True)
class CSpD(Declared):
    """Continuous speculative decoding (arXiv 2411.11925) of a MAR: by the ``paper``, as its
    ``release``, or ``exact``.

    ``aligned``, the baseline of ``release``, takes the target's sample of the draft's noise
    wherever it looks. ``exact`` drafts ``window`` steps of a token's denoising chain by
    ``predictor``: the target's last answer and how it should change (``gaussian``), that answer
    alone (``frozen``), or the small model's head. The others draft ``window`` iterations with the
    small model, after the share ``prefill`` of the target's own; ``relax`` widens the release's
    densities.
    """

    name: ClassVar[str] = "cspd"
    claims: ClassVar[str] = "as its variant"
    variant: Literal["exact", "paper", "release", "aligned"] = "exact"
    window: int = 0  # the variant's own: 16 steps or 8 iterations
    predictor: Literal["gaussian", "frozen", "small"] = "gaussian"
    prefill: float = 0.05
    relax: float = 42.0


@dataclass(frozen=True)
class DiffuSpec(Declared):
    """DiffuSpec (arXiv 2510.02358): a diffusion model's block, pruned and searched for a causal
    path; point masses.

    Without ``search`` the likeliest tokens, ``sampled`` draws a path with its distribution;
    ``most`` drafts, or ``adaptive``, by ``step`` and ``rate``; ``beam`` 0 finds the optimum;
    ``reuse`` keeps keys and values (other drafts, but quicker).
    """

    name: ClassVar[str] = "diffuspec"
    search: bool = True
    sampled: bool = False
    adaptive: bool = True
    least: int = 3
    most: int = 12
    step: float = 4.0
    rate: float = 0.5
    tau: float = 0.8
    candidates: int = 15
    weight: float = 0.5
    beam: int = 3
    reuse: bool = False


@dataclass(frozen=True)
class SpecDiff(Declared):
    """SpecDiff (arXiv 2408.05636): ``length`` drafts in ``steps`` denoising steps, recorded as they
    were drawn.

    As ``point`` masses it is exact, too, but fewer are kept.
    """

    name: ClassVar[str] = "specdiff"
    length: int = 10
    steps: int = 2
    point: bool = False


@dataclass(frozen=True)
class DEER(Declared):
    """DEER (arXiv 2512.15176): a block of ``length`` (0: the drafter's own) in one step, its
    marginals' product as distribution.

    ``sure`` above 0 cuts a block before the first token that promises less acceptance (ignored in a
    batch of several at T > 0); ``recall`` above 0 drafts what followed that many latest tokens
    where they stood before; ``tree`` above 0 verifies that many nodes of the likeliest paths, as
    point masses; a fixed one, as MSD's, is drawn with distributions.
    """

    name: ClassVar[str] = "deer"
    length: int = 0
    sure: float = 0.0
    tree: int | str | tuple[int, ...] = 0
    recall: int = 0
    rule: str = ""  # of a tree of fixed shape

    @property
    def can_refill(self) -> bool:
        """Its rows do not wait for one another."""
        return True


@dataclass(frozen=True)
class Block(Declared):
    """A block drafter that reads the target's hidden states (DFlash, arXiv 2602.06036); options as
    :class:`DEER`'s.
    """

    name: ClassVar[str] = "block"
    length: int = 0
    sure: float = 0.0
    tree: int | str | tuple[int, ...] = 0
    recall: int = 0
    rule: str = ""  # of a tree of fixed shape

    @property
    def can_refill(self) -> bool:
        """Its rows do not wait for one another."""
        return True

    @property
    def static_shapes(self) -> bool:
        """Chains of one length and drawn trees of a fixed shape."""
        likeliest = isinstance(self.tree, int) and self.tree > 0
        return not (self.sure or self.recall or likeliest)


Method = AR | SJD | Speculative | Eagle | Lantern | LanternPP | Draft | Auto
VQAMethod = AR | TextDraft | VLMDraft | MSD | PromptLookup | Verdict | Draft | Auto
ScalesMethod = AR | CoDe | ScaleSpeculative | Auto
ContinuousMethod = AR | CSpD
TextMethod = AR | DiffuSpec | SpecDiff | DEER | Block | TextDraft | PromptLookup | Draft | Auto


def _registry(*kinds: Any) -> Registry:
    return Registry("method", {m.name: f"specmm.methods:{m.__name__}" for m in kinds})


IMAGE_TOKENS = _registry(AR, SJD, Speculative, Eagle, Lantern, LanternPP, Draft, Auto)
VQA = _registry(AR, TextDraft, VLMDraft, MSD, PromptLookup, Verdict, Draft, Auto)
SCALES = _registry(AR, CoDe, ScaleSpeculative, Auto)
CONTINUOUS = _registry(AR, CSpD)
TEXT = _registry(AR, DiffuSpec, SpecDiff, DEER, Block, TextDraft, PromptLookup, Draft, Auto)
GENERATE = _registry(
    AR, TextDraft, VLMDraft, MSD, PromptLookup, DiffuSpec, SpecDiff, DEER, Block, Draft, Auto
)


def resolve(method: str | Method, **options: Any) -> Method:
    """An image-token method of a name (with ``options``) or of itself; raises ``ValueError`` with
    what is possible.
    """
    made: Method = make(IMAGE_TOKENS, method, **options)
    return made


def resolve_vqa(method: str | VQAMethod, **options: Any) -> VQAMethod:
    """The same for questions about pictures."""
    made: VQAMethod = make(VQA, method, **options)
    return made


def resolve_scales(method: str | ScalesMethod, **options: Any) -> ScalesMethod:
    """The same for models that draw scale by scale."""
    made: ScalesMethod = make(SCALES, method, **options)
    return made


def resolve_continuous(method: str | ContinuousMethod, **options: Any) -> ContinuousMethod:
    """The same for models of continuous tokens."""
    made: ContinuousMethod = make(CONTINUOUS, method, **options)
    return made


def make(registry: Registry, method: Any, **options: Any) -> Any:
    """The method object of a name in ``registry``, or of itself, with ``options``."""
    kind = registry.get(method if isinstance(method, str) else method.name)
    options = {current_option(kind, option): value for option, value in options.items()}
    known = [f.name for f in dataclasses.fields(kind)]
    if strange := [option for option in options if option not in known]:
        raise unknown(f"option of {kind.name}", strange[0], known or ["(none)"])
    return kind(**options) if isinstance(method, str) else dataclasses.replace(method, **options)


RENAMED = {"hindsight": "rejected_weight", "belief": "predictor"}  # until version 0.3


def current_option(kind: Any, option: str) -> str:
    """The name that ``option`` of ``kind`` has now; warns of one that is deprecated."""
    new = RENAMED.get(option)
    if new is None or new not in {f.name for f in dataclasses.fields(kind)}:
        return option
    warnings.warn(
        f"option {option} of {kind.name} is called {new} now", FutureWarning, stacklevel=3
    )
    return new
