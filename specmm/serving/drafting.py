"""Chooses an engine's drafts in each round: as many as pay, by the tokens a second that they bring.

Drafts come from earlier text (:mod:`specmm.hf.drafters.suffix`: the row's own and all answers of
the engine), at no cost, and from a network if the model has a drafter. The number of drafts in a
round (0: plain decoding) maximises the goodput: expected tokens, by the rows' acceptance so far,
over the seconds of rounds of this size (SmartSpec, arXiv 2406.14066). Drafts go to the rows that
are likeliest to accept them (TETRIS, arXiv 2502.15197).

Shape letters: B rows, D deepest level.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from specmm import methods
from specmm.core.drafter import BatchingDrafter, Drafter, Feedback, widened
from specmm.core.randomness import UniformSource
from specmm.core.rows import Joining
from specmm.core.stats import Clock
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.suffix import EarlierAnswers, Guess, SuffixRow
from specmm.hf.models.rows import RowsTarget
from specmm.serving.costs import LONGER, ForwardSeconds
from specmm.verify.rule import VerifyResult

LONGEST = 16  # tokens of a guess from what was said
FIRM = 4.0  # drafts as which what is believed of all rows counts for a new one
NEWEST = 0.05  # weight of the latest round in what is believed of the network's drafts
BINS = 10  # bins of the network's probabilities, each with its own measured acceptance
HOPED = 0.7  # the assumed acceptance of a network's draft, before the first
GAIN = 1.1  # the factor by which the network's goodput must be higher before it begins
MISSED = 512  # tokens of a row that the network reads later, if it has not drafted


@runtime_checkable
class LateDrafter(BatchingDrafter, Joining, Protocol):
    """Drafts chains, and can read the tokens of rounds in which it did not draft later."""

    max_depth: int

    def weigh(self) -> None:
        """Record the probability of each draft of a chain from now on (``DraftTree.chances``)."""

    def absorb(self, feedback: Feedback) -> None:
        """Read the tokens of a round, of at most ``max_depth`` + 1 a row, and draft nothing."""


@dataclass
class RowDrafts:
    """A row's drafting state: its ``text``, the guess of what follows, how many of its drafts were
    ``expected`` to be accepted, and how many were (``kept``).

    For the network: its prompt, ``started``, and the tokens ``said`` with the ``states`` before
    them, of which the network has ``read`` some. A ``lost`` row can no longer be read.
    """

    text: SuffixRow
    guess: Guess = field(default_factory=lambda: Guess([], []))
    expected: float = 0.0
    kept: float = 0.0
    started: RowsTarget | None = None
    said: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # [n, C] each
    read: int = 0
    lost: bool = False

    @property
    def missed(self) -> int:
        """Tokens that the network has not read."""
        return len(self.said) - self.read

    def latest(self, count: int) -> Tensor:
        """The states [n, C] before the last ``count`` tokens."""
        found: list[Tensor] = []
        left = count
        for part in reversed(self.states):
            if left <= 0:
                break
            found.insert(0, part)
            left -= len(part)
        return torch.cat(found)[-count:]

    def trust(self, usual: float) -> float:
        """The factor for this row's probabilities, where ``usual`` is that of all rows."""
        return (self.kept + FIRM * usual) / (self.expected + FIRM)


