"""What a drafter is to the core: it sees what the last round gave and proposes a tree.

Shape letters: B batch, R rows (both guidance branches), N nodes, D deepest level, C width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specmm.randomness import Uniforms
from specmm.stats import Clock
from specmm.target import TargetOutput
from specmm.tree import DraftTree
from specmm.verify.rule import Verdict


@dataclass
class Feedback:
    """What a round gave: the target's ``output``, the new root ``token`` [B], and, behind the prefill, the ``tree``
    that was scored, its ``verdict`` and the ``tokens`` [B, D + 1] committed (junk past ``verdict.kept``).
    Rejected positions are in it, so a draft-free method is just a drafter.
    """

    output: TargetOutput
    token: Tensor
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    tokens: Tensor | None = None

    def kept_hidden(self) -> Tensor:
        """Hidden states of the nodes kept [R, D + 1, C], the root first; past ``verdict.kept`` they are junk."""
        assert self.verdict is not None
        hidden = self.output.hidden
        path = self.verdict.path.clamp(min=0).repeat(len(hidden) // len(self.token), 1)
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

    def propose(self, feedback: Feedback, uniforms: Uniforms) -> DraftTree:
        """The next tree, its root ``feedback.token``."""
        ...
