"""The loop's interface to a target: prefill a prompt, score a tree of drafts, commit the accepted
nodes.

Shape letters: B batch, G guidance branches, R = G·B rows, N tree nodes, C width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from specmm.core.tree import DraftTree
from specmm.verify.rule import VerifyResult


@dataclass
class TargetOutput:
    """The result of a forward.

    ``probs`` [B, N, V] are processed: guidance, temperature and filters are applied. ``hidden`` [R,
    N, C] are the states that drafters read. ``extremes`` [2] are the least and the largest logit,
    finite if all logits are; None if nothing checks them. ``likeliest`` [B, N, K] are the tokens of
    the largest logits, if a drafter reads them.
    """

    probs: Tensor
    hidden: Tensor
    extremes: Tensor | None = None
    likeliest: Tensor | None = None


class Target(Protocol):
    """The model to accelerate, with its guidance, processors, positions, cache and attention."""

    name: str

    def prefill(self, prompt: Any, scratch: int) -> TargetOutput:
        """Start a batch, with room for trees of ``scratch`` nodes.

        The last position of the output predicts the first token.
        """

    def score(self, tree: DraftTree) -> TargetOutput:
        """One forward over all nodes; each attends to the committed tokens and its ancestors."""

    def commit(self, result: VerifyResult) -> None:
        """Keep the nodes of ``result.path`` in the cache."""

    def step(self, tokens: Tensor) -> TargetOutput:
        """Plain decoding: append one token a row [B] and score it, as fast as the model can."""


@runtime_checkable
class BatchingTarget(Protocol):
    """A target whose rows can start new samples while other rows continue."""

    def start_row(self, row: int, prompt: Any) -> TargetOutput:
        """Replace the sample in ``row`` by a prefill of ``prompt``, which has one sample."""
