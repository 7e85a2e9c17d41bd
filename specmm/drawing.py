"""What drafters and methods need of a target that draws pictures token by token.

Shape letters: B batch, G guidance branches, R = G·B rows, N tokens, P parents of a level, T tokens
of a picture, C width, F layers read, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from specmm.compiled import CompiledRound
from specmm.guidance import AllowedTokens, Guidance
from specmm.processors import Processor
from specmm.target import TargetOutput
from specmm.tree import DraftTree
from specmm.verify.rule import VerifyResult


class Sizes(Protocol):
    """Sizes of a drafter's layers and of what is drawn; LlamaGen's own configuration has them.

    A picture is a raster of ``columns`` tokens a row, those that end a row included;
    ``vocab_size`` tokens may be drawn.
    """

    @property
    def dim(self) -> int:
        """C."""

    @property
    def n_head(self) -> int:
        """Attention heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head, a multiple of 4."""

    @property
    def ffn_dim(self) -> int:
        """Inner width of the feed-forward layers."""

    @property
    def vocab_size(self) -> int:
        """How many tokens may be drawn."""

    @property
    def rows(self) -> int:
        """Rows of a picture."""

    @property
    def columns(self) -> int:
        """Tokens a row of a picture."""

    @property
    def norm_eps(self) -> float:
        """Of the norms."""

    @property
    def rope_base(self) -> float:
        """Of the rotary factors."""


@dataclass(frozen=True)
class DrafterSizes:
    """:class:`Sizes` of drafters for a target that is no LlamaGen.

    Raises ``ValueError`` for a width that is no multiple of the heads' multiples of 4.
    """

    dim: int
    n_head: int
    ffn_dim: int
    vocab_size: int
    rows: int
    columns: int
    norm_eps: float = 1e-5
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.dim % self.n_head or self.head_dim % 4:
            raise ValueError(
                f"dim must be n_head times a multiple of 4, got {self.dim} and {self.n_head} heads"
            )

    @property
    def head_dim(self) -> int:
        """See :class:`Sizes`."""
        return self.dim // self.n_head


class DrawingTarget(Protocol):
    """A :class:`specmm.target.Target` that draws pictures of ``length`` tokens.

    ``layered`` names the class by which it runs without some of its layers ("module:class").
    ``prompted`` ones begin with token ids, which may be looked up. Rounds of ``static_shapes`` can
    be compiled; ``programs`` are a target's own by method, None where whoever calls has them by
    the target's options as well.
    """

    name: str
    processor: Processor
    programs: dict[Hashable, CompiledRound] | None
    layered: ClassVar[str]
    prompted: ClassVar[bool]
    static_shapes: ClassVar[bool]

    @property
    def guidance(self) -> Guidance:
        """How its branches are mixed."""

    @property
    def length(self) -> int:
        """T."""

    @property
    def device(self) -> torch.device:
        """Where the weights live."""

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""

    @property
    def columns(self) -> int:
        """Picture tokens of a row."""

    @property
    def line(self) -> int:
        """Tokens of a row, with those that end it."""

    @property
    def allowed(self) -> AllowedTokens | None:
        """Which tokens may come where; None: all everywhere."""

    @property
    def vocabulary(self) -> int:
        """V."""

    @property
    def codes(self) -> int:
        """How many of them are codes of the picture's tokenizer."""

    @property
    def undrawable(self) -> int | None:
        """A token that may come nowhere; None where there is none."""

    @property
    def sizes(self) -> Sizes:
        """Those of drafters for it."""

    @property
    def network(self) -> nn.Module:
        """The model, by which searches are remembered."""

    def prefill(self, prompt: Any, scratch: int) -> TargetOutput:
        """See :class:`specmm.target.Target`."""

    def score(self, tree: DraftTree) -> TargetOutput:
        """See :class:`specmm.target.Target`."""

    def commit(self, result: VerifyResult) -> None:
        """See :class:`specmm.target.Target`."""

    def step(self, tokens: Tensor) -> TargetOutput:
        """See :class:`specmm.target.Target`."""

    def step_at(self, tokens: Tensor, places: Tensor, seen: Tensor) -> TargetOutput:
        """A plain step of ``tokens`` [B, N], put at ``places`` [N] of the picture.

        Each sees the prompt and the places ``seen`` [N, T] bool, of which those of this step are
        new. Outputs predict the places after. Raises ``ValueError`` for a model that reads its
        tokens in order.
        """

    def read_layers(self, layers: Sequence[int]) -> None:
        """From now on outputs hold what ``layers`` read after the last states [R, N, C·(1 + F)].

        Raises ``ValueError`` for layers that there are not.
        """

    def embed(self, tokens: Tensor) -> Tensor:
        """Inputs [..., C] of drawn ``tokens`` [...]."""

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., V] of the last ``states`` [..., C]."""

    def drawable(self, tokens: Tensor) -> Tensor:
        """The places [...] of ``tokens`` [...] among those that may be drawn."""

    def drawn_logits(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """Logits [B, P, V] of the ``drawn``-th token [B, 1 or P] of pictures, from 0: guided,
        ``-inf`` for what may not come there, of those of all branches [R, P, V].
        """

    def with_processor(self, processor: Processor) -> DrawingTarget:
        """The same model under another processor."""

    def any_prompt(self, batch: int) -> Any:
        """Prompts for ``batch`` pictures to measure on."""
