"""What an engine drafts in each round: as much as pays, measured by the tokens a second it brings.

Drafts come from what was said (:mod:`specmm.hf.drafters.suffix`: the row's own text and all answers
of the engine), at no cost, and from a network if the model has a drafter. How many tokens deep a
round is (0: plain decoding) is what has the largest goodput: the tokens expected, by what rows have
kept so far, over the seconds that rounds of this size have taken (SmartSpec, arXiv 2406.14066).

Shape letters: B rows, K drafts of a row, D deepest level.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specmm.core.drafter import BatchingDrafter, Drafter, Feedback, widened
from specmm.core.randomness import UniformSource
from specmm.core.rows import Joining
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.suffix import EarlierAnswers, Guess, SuffixRow
from specmm.hf.models.rows import RowsTarget
from specmm.serving.costs import Costs

LONGEST = 16  # tokens of a guess from what was said
FIRM = 4.0  # drafts as which what is believed of all rows counts for a new one
NEWEST = 0.05  # weight of the latest round in what is believed of the network's drafts
HOPED = 0.7  # of a network's draft, that it is kept, before any was seen
GAIN = 1.1  # by which the network must promise more before it is begun


@dataclass
class RowDrafts:
    """What is known of a row: its ``text``, how many of its drafts were ``expected`` to be kept,
    and how many were ``kept``.
    """

    text: SuffixRow
    guess: Guess
    expected: float = 0.0
    kept: float = 0.0

    def trust(self, usual: float) -> float:
        """By what its estimated probabilities are to be multiplied, where ``usual`` is for all."""
        return (self.kept + FIRM * usual) / (self.expected + FIRM)


class Drafts:
    """The drafter of an engine of ``target``, with the ``network`` that drafts for it, if any.

    Without ``guesses`` it drafts nothing from what was said. A
    :class:`specmm.core.drafter.BatchingDrafter` whose rows join and leave.
    """

    def __init__(self, target: RowsTarget, network: Drafter | None, guesses: bool = True) -> None:
        self.target = target
        self.longest = LONGEST if guesses else 0
        self.network = network
        deep, large = (0, 1) if network is None else (network.max_depth, network.max_nodes)
        self.max_depth = max(LONGEST, deep)
        self.max_nodes = max(LONGEST + 1, large)
        self.shapes = [TreeShape.chain(n, target.device) for n in range(self.max_depth + 1)]
        self.earlier = EarlierAnswers()
        self.banned = frozenset(target.image_tokens)
        self.rows: list[RowDrafts] = []
        self.trusted = 1.0  # what is usual of rows
        self.costs = Costs()  # of rounds without the network
        self.network_costs = Costs()
        self.network_rows = 0  # B while the network drafts, or 0
        self.kept_at = np.full(deep, HOPED)  # of a network's draft by depth, if those above were
        self.drafted = np.zeros(0, dtype=bool)  # rows whose last drafts are the network's
        self.spent = 0.0  # seconds of the network in this round

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """The first row."""
        self.start_row(0)

    def start_row(self, row: int) -> None:
        """Index the prompt that the target has just begun in ``row``."""
        started = self.target.started
        [ids] = started.prompt.rows() if self.target.family.shared else [[]]
        text = SuffixRow(ids, self.banned, self.earlier)
        self.rows[row] = RowDrafts(text, Guess([], []))
        if self.network_rows:
            self.start_network(row)

    def join(self) -> None:
        self.rows.append(RowDrafts(SuffixRow(), Guess([], [])))

    def leave(self, row: int) -> None:
        """Without ``row``: what was answered there may be drafted from."""
        self.earlier.add(self.rows[row].text.answer)
        self.rows[row] = self.rows[-1]
        self.rows.pop()
        if self.network_rows:
            assert isinstance(self.network, Joining)
            self.network.leave(row)
            self.network_rows -= 1

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The answer of ``row`` goes on with ``tokens``."""
        self.rows[row].text.extend(tokens)

    # ---- the network

    def start_network(self, row: int) -> None:
        """It drafts for ``row``, whose text the target has just read; rows are started in order."""
        assert isinstance(self.network, Joining) and isinstance(self.network, BatchingDrafter)
        if row == self.network_rows:
            self.network.join()
            self.network_rows += 1
        self.network.start_row(row)

    def end_network(self) -> None:
        """It does not draft any more."""
        while self.network_rows:
            assert isinstance(self.network, Joining)
            self.network_rows -= 1
            self.network.leave(self.network_rows)

    def gain_of_network(self, rows: int) -> float:
        """Its goodput over the best without it, at so many ``rows``; 0 where there is none."""
        if self.network is None:
            return 0.0
        alone, _ = self._best(rows, self._said(rows), 0.0)
        extra = float(self.network_costs.of(rows, np.array(rows)))
        own, _ = self._best(rows, rows * self._depths(), extra)
        return own / alone if alone else GAIN

    def _depths(self) -> np.ndarray:
        """How likely the network's draft at each depth [D] is kept."""
        return np.cumprod(self.kept_at)

    # ---- a round

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Chains of one depth, or the network's trees."""
        for row in self.rows:
            row.guess = row.text.guess(self.longest)
        self.spent = 0.0
        if self.network_rows:
            return self._by_network(feedback, uniforms)
        count = len(self.rows)
        _, depth = self._best(count, self._said(count), 0.0)
        self.drafted = np.zeros(count, dtype=bool)
        roots = feedback.token.tolist()
        chains = [
            [root, *row.guess.tokens[:depth]] for root, row in zip(roots, self.rows, strict=True)
        ]
        padded = [chain + chain[:1] * (depth + 1 - len(chain)) for chain in chains]
        return DraftTree(torch.tensor(padded, device=feedback.token.device), self.shapes[depth])

    def _by_network(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        assert self.network is not None
        start = time.perf_counter()
        tree = self.network.propose(widened(feedback, self.network.max_depth), uniforms)
        self.spent = time.perf_counter() - start
        count = len(self.rows)
        self.drafted = np.ones(count, dtype=bool)
        if not tree.shape.is_chain:
            return tree
        depths = self._depths()
        said = np.stack([self._trusted(row, len(depths)) for row in self.rows])
        self.drafted = said.sum(1) <= depths.sum()
        likely = np.where(self.drafted[:, None], depths, said).sum(0)
        _, depth = self._best(count, likely, self.spent)
        depth = max(depth, 1)
        tokens = tree.tokens[:, : depth + 1].clone()
        for number, row in enumerate(self.rows):
            if not self.drafted[number]:
                own = row.guess.tokens[:depth]
                tokens[number, 1 : len(own) + 1] = torch.tensor(own, device=tokens.device)
        return DraftTree(tokens, self.shapes[depth])

    def _trusted(self, row: RowDrafts, length: int) -> np.ndarray:
        """How likely each of ``length`` guessed tokens of a ``row`` is kept, 0 beyond its guess."""
        found = np.zeros(length)
        probs = row.guess.probs[:length]
        found[: len(probs)] = np.minimum(np.array(probs) * row.trust(self.trusted), 1.0)
        return found

    def _said(self, count: int) -> np.ndarray:
        """Of drafts from what was said: tokens [K] that all rows are expected to keep by depth."""
        return np.sum([self._trusted(row, LONGEST) for row in self.rows[:count]], axis=0)

    def _best(self, rows: int, likely: np.ndarray, extra: float) -> tuple[float, int]:
        """The largest goodput of rounds with the first K drafts, of which ``likely`` [D] are kept,
        and that K; the round takes ``extra`` seconds.
        """
        depths = np.arange(len(likely) + 1)
        gained = rows + np.concatenate([[0.0], np.cumsum(likely)])
        seconds = self.costs.of(rows, rows * (depths + 1)) + extra
        if not seconds[0]:
            return 0.0, 0
        rate = gained / seconds
        depth = int(rate.argmax())
        return float(rate[depth]), depth

    def observe(self, feedback: Feedback, seconds: float) -> None:
        """A round took so many ``seconds``; ``feedback`` is what it gave."""
        tree, _ = feedback.drafted
        rows, nodes = tree.tokens.shape
        self.costs.observe(rows, rows * nodes, seconds - self.spent)
        if self.spent:
            self.network_costs.observe(rows, rows, self.spent)
        assert feedback.accepted is not None
        kept = feedback.accepted.numpy(force=True) - 1  # B drafts
        depth = tree.shape.depth
        own = kept[self.drafted]
        for level in range(min(depth, len(self.kept_at)) if len(own) else 0):
            tried = (own >= level).sum()
            if tried:
                share = (own > level).sum() / tried
                weight = 1 - (1 - NEWEST) ** tried
                self.kept_at[level] += weight * (share - self.kept_at[level])
        for number, row in enumerate(self.rows):
            if not self.drafted[number] and (probs := row.guess.probs[:depth]):
                row.expected += sum(probs)
                row.kept += min(int(kept[number]), len(probs))
                latest = min(kept[number], len(probs)) / sum(probs)
                self.trusted += NEWEST * (min(latest, 2.0) - self.trusted)
