"""DiffuSpec in the loop: each row's block is pruned, searched for a causal path, and as long as its
controller says.

Searched paths are point masses, exact at any temperature; sampled ones are drawn left to right from
the lattice's renormalised scores, each token with its row. Source: DiffuSpec (arXiv 2510.02358).

Shape letters: B batch, K block, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from specmm.diffusion_drafters.diffuspec.draft import Draft, Search, draft
from specmm.diffusion_drafters.diffuspec.lattice import prune
from specmm.diffusion_drafters.diffuspec.length import AdaptiveLength
from specmm.diffusion_drafters.diffuspec.search import CausalProxy, Objective
from specmm.diffusion_drafters.drafters.sources import DiffusionSource
from specmm.diffusion_drafters.recorded_drafts import lattice_chain, point_chain
from specmm.drafter import Feedback
from specmm.randomness import UniformSource
from specmm.stats import Clock
from specmm.tree import DraftTree


@dataclass
class Row:
    """A row's controller, its latest draft, and (drafted, accepted) of every round so far."""

    control: AdaptiveLength
    latest: Draft = field(default_factory=lambda: Draft((), 0))
    trace: list[tuple[int, int]] = field(default_factory=list)

    def observe(self, kept: int) -> None:
        """Learn from a round that committed ``kept`` tokens; a finished row commits none and learns
        nothing.
        """
        if kept:
            accepted = min(kept - 1, self.latest.generated)  # an end token does not count
            self.control.observe(self.latest.generated, accepted)
            self.trace.append((self.latest.generated, accepted))


class DiffuSpecDrafter:
    """Drafts for ``source.target``; ``proxy`` None takes the likeliest tokens (no path search),
    ``least`` and ``most`` bound the drafts' length, equal ones fix it. ``sampled`` draws paths
    where uniforms are drawn.

    Where uniforms are drawn every block is ``most`` long and a row's path cut to its own length,
    filler after it, for a row's uniforms must not depend on the others. Raises ``ValueError`` for
    bounds that are none.
    """

    def __init__(
        self,
        source: DiffusionSource,
        proxy: CausalProxy | None,
        search: Search | None = None,
        least: int = 20,
        most: int = 30,
        step: float = 10.0,
        rate: float = 0.5,
        sampled: bool = False,
    ) -> None:
        AdaptiveLength(least, most, step, rate)  # raises on bounds that are none
        if sampled and proxy is None:
            raise ValueError(
                "a sampled path needs a proxy, got none; give one or leave sampled out"
            )
        self.source, self.proxy, self.search = source, proxy, search or Search()
        self.bounds = (least, most, step, rate)
        self.max_depth, self.max_nodes = most, most + 1
        self.greedy = source.target.processor.greedy
        self.sampled = sampled and not self.greedy
        self.read = 0 if proxy is None else proxy.order - 1

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start every row's controller anew."""
        self.clock = clock
        self.rows = [Row(AdaptiveLength(*self.bounds)) for _ in feedback.token]
        self.source.begin(feedback, self.max_depth)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Each row's path after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        if feedback.result is not None:
            for row, kept in zip(self.rows, feedback.result.kept.tolist(), strict=True):
                row.observe(kept)
        block = max(row.control.length for row in self.rows) if self.greedy else self.bounds[1]
        with self.clock("draft"):
            log_probs = self.source.logits(feedback, block).log_softmax(-1)  # [B, K, V]
            if self.sampled:
                return self._drawn(feedback.token, log_probs, uniforms)
            with self.clock("search"):
                paths = [self._path(i, log_probs[i]) for i in range(len(self.rows))]
            length = max(map(len, paths)) if self.greedy else block
            return point_chain(feedback.token, paths, length)

    def _path(self, row: int, log_probs: Tensor) -> tuple[int, ...]:
        """A row's draft from its block [K, V]."""
        own, before = self.rows[row], self.source.latest(row, self.read)
        block = log_probs[: own.control.length]
        own.latest = draft(block, before, self.source.end, self.proxy, self.search)
        return own.latest.tokens

    def _drawn(self, root: Tensor, log_probs: Tensor, uniforms: UniformSource) -> DraftTree:
        """Each row's path drawn from its lattice, no longer than its controller says."""
        found, objectives = [], []
        for i, own in enumerate(self.rows):
            lattice = prune(log_probs[i, : own.control.length], self.search.tau, self.search.most)
            own.latest = Draft((), lattice.before(self.source.end))
            found.append(lattice)
            objectives.append(
                Objective(self._proxy, self.source.latest(i, self.read), self.search.weight)
            )
        return lattice_chain(root, found, objectives, log_probs.shape[-1], uniforms, self.bounds[1])

    @property
    def _proxy(self) -> CausalProxy:
        assert self.proxy is not None, "sampled paths have one"
        return self.proxy
