"""What an acceptance rule is, and how its decisions become a result.

A rule is deterministic: from the drafts and the target's distributions it computes *decisions*, the
probability of keeping each node and the distribution of the next token wherever the path may end.
``decide`` then draws the uniforms. The split is what makes exact enumeration of the real code
possible (tests/unit/verify).

Shape letters: B batch, N nodes, V vocabulary, D deepest level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.randomness import UniformSource, categorical
from specmm.tree import DraftTree, TreeShape


@dataclass
class Decisions:
    """Probabilities of one round.

    Top-down rules (``order`` is None): ``accept[b, n]`` is the probability that node n is kept
    given that its parent is and that its earlier siblings were rejected. Bottom-up rules: nodes are
    tested in ``order`` ([M], or [B, M] when the rows differ) and the first one accepted ends the
    path; ``accept[b, n]`` is then given that all before it in the order were rejected. ``after`` is
    the distribution (any positive total) of the next token when the path ends at node n, [B, N, V],
    or a function from where the paths end, nodes [B], to their distributions [B, V]: a residual
    costs a rule most, and one of them is drawn from. ``excess`` [B, N], when measured, bounds the
    total variation between what the rule emits after node n and the target's distribution there:
    the probability that the relaxed rule and its strict twin, run on the same uniforms, part.
    """

    accept: Tensor
    after: Tensor | Callable[[Tensor], Tensor]
    order: Tensor | None = None
    excess: Tensor | None = None

    def probs_after(self, node: Tensor) -> Tensor:
        """The next token's distribution [B, V] where the paths end at ``node`` [B]."""
        if isinstance(self.after, Tensor):
            return self.after[torch.arange(len(node), device=node.device), node]
        return self.after(node)

    @property
    def next_probs(self) -> Tensor:
        """The next token's distributions after every node [B, N, V]."""
        if isinstance(self.after, Tensor):
            return self.after
        rows, nodes = self.accept.shape
        every = torch.arange(nodes, device=self.accept.device).expand(rows, -1)
        return torch.stack([self.after(node) for node in every.unbind(1)], dim=1)


@dataclass
class VerifyResult:
    """The outcome of a round.

    ``path`` [B, D + 1] holds the nodes kept, root first, padded with -1; ``kept`` [B] counts them
    (at least 1); ``next_token`` [B] is the recovered or bonus token; ``excess`` [B, D + 1] is the
    measured excess of the token after each node of the path (0 past its end), so that a round cut
    short counts what it kept alone.
    """

    path: Tensor
    kept: Tensor
    next_token: Tensor
    excess: Tensor | None = None


class Rule(Protocol):
    """An acceptance rule. Plain attributes or fields serve as ``name`` and ``exact``."""

    @property
    def name(self) -> str:
        """What it is called in reports."""
        ...

    @property
    def exact(self) -> bool:
        """Whether it keeps the target's distribution."""
        ...

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Decisions for the target's processed distributions ``p`` [B, N, V]; ``measure`` asks a
        relaxed rule for its excess.
        """
        ...


def throw(shape: TreeShape, uniforms: UniformSource) -> Tensor:
    """The uniforms [B, N + 1] of a round; a root without drafts draws one number, as plain decoding
    does.
    """
    if shape.size == 1:
        return F.pad(uniforms.draw(1), (1, 0))
    return uniforms.draw(shape.size + 1)


def settle(decisions: Decisions, shape: TreeShape, uniforms: Tensor) -> VerifyResult:
    """The result of ``decisions`` on a tree of ``shape`` under the uniforms ``uniforms`` [B, N +
    1].
    """
    hit = uniforms[:, :-1] < decisions.accept  # strict: probability 0 is never accepted
    hit[:, 0] = True
    on_path = _walk(shape, hit) if decisions.order is None else _first(shape, hit, decisions.order)
    reached = on_path * (shape.depths + 1)  # [B, N]
    kept, last = reached.max(1)
    next_token = categorical(decisions.probs_after(last), uniforms[:, -1])
    path, excess = _path(reached, shape.depth), None
    if decisions.excess is not None:
        excess = decisions.excess.gather(1, path.clamp(min=0)).masked_fill(path < 0, 0.0)
    return VerifyResult(path, kept, next_token, excess)


def _walk(shape: TreeShape, hit: Tensor) -> Tensor:
    """Nodes kept [B, N] when siblings are tested in turn from the root down: all of whose ancestors
    were chosen.
    """
    earlier_hit = (shape.earlier_siblings & hit[:, None]).any(-1)
    missed = ~hit | earlier_hit
    return ~(shape.ancestors & missed[:, None]).any(-1)


def _first(shape: TreeShape, hit: Tensor, order: Tensor) -> Tensor:
    """Nodes kept [B, N] when the first accepted node of ``order`` [M] or [B, M] ends the path; the
    root if none is.
    """
    order = F.pad(order.expand(len(hit), -1), (0, 1))  # the root (0) comes last
    first = hit.gather(1, order).int().argmax(1, keepdim=True)  # argmax takes the first of equals
    last = order.gather(1, first).squeeze(1)
    row = torch.arange(len(last), device=last.device)
    return shape.ancestors.expand(len(last), -1, -1)[row, last]


def _path(reached: Tensor, depth: int) -> Tensor:
    """Nodes by depth [B, D + 1], padded with -1, of ``reached`` [B, N]: depth + 1 on the path, 0
    off it.
    """
    path = reached.new_full((len(reached), depth + 2), -1)
    nodes = torch.arange(reached.shape[1], device=reached.device).expand_as(reached)
    return path.scatter_(1, reached, nodes)[
        :, 1:
    ]  # nodes off the path went to the spare first column
