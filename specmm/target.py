"""What a target is to the core: prefill a prompt, score a tree of drafts, commit what was kept.

Shape letters: B batch, G guidance branches, R = G·B rows, N tree nodes, P prompt positions, C
width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from specmm.tree import DraftTree
from specmm.verify.rule import VerifyResult


@dataclass
class TargetOutput:
    """``probs`` [B, N, V], processed (guidance, temperature, filters); ``hidden`` [R, N, C], what
    drafters read.
    """

    probs: Tensor
    hidden: Tensor


class Target(Protocol):
    """A model under acceleration; it owns guidance, processors, positions, the cache and the
    attention.
    """

    name: str

    def prefill(self, prompt: Any, scratch: int) -> TargetOutput:
        """Start a batch with room for trees of ``scratch`` nodes; the last position's distribution
        is the first token's.
        """
        ...

    def score(self, tree: DraftTree) -> TargetOutput:
        """One forward over all nodes of ``tree``, each attending the committed tokens and its
        ancestors.
        """
        ...

    def commit(self, result: VerifyResult) -> None:
        """Keep the nodes of ``result.path`` in the cache."""
        ...

    def step(self, tokens: Tensor) -> TargetOutput:
        """Plain decoding: append one token a row [B] and score it, on the fastest path the model
        has.
        """
        ...
