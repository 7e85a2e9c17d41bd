"""Methods of answers to questions about pictures, and of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specmm.methods.base import Choice, Declared, TreeName


@dataclass(frozen=True)
class DrawnIfSampled(Declared):
    """Options of methods that use ``tree`` and ``rule`` only if ``sampled``."""

    captured: ClassVar[bool] = True
    can_refill: ClassVar[bool] = True
    total: int = 59
    depth: int = 5
    top_k: int = 10
    sampled: bool = False
    tree: TreeName = (3, 2, 2, 1, 1)
    rule: str = "recursive"

    @property
    def ignored(self) -> tuple[str, ...]:
        """Options that nothing reads as the others are."""
        return () if self.sampled else ("tree", "rule")


@dataclass(frozen=True)
class DrawnIfAsked(Declared):
    """Options of methods that draw a tree if ``sampled`` or if a ``tree`` is given."""

    can_refill: ClassVar[bool] = True
    total: int = 12
    depth: int = 3
    top_k: int = 4
    sampled: bool = True
    tree: TreeName = ""
    rule: str = "recursive"

    @property
    def ignored(self) -> tuple[str, ...]:
        """Options that nothing reads as the others are."""
        return () if self.sampled or self.tree else ("rule",)


@dataclass(frozen=True)
class OfBlocks(Declared):
    """Options of methods whose drafter proposes a block at once."""

    can_refill: ClassVar[bool] = True
    length: int = 0
    tree: int | TreeName = 0
    recall: int = 0
    rule: str = ""  # for a tree of fixed shape

    @property
    def ignored(self) -> tuple[str, ...]:
        """Options that nothing reads as the others are."""
        return ("rule",) if isinstance(self.tree, int) else ()


@dataclass(frozen=True)
class TextDraft(Declared):
    """A small language model drafts without seeing the picture (arXiv 2404.08856)."""

    name: ClassVar[str] = "text-draft"
    tree: TreeName = (1, 1, 1, 1)
    rule: str = "recursive"


@dataclass(frozen=True)
class VLMDraft(Declared):
    """A small vision-language model drafts and sees the picture, too."""

    name: ClassVar[str] = "vlm-draft"
    tree: TreeName = (1, 1, 1, 1)
    rule: str = "recursive"


@dataclass(frozen=True)
class MSD(DrawnIfSampled):
    """MSD (Lin et al. 2025): EAGLE-2 with a drafter that treats text and picture separately.

    The tree has ``total`` nodes. ``sampled`` draws a static ``tree`` from recorded distributions
    instead, which is exact, too, and accepts more at high temperatures. For targets whose layers
    have states, which take chains only, trees become chains of the same depth.
    """

    name: ClassVar[str] = "msd"


@dataclass(frozen=True)
class MTP(DrawnIfAsked):
    """The multi-token prediction layers of the target's own checkpoint (arXiv 2412.19437).

    Layers draft in turn; the last layer also drafts all deeper levels (FastMTP, arXiv 2509.18362).
    Greedy runs, and runs with ``sampled`` off, verify EAGLE-2's tree of ``total`` point masses;
    others draw a tree from recorded distributions. A given ``tree`` has a fixed shape in both
    cases. For targets whose layers have states the trees are chains.
    """

    name: ClassVar[str] = "mtp"


@dataclass(frozen=True)
class Eagle3(DrawnIfSampled):
    """EAGLE-3 (arXiv 2503.01840): a head reads the states of three of the target's layers.

    Heads of speculators', SafeAILab's and SpecForge's layouts; those of P-EAGLE draft in one pass.
    Options as :class:`MSD`'s.
    """

    name: ClassVar[str] = "eagle3"


@dataclass(frozen=True)
class Assistant(DrawnIfAsked):
    """Gemma 4's assistants, which draft from one position over the target's keys and values.

    Options as :class:`MTP`'s.
    """

    name: ClassVar[str] = "assistant"


@dataclass(frozen=True)
class PromptLookup(Declared):
    """Drafts what followed the last earlier occurrence of the latest ``ngram`` tokens."""

    name: ClassVar[str] = "prompt-lookup"
    can_refill: ClassVar[bool] = True
    ngram: int = 3
    length: int = 8

    @property
    def choice(self) -> Choice:
        """Drafter, tree and rule, of image tokens."""
        return Choice("prompt-lookup", None, "matching", method=self)


@dataclass(frozen=True)
class Suffix(Declared):
    """Suffix decoding (arXiv 2411.04975): drafts what followed the longest earlier occurrence of
    the latest tokens, as long as its estimated probability is at least ``least``.

    At most ``length`` tokens, longer ones after longer matches. With a drafter ``EarlierAnswers``
    it also drafts from the answers of earlier calls.
    """

    name: ClassVar[str] = "suffix"
    can_refill: ClassVar[bool] = True
    length: int = 32
    least: float = 0.25


@dataclass(frozen=True)
class Recycle(Declared):
    """Token recycling (arXiv 2408.08696): a tree of the tokens that the target last found likeliest
    after each token, of ``total`` nodes or a ``tree`` of fixed shape.
    """

    name: ClassVar[str] = "recycle"
    can_refill: ClassVar[bool] = True
    total: int = 12
    tree: TreeName = ""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Options that nothing reads as the others are."""
        return ("total",) if self.tree else ()


