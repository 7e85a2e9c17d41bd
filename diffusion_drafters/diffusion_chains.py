"""Chains of a diffusion language model: DiffuSpec's searched paths, SpecDiff's pieces.

DiffuSpec (arXiv 2510.02358): each row's block is pruned to a lattice and searched for a causal
path. A controller sets the block's length from earlier rounds alone. Paths are point masses, exact
at any temperature.

SpecDiff (arXiv 2408.05636): a chain denoised in two forwards, a piece at a time from the left. The
second forward reads the first piece, so a token's distribution depends only on earlier drafts, and
the ratio test is exact. The paper denoises random places, whose joint distribution no row gives.

Shape letters: B batch, K block, M tokens of a piece, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specmm.core.drafter import Feedback
from specmm.core.randomness import UniformSource, categorical
from specmm.core.sorting import likeliest
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.diffusion_drafters.block_drafters import SourceDrafter, with_root
from specmm.diffusion_drafters.lattice_search import CausalProxy, Objective, beam_path, prune
from specmm.diffusion_drafters.sources import DiffusionSource
from specmm.hf.models.target import VLMTarget


@dataclass(frozen=True)
class Search:
    """DiffuSpec's settings: mass ``tau`` and ``most`` candidates a position, the block's ``weight``
    (lambda) against the proxy, the beam's ``width``.
    """

    tau: float = 0.8
    most: int = 15
    weight: float = 0.5
    width: int = 3


@dataclass(frozen=True)
class RowDraft:
    """``tokens`` to verify as point masses; ``generated``, L_gen, are those before an end token."""

    tokens: tuple[int, ...]
    generated: int


def draft(
    log_probs: Tensor, prefix: Sequence[int], end: int | None, proxy: CausalProxy, search: Search
) -> RowDraft:
    """The draft after ``prefix`` from a block's ``log_probs`` [K, V].

    A block that begins with the end token drafts it alone; one without any possible token drafts
    nothing.
    """
    lattice = prune(log_probs, search.tau, search.most)
    length = lattice.before(end)
    ends = (end,) if end is not None and length < len(lattice) else ()
    free = lattice.first(length)
    if end is not None:
        free = free.without(end)
    objective = Objective(proxy, prefix, search.weight)
    return RowDraft((*beam_path(free, objective, search.width).tokens, *ends), length)


@dataclass
class AdaptiveLength:
    """DiffuSpec's controller of one row (equations 10 and 11): ``length`` is the next block's.

    It follows the lengths of recent drafts, and grows while all of them are accepted. The averages
    start at 0 and the length at ``most``; lengths are rounded down, which the paper leaves open.
    Raises ``ValueError`` for impossible bounds.
    """

    least: int = 20
    most: int = 30
    step: float = 10.0  # tokens added while all drafts are accepted
    rate: float = 0.5  # weight of the latest round in the averages
    generated: float = field(default=0.0, init=False)  # an average, as ``accepted``
    accepted: float = field(default=0.0, init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(
                f"lengths must have 1 <= least <= most, got {self.least} and {self.most}"
            )
        if not 0 < self.rate <= 1 or not self.step >= 0:
            raise ValueError(
                f"rate must be in (0, 1] and step at least 0, got {self.rate} and {self.step}"
            )
        self.length = self.most

    def observe(self, generated: int, accepted: int) -> None:
        """Learn from a round of ``generated`` tokens before an end token, ``accepted`` of them."""
        self.generated += self.rate * (generated - self.generated)
        self.accepted += self.rate * (accepted - self.accepted)
        length = self.generated + (self.step if self.accepted >= self.generated else 0)
        self.length = math.floor(min(max(length, self.least), self.most))


@dataclass
class AdaptiveRow:
    """A row's controller, its latest draft, and the counts (drafted, accepted) of every round."""

    control: AdaptiveLength
    latest: RowDraft = field(default_factory=lambda: RowDraft((), 0))
    trace: list[tuple[int, int]] = field(default_factory=list)

    def observe(self, kept: int) -> None:
        """Learn from a round that committed ``kept`` tokens; a finished row commits none."""
        if kept:
            accepted = min(kept - 1, self.latest.generated)  # an end token does not count
            self.control.observe(self.latest.generated, accepted)
            self.trace.append((self.latest.generated, accepted))


