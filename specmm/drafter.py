"""What a drafter is to the core: it sees what the last round gave and proposes a tree.

Shape letters: B batch, R rows (both guidance branches), N nodes, D deepest level, C width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.cache import branched
from specmm.randomness import Dice
from specmm.stats import Clock
from specmm.target import TargetOutput
from specmm.tree import DraftTree, TreeShape
from specmm.verify.rule import Verdict


@dataclass
class Feedback:
    """What a round gave: the target's ``output``, the new root ``token`` [B], and, behind the prefill, the ``tree``
    that was scored, its ``verdict`` and the ``tokens`` [B, D + 1] committed (junk past ``verdict.kept``).
    Rejected positions are in it, so a draft-free method is just a drafter. Rows that are ``fresh`` [B] have just begun.
    """

    output: TargetOutput
    token: Tensor
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    tokens: Tensor | None = None
    fresh: Tensor | None = None

    @property
    def drafted(self) -> tuple[DraftTree, Verdict]:
        """The tree and its verdict, behind a round."""
        assert self.tree is not None and self.verdict is not None
        return self.tree, self.verdict

    def kept_hidden(self) -> Tensor:
        """Hidden states of the nodes kept [R, D + 1, C], the root first; past ``verdict.kept`` they are junk."""
        assert self.verdict is not None
        hidden = self.output.hidden
        path = branched(self.verdict.path.clamp(min=0), len(hidden) // len(self.token))
        return hidden.gather(1, path[..., None].expand(-1, -1, hidden.shape[-1]))


def committed(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Tokens a round commits [B, D + 1]: the drafts on the path, then the recovered or bonus token."""
    drafts = tree.tokens.gather(1, verdict.path[:, 1:].clamp(min=0))
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
    return tokens.scatter_(1, verdict.kept[:, None] - 1, verdict.next_token[:, None])


class Drafter(Protocol):
    """Proposes trees; it keeps its own state of the batch, which ``begin`` resets."""

    max_nodes: int
    max_depth: int

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch behind the target's prefill."""
        ...

    def propose(self, feedback: Feedback, uniforms: Dice) -> DraftTree:
        """The next tree, its root ``feedback.token``."""
        ...


class NoDrafts:
    """Roots alone: plain decoding for rows that begin anew while others go on, which the plain loop's cannot."""

    max_nodes, max_depth = 1, 0

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Lay out the tree of one node."""
        self.shape = TreeShape.chain(0, feedback.token.device)

    def admit(self, row: int) -> None:
        """See :class:`specmm.refill.AdmittingDrafter`."""

    def propose(self, feedback: Feedback, uniforms: Dice) -> DraftTree:
        """The root."""
        return DraftTree(feedback.token[:, None], self.shape)


class Late:
    """``inner``, begun behind a first round without drafts: an answer of two tokens never pays for its prompt."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.max_nodes, self.max_depth = inner, inner.max_nodes, inner.max_depth

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Only note what the drafter is to begin with."""
        self._start: tuple[Feedback, Clock] | None = (feedback, clock)

    def propose(self, feedback: Feedback, uniforms: Dice) -> DraftTree:
        """The root alone at first, then what ``inner`` proposes."""
        if feedback.verdict is None:
            return DraftTree(feedback.token[:, None], TreeShape.chain(0, feedback.token.device))
        if self._start is not None:
            self.inner.begin(*self._start)
            self._start, feedback = None, _widened(feedback, self.max_depth)
        return self.inner.propose(feedback, uniforms)


def _widened(feedback: Feedback, depth: int) -> Feedback:
    """``feedback`` of a round without drafts, shaped like that of a tree ``depth`` deep."""
    assert feedback.verdict is not None and feedback.tokens is not None
    verdict = replace(feedback.verdict, path=F.pad(feedback.verdict.path, (0, depth), value=-1))
    return replace(feedback, verdict=verdict, tokens=F.pad(feedback.tokens, (0, depth)))