@dataclass(frozen=True)
class AnswerSJD(Declared):
    """Speculative Jacobi decoding (arXiv 2410.01699) of pictures in an answer, and prompt lookup of
    the words between: up to ``window`` drafts a round, those of pictures drawn afresh.
    """

    name: ClassVar[str] = "sjd"
    can_refill: ClassVar[bool] = True
    window: int = 8


@dataclass(frozen=True)
class Verdict(Declared):
    """Speculative Verdict (arXiv 2510.20812): several models answer, a judge decides.

    The judge reads the ``keep`` answers that agree most with the others.
    """

    name: ClassVar[str] = "verdict"
    claims: ClassVar[str] = "heuristic"
    streams: ClassVar[bool] = False
    keep: int = 3


@dataclass(frozen=True)
class DiffuSpec(Declared):
    """DiffuSpec (arXiv 2510.02358): a diffusion model's block, searched for a causal path.

    Drafts are point masses. A block has from ``least`` to ``most`` drafts, by ``step`` and
    ``rate``. A position has the likeliest tokens that carry the mass ``tau``, at most
    ``candidates``; ``weight`` is the block's against the n-gram proxy.
    """

    name: ClassVar[str] = "diffuspec"
    here: ClassVar[str] = "0.77x plain decoding at best"
    least: int = 3
    most: int = 12
    step: float = 4.0
    rate: float = 0.5
    tau: float = 0.8
    candidates: int = 15
    weight: float = 0.5


@dataclass(frozen=True)
class SpecDiff(Declared):
    """SpecDiff (arXiv 2408.05636): ``length`` drafts, drawn in two denoising steps."""

    name: ClassVar[str] = "specdiff"
    here: ClassVar[str] = "0.96x plain decoding at best"
    length: int = 10


@dataclass(frozen=True)
class DEER(OfBlocks):
    """DEER (arXiv 2512.15176): a diffusion drafter's block of ``length`` tokens in one step.

    ``length`` 0 is the drafter's own. The block's distribution is the product of its marginals.
    ``recall`` above 0 drafts what followed an earlier occurrence of
    that many latest tokens. ``tree`` above 0 verifies that many nodes of the likeliest paths, as
    point masses; a tree of fixed shape, as MSD's, is drawn from recorded distributions.
    """

    name: ClassVar[str] = "deer"


@dataclass(frozen=True)
class Block(OfBlocks):
    """A block drafter that reads the target's hidden states (DFlash, arXiv 2602.06036).

    Options as :class:`DEER`'s.
    """

    name: ClassVar[str] = "block"

    @property
    def static_shapes(self) -> bool:
        """Of chains of one length and drawn trees of a fixed shape."""
        likeliest = isinstance(self.tree, int) and self.tree > 0
        return not (self.recall or likeliest)