class DiffuSpecDrafter:
    """DiffuSpec's drafts for ``source.target``.

    ``least`` and ``most`` bound the drafts' length; equal bounds fix it. Unless the target is
    greedy, every block is ``most`` long and a row's path is cut to its own length and filled up,
    because a row's uniforms must not depend on other rows. Raises ``ValueError`` for impossible
    bounds.
    """

    def __init__(
        self,
        source: DiffusionSource,
        proxy: CausalProxy,
        search: Search | None = None,
        least: int = 20,
        most: int = 30,
        step: float = 10.0,
        rate: float = 0.5,
    ) -> None:
        self.bounds = (least, most, step, rate)
        AdaptiveLength(*self.bounds)  # raises for impossible bounds
        self.source = source
        self.proxy = proxy
        self.search = search or Search()
        self.max_depth = most
        self.max_nodes = most + 1
        self.greedy = source.target.processor.greedy
        self.read = proxy.order - 1

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Reset every row's controller."""
        self.clock = clock
        self.rows = [AdaptiveRow(AdaptiveLength(*self.bounds)) for _ in feedback.token]
        self.source.begin(feedback, self.max_depth)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """A chain of each row's best path through the block's likeliest tokens."""
        if feedback.result is not None:
            for row, kept in zip(self.rows, feedback.result.kept.tolist(), strict=True):
                row.observe(kept)
        block = max(row.control.length for row in self.rows) if self.greedy else self.max_depth
        with self.clock("draft"):
            log_probs = self.source.logits(feedback, block).log_softmax(-1)  # [B, K, V]
            with self.clock("search"):
                paths = [self._path(i, log_probs[i]) for i in range(len(self.rows))]
            length = max(map(len, paths)) if self.greedy else block
            return point_chain(feedback.token, paths, length)

    def _path(self, row: int, log_probs: Tensor) -> tuple[int, ...]:
        """A row's draft from its block [K, V]."""
        state = self.rows[row]
        before = self.source.latest(row, self.read)
        block = log_probs[: state.control.length]
        state.latest = draft(block, before, self.source.end, self.proxy, self.search)
        return state.latest.tokens


def point_chain(root: Tensor, paths: Sequence[Sequence[int]], length: int) -> DraftTree:
    """Chains of chosen ``paths`` [B] as point masses, padded with the token of ``root`` [B]."""
    rows = [list(path)[:length] for path in paths]
    padded = zip(rows, root.tolist(), strict=True)
    filled = [row + [first] * (length - len(row)) for row, first in padded]
    drafts = torch.tensor(filled, dtype=root.dtype, device=root.device).view(len(root), length)
    tokens = torch.cat([root[:, None], drafts], dim=1)
    return DraftTree(tokens, TreeShape.chain(length, root.device), drafted=max(map(len, rows)))


class StepsDrafter(SourceDrafter):
    """SpecDiff's chains of ``length`` drafts in two forwards, a half each.

    For a greedy target they are the likeliest tokens. Raises ``ValueError`` for a length below 2.
    """

    def __init__(self, source: DiffusionSource, target: VLMTarget, length: int = 12) -> None:
        super().__init__(source, target, length)
        self.source: DiffusionSource = source
        self.max_nodes = length + 1
        if length < 2:
            raise ValueError(f"length must be at least 2, a draft of each forward, got {length}")
        self.pieces = (length - length // 2, length // 2)
        self.shape = TreeShape.chain(length, target.device)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """A chain drawn in pieces; each piece comes from a forward that reads the others."""
        with self.clock("draft"):
            logits = self.source.logits(feedback, self.max_depth)
            drafts = feedback.token.new_empty(len(feedback.token), 0)
            probs: list[Tensor] = []
            for number, piece in enumerate(self.pieces):
                if number:
                    logits = self.source.logits_after(drafts, self.max_depth - drafts.shape[1])
                dist = self.probs(logits[:, :piece])  # [B, M, V]
                drawn = likeliest(dist) if self.greedy else categorical(dist, uniforms.draw(piece))
                drafts = torch.cat([drafts, drawn], dim=1)
                probs.append(dist)
        tokens = torch.cat([feedback.token[:, None], drafts], dim=1)
        recorded = None if self.greedy else with_root(torch.cat(probs, dim=1))
        return DraftTree(tokens, self.shape, recorded)