class Drafts:
    """The drafter of an engine of ``target``, with the ``network`` that drafts for it, if any, and
    its name. What rounds ``costs``, and the network, may be known from other answers.

    Without ``guesses`` it drafts nothing from earlier text. A
    :class:`specmm.core.drafter.BatchingDrafter` whose rows join and leave.
    """

    def __init__(
        self,
        target: RowsTarget,
        network: tuple[str, Drafter] | None,
        guesses: bool,
        costs: ForwardSeconds,
        network_costs: ForwardSeconds,
    ) -> None:
        self.target = target
        self.longest = LONGEST if guesses else 0
        self.name = network[0] if network else ""
        own = self.network = network[1] if network else None
        deep, large = (0, 1) if own is None else (own.max_depth, own.max_nodes)
        self.max_depth = max(LONGEST, deep)
        self.max_nodes = max(LONGEST + 1, large)
        self.shapes = [TreeShape.chain(n, target.device) for n in range(self.max_depth + 1)]
        self.earlier = EarlierAnswers()
        self.banned = frozenset(target.image_tokens)
        self.rows: list[RowDrafts] = []
        self.trusted = 1.0  # the usual factor of rows
        self.costs = costs
        self.network_costs = network_costs
        self.drafting = False  # whether the network drafts
        self.left = 0.0  # tokens that all rows still want
        self.attended = 0.0  # thousands of tokens that rows attend
        self.most_seconds = math.inf  # that a round may take, if it drafts
        self.start_seconds = 0.0  # the network's seconds to read a prompt
        self.kept_by = np.full(BINS, HOPED)  # acceptance of the network's drafts by bin
        self.bins = np.zeros((0, deep), dtype=int)  # bins of the last drafts' probabilities
        self.usual = np.cumprod(np.full(deep, HOPED))  # the same by depth
        self.drafted = np.zeros(0, dtype=bool)  # rows whose last drafts are the network's
        self.spent = 0.0  # seconds of the network in this round
        self.offered = self.taken = 0  # drafts of this round, and those kept

    @property
    def method(self) -> str:
        """The sources of drafts, as text."""
        said = [methods.Suffix.name] if self.longest else []
        own = [] if self.network is None else [self.name]
        return " and ".join([*own, *said]) or methods.AR.name

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Begin with the first row."""
        self.start_row(0)

    def start_row(self, row: int) -> None:
        """Index the prompt that the target has just begun in ``row``."""
        started = self.target.started
        drafted = self.longest and self.target.family.shared
        [ids] = started.prompt.rows() if drafted else [[]]
        self.rows[row] = RowDrafts(SuffixRow(ids, self.banned, self.earlier))
        if self.network is not None:
            self.rows[row].lost = started.context is None
            self.rows[row].started = started.without_cache()

    def join(self) -> None:
        self.rows.append(RowDrafts(SuffixRow()))
        if isinstance(self.network, Joining):
            self.network.join()

    def leave(self, row: int) -> None:
        """Remove ``row``; later answers may draft from its text."""
        self.earlier.add(self.rows[row].text.answer)
        self.rows[row] = self.rows[-1]
        self.rows.pop()
        if isinstance(self.network, Joining):
            self.network.leave(row)
        self.drafting &= bool(self.rows)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The answer of ``row`` goes on with ``tokens``."""
        if self.longest:
            self.rows[row].text.extend(tokens)

    # ---- the network

    def _choose(self, alone: float) -> None:
        """Decide whether the network drafts in this round: if its goodput exceeds the goodput
        without it, ``alone``, by enough to pay for the tokens it must read first.
        """
        assert self.network is not None
        count = len(self.rows)
        extra = self.network_costs.of(count)
        own, _ = self._best(np.tile(self.usual, (count, 1)), extra)
        gain = own / alone if alone else GAIN
        if self.drafting:
            self.drafting = gain >= 1
        elif gain >= GAIN:
            unread = sum(row.started is not None for row in self.rows)
            behind = max(row.missed for row in self.rows)
            seconds = unread * self.start_seconds + behind / (self.network.max_depth + 1) * extra
            self.drafting = not own or self.left * (1 / alone - 1 / own) >= seconds

    def _hear(self, feedback: Feedback) -> None:
        """Store the tokens that the last round committed, for the network to read."""
        assert feedback.result is not None and feedback.tokens is not None
        pairs = zip(feedback.tokens.tolist(), feedback.result.kept.tolist(), strict=True)
        for row, own, (tokens, kept) in zip(self.rows, feedback.kept_hidden(), pairs, strict=True):
            row.lost |= row.missed > MISSED
            if not row.lost:
                row.states.append(own[:kept])
                row.said += tokens[:kept]

    def _catch_up(self, feedback: Feedback) -> Feedback:
        """Let the network read the tokens that it has missed, except those of one last round;
        returns that round's feedback, which replaces ``feedback`` if that was deeper or tokens were
        missed.
        """
        network = self.network
        assert isinstance(network, LateDrafter)
        for number, row in enumerate(self.rows):
            if row.started is not None:
                start = time.perf_counter()
                self.target.started = row.started
                network.start_row(number)
                row.started = None
                seconds = time.perf_counter() - start
                self.start_seconds += (seconds - self.start_seconds) / 4
        assert feedback.result is not None and feedback.tokens is not None
        width = network.max_depth + 1
        missed = [row.missed for row in self.rows]
        if missed == feedback.result.kept.tolist() and feedback.tokens.shape[1] <= width:
            return widened(feedback, network.max_depth)
        while max(row.missed for row in self.rows) > width:
            network.absorb(self._missed(width, 1, feedback.token))
        return self._missed(width, 0, feedback.token)

    def _missed(self, width: int, left: int, token: Tensor) -> Feedback:
        """The next ``width`` missed tokens of each row, without the last ``left``, as the feedback
        of a round.
        """
        count = len(self.rows)
        kept = []
        tokens = torch.zeros(count, width, dtype=torch.int64)
        like = self.rows[0].states[-1]
        hidden = like.new_zeros(count, width, *like.shape[1:])
        for number, row in enumerate(self.rows):
            n = min(width, row.missed - left)
            tokens[number, :n] = torch.tensor(row.said[row.read : row.read + n])
            hidden[number, :n] = row.latest(row.missed)[:n]
            row.read += n
            kept.append(n)
        device = hidden.device
        path = torch.arange(width, device=device).repeat(count, 1)
        result = VerifyResult(path, torch.tensor(kept, device=device), token)
        output = TargetOutput(hidden, hidden)  # nobody reads the distributions of such a round
        return Feedback(output, token, result=result, tokens=tokens.to(device))

    # ---- a round

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Chains from earlier text or the network."""
        for row in self.rows if self.longest else ():
            row.guess = row.text.guess(self.longest)
        self.spent = 0.0
        alone, depths = self._best(self._said(LONGEST), 0.0)
        if self.network is not None:
            self._hear(feedback)
            self._choose(alone)
            self.drafting &= not any(row.lost for row in self.rows)
            if self.drafting:
                return self._by_network(self._catch_up(feedback), uniforms)
        self.drafted = np.zeros(len(self.rows), dtype=bool)
        roots = feedback.token[:, None].repeat(1, depths.max() + 1)
        return self._chains(roots, depths)

    def _chains(self, tokens: Tensor, depths: np.ndarray) -> DraftTree:
        """Chains of depths ``depths`` [B]; in rows that the network does not draft for, guesses
        replace ``tokens`` [B, D + 1].
        """
        for number, row in enumerate(self.rows):
            own = row.guess.tokens[: depths[number]]
            if own and not self.drafted[number]:
                tokens[number, 1 : len(own) + 1] = torch.tensor(own, device=tokens.device)
        sizes = None
        if (depths < depths.max()).any():
            sizes = torch.tensor(depths + 1, device=tokens.device)
        return DraftTree(tokens, self.shapes[depths.max()], sizes=sizes)

    def _by_network(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        assert self.network is not None
        start = time.perf_counter()
        tree = self.network.propose(feedback, uniforms)
        self.spent = time.perf_counter() - start
        for row in self.rows:
            row.read = len(row.said)
        assert tree.chances is not None
        chances = tree.chances[:, 1:].nan_to_num().numpy(force=True)  # NaN in a row that is spoilt
        self.bins = (chances * BINS).astype(int).clip(max=BINS - 1)
        own = self.kept_by[self.bins].cumprod(1)
        self.usual += NEWEST * (own.mean(0) - self.usual)
        said = self._said(own.shape[1])
        self.drafted = said.sum(1) <= own.sum(1)
        likely = np.where(self.drafted[:, None], own, said)
        _, depths = self._best(likely, self.spent)
        return self._chains(tree.tokens[:, : depths.max() + 1].clone(), depths)

    def _trusted(self, row: RowDrafts, length: int) -> np.ndarray:
        """The probabilities that ``length`` guesses of a ``row`` are accepted, 0 beyond them."""
        found = np.zeros(length)
        probs = row.guess.probs[:length]
        found[: len(probs)] = np.minimum(np.array(probs) * row.trust(self.trusted), 1.0)
        return found

    def _said(self, length: int) -> np.ndarray:
        """The probabilities that guesses are accepted, by row and depth: [B, ``length``]."""
        return np.stack([self._trusted(row, length) for row in self.rows])

    def _best(self, likely: np.ndarray, extra: float) -> tuple[float, np.ndarray]:
        """The largest goodput of a round that takes ``extra`` seconds, and how many drafts each row
        then has [B]; ``likely`` [B, D] says how likely each is kept with those above it.
        """
        rows, deepest = likely.shape
        if not self.costs.of(rows, 0, self.attended):
            return 0.0, np.zeros(rows, dtype=int)
        own = likely if self.target.packs else likely.sum(0, keepdims=True)  # all are as deep
        alike = rows // len(own)
        order = np.argsort(-own.T, axis=None, kind="stable")  # the likeliest first, none above it
        level = order // len(own)
        most = np.arange(deepest + 1)[:, None]  # D + 1 choices of how deep a chain may be
        there = np.pad(level < most, ((0, 0), (1, 0)))  # for each depth, all numbers of drafts
        drafts = alike * there.cumsum(1)
        gained = rows + (there * np.append(0.0, own.T.flatten()[order])).cumsum(1)
        seconds = self.costs.of(rows, drafts, self.attended) + extra
        allowed = max(self.most_seconds, LONGER * float(seconds.min()))
        rate = np.where(seconds > allowed, 0.0, gained / seconds)
        deep, count = np.unravel_index(rate.argmax(), rate.shape)
        taken = order[:count][level[:count] < deep] % len(own)
        return float(rate[deep, count]), np.bincount(taken, minlength=len(own)).repeat(alike)

    def observe(self, feedback: Feedback, seconds: float, read: int, pairs: float) -> None:
        """Learn from a round that took ``seconds`` and returned ``feedback``, with ``read`` tokens
        of prompts in its forward, and thousands of ``pairs``.
        """
        tree, _ = feedback.drafted
        rows, nodes = tree.tokens.shape
        sizes = tree.sizes
        depths = np.full(rows, nodes - 1) if sizes is None else sizes.numpy(force=True) - 1
        drafts = int(depths.sum())
        self.costs.observe(seconds - self.spent, rows, drafts, self.attended, read, pairs)
        if self.spent:
            self.network_costs.observe(self.spent, rows)
        assert feedback.accepted is not None
        kept = feedback.accepted.numpy(force=True) - 1  # B drafts
        guessed = [min(len(row.guess.tokens), n) for row, n in zip(self.rows, depths, strict=True)]
        self.offered = int(np.where(self.drafted, depths, guessed).sum())
        self.taken = int(kept.sum())
        if self.drafted.any():
            levels = np.arange(self.bins.shape[1])
            asked = levels < np.minimum(kept + 1, depths)[:, None]
            asked[~self.drafted] = False
            tried = np.bincount(self.bins[asked], minlength=BINS)
            won = np.bincount(self.bins[asked & (levels < kept[:, None])], minlength=BINS)
            weight = 1 - (1 - NEWEST) ** tried
            self.kept_by += weight * (won / tried.clip(min=1) - self.kept_by)
        for number, row in enumerate(self.rows):
            if not self.drafted[number] and (probs := row.guess.probs[: depths[number]]):
                row.expected += sum(probs)
                row.kept += min(int(kept[number]), len(probs))
                latest = min(kept[number], len(probs)) / sum(probs)
                self.trusted += NEWEST * (min(latest, 2.0) - self.trusted)
