"""What a drafter is to the core: it sees what the last round gave and proposes a tree.

Shape letters: B batch, R rows (both guidance branches), N nodes, D deepest level, C width, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.cache import branched
from specmm.randomness import UniformSource
from specmm.stats import Clock
from specmm.target import TargetOutput
from specmm.tree import DraftTree, TreeShape
from specmm.verify.rule import VerifyResult


@dataclass
class Feedback:
    """What a round gave: the target's ``output``, the new root ``token`` [B], and, after the
    prefill, the ``tree`` that was scored, its ``result`` and the ``tokens`` [B, D + 1] committed
    (junk past ``result.kept``). Rejected positions are in it, so a draft-free method is just a
    drafter. Rows that are ``fresh`` [B] have just begun.
    """

    output: TargetOutput
    token: Tensor
    tree: DraftTree | None = None
    result: VerifyResult | None = None
    tokens: Tensor | None = None
    fresh: Tensor | None = None

    @property
    def drafted(self) -> tuple[DraftTree, VerifyResult]:
        """The tree and its result, after a round."""
        assert self.tree is not None and self.result is not None
        return self.tree, self.result

    def kept_hidden(self) -> Tensor:
        """Hidden states of the nodes kept [R, D + 1, C], the root first; past ``result.kept`` they
        are junk.
        """
        assert self.result is not None
        hidden = self.output.hidden
        path = branched(self.result.path.clamp(min=0), len(hidden) // len(self.token))
        return hidden.gather(1, path[..., None].expand(-1, -1, hidden.shape[-1]))


def committed(tree: DraftTree, result: VerifyResult) -> Tensor:
    """Tokens a round commits [B, D + 1]: the drafts on the path, then the recovered or bonus token."""
    drafts = tree.tokens.gather(1, result.path[:, 1:].clamp(min=0))
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
    return tokens.scatter_(1, result.kept[:, None] - 1, result.next_token[:, None])


class Drafter(Protocol):
    """Proposes trees; it keeps its own state of the batch, which ``begin`` resets."""

    max_nodes: int
    max_depth: int

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch after the target's prefill."""
        ...

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The next tree, its root ``feedback.token``."""
        ...


class NoDrafts:
    """Roots alone: plain decoding for rows that begin anew while others go on, which the plain
    loop's cannot.
    """

    max_nodes, max_depth = 1, 0

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Lay out the tree of one node."""
        self.shape = TreeShape.chain(0, feedback.token.device)

    def start_row(self, row: int) -> None:
        """See :class:`specmm.continuous_batching.BatchingDrafter`."""

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The root."""
        return DraftTree(feedback.token[:, None], self.shape)


class DeferredDrafter:
    """``inner``, begun after a first round without drafts: an answer of two tokens never pays for
    its prompt.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.max_nodes, self.max_depth = inner, inner.max_nodes, inner.max_depth

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Only note what the drafter is to begin with."""
        self._start: tuple[Feedback, Clock] | None = (feedback, clock)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The root alone at first, then what ``inner`` proposes."""
        if feedback.result is None:
            return DraftTree(feedback.token[:, None], TreeShape.chain(0, feedback.token.device))
        if self._start is not None:
            self.inner.begin(*self._start)
            self._start, feedback = None, _widened(feedback, self.max_depth)
        return self.inner.propose(feedback, uniforms)


def _widened(feedback: Feedback, depth: int) -> Feedback:
    """``feedback`` of a round without drafts, shaped like that of a tree ``depth`` deep."""
    assert feedback.result is not None and feedback.tokens is not None
    result = replace(feedback.result, path=F.pad(feedback.result.path, (0, depth), value=-1))
    return replace(feedback, result=result, tokens=F.pad(feedback.tokens, (0, depth)))
