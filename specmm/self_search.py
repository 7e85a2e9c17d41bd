"""Which layers a target leaves out when it drafts: searched on the text that it writes.

As SWIFT (arXiv 2410.06916) does: a set of layers is tried by one pass over the tokens verified
last, without these layers, and by what it would have drafted for them. What was measured is kept
for later calls on the same model. The order of trials depends on a seed and the text alone, not on
seconds: the cost of a pass is counted in weights.

Shape letters: B batch, R rows (all guidance branches), D drafts, W tokens of a trial, S slots, V
vocabulary, T bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specmm.cache import Cache, branched
from specmm.drafter import Feedback
from specmm.layered import Layered, Skip, Weights
from specmm.processors import Processor
from specmm.shape.blocks import acceptance_bound

WINDOW = 16  # W
SHARE = 0.1  # of the passes' weights that trials may take
AHEAD = 2.0  # trials that need not wait
BOUNDS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)  # T values of ``sure`` that are compared
PRIOR = 8.0  # tokens without a draft that every set of layers begins with
LEAST = 2  # trials of a set before it drafts: one may be luck
GAIN = 1.05  # what drafting must promise over plain decoding
PATIENCE = 24  # trials without a better set after which the search ends


class Setting(NamedTuple):
    """How to draft: without the layers ``skip`` (empty: not at all), up to ``length`` tokens,
    ``sure`` as the drafter has it; ``gain`` is the speed expected over plain decoding.
    """

    skip: Skip
    length: int
    sure: float
    gain: float


@dataclass
class Tried:
    """What trials of one set of layers saw: tokens, and by bound how many would have been drafted
    and how many of those kept (all T).
    """

    times: int = 0
    tokens: float = PRIOR
    drafted: Tensor = field(default_factory=lambda: torch.zeros(len(BOUNDS), dtype=torch.float64))
    kept: Tensor = field(default_factory=lambda: torch.zeros(len(BOUNDS), dtype=torch.float64))


class Search:
    """The sets of layers tried so far and the best of them, for drafts of at most ``length``."""

    def __init__(self, weights: Weights, resumes: bool, length: int, seed: int = 0) -> None:
        self.weights = weights
        self.resumes = resumes
        self.length = length
        self.random = Random(seed)
        self.tried: dict[Skip, Tried] = {}
        self.waiting = beginnings(len(weights.layers))
        self.spent = 0.0
        self.passed = 0.0
        self.share = SHARE
        self.idle = 0  # trials since the best set changed
        self.trials = 0

    def may_try(self) -> bool:
        """Whether a trial is due after one more pass of the whole target, and there is a layer to
        leave out.
        """
        self.passed += 1
        if self.idle >= PATIENCE or len(self.weights.layers) < 2:
            return False
        return self.spent <= self.share * self.passed + AHEAD

    def next(self, gated: bool) -> Skip:
        """The set to try: those to begin with, then in turn the best and a neighbour of it."""
        if self.waiting:
            return self.waiting.pop(0)
        best = self.best(gated, drafting=True).skip
        return best if self.trials % 2 else self._neighbour(best)

    def saw(self, skip: Skip, seen: Trial, gated: bool) -> None:
        """Count a trial of ``skip``."""
        before = self.best(gated).skip
        found = self.tried.setdefault(skip, Tried())
        found.times += 1
        found.tokens += seen.tokens
        found.drafted += seen.drafted
        found.kept += seen.kept
        self.spent += 2 * self.weights.draft(skip)  # of several tokens at once
        self.trials += 1
        self.idle = 0 if self.waiting or self.best(gated).skip != before else self.idle + 1

    def best(self, gated: bool, drafting: bool = False) -> Setting:
        """The setting that promises most; with ``drafting`` even where plain decoding does, or
        where that was seen only once.

        Chains that are ``gated`` end where they are unsure, others have one length.
        """
        plain = Setting((), 0, 0.0, 1.0)
        least = 1 if drafting else LEAST
        made = [self._setting(s, gated) for s, seen in self.tried.items() if seen.times >= least]
        found = max(made, key=lambda one: one.gain, default=plain)
        return found if drafting or found.gain > GAIN else plain

    def _setting(self, skip: Skip, gated: bool) -> Setting:
        seen = self.tried[skip]
        draft = self.weights.draft(skip)
        drafted = (seen.drafted / seen.tokens).tolist()
        kept = (seen.kept / seen.tokens).tolist()
        if not gated:
            lengths = range(1, self.length + 1)
            fixed = [Setting(skip, n, 0.0, _fixed(n, kept[0], draft)) for n in lengths]
            return max(fixed, key=lambda one: one.gain)
        rest = self.weights.rest(skip[0] if self.resumes else 0)
        numbers = zip(BOUNDS, drafted, kept, strict=True)
        settings = [
            Setting(skip, self.length, sure, _gated(self.length, share, good, draft, rest))
            for sure, share, good in numbers
        ]
        return max(settings, key=lambda one: one.gain)

    def _neighbour(self, skip: Skip) -> Skip:
        """A set that differs from ``skip`` by a layer or two; the same where all were tried."""
        count = len(self.weights.layers)
        for _ in range(2 * count):
            changed = set(skip)
            for layer in self.random.sample(range(count), self.random.choice((1, 1, 2))):
                changed ^= {layer}
            found = tuple(sorted(changed))
            if 0 < len(found) < count and found not in self.tried:
                return found
        return skip


def _fixed(length: int, kept: float, draft: float) -> float:
    """Tokens a pass of the target, by chains of ``length`` of whose drafts ``kept`` are kept."""
    tokens = sum(kept**i for i in range(length + 1))
    return tokens / (length * draft + 1)


def _gated(length: int, drafted: float, kept: float, draft: float, rest: float) -> float:
    """The same, by chains that end where they are unsure: of all tokens ``drafted`` are drafted.

    Every token costs a drafting pass, every round the rest of the layers, and a draft that is
    rejected those after it.
    """
    after = sum(drafted**i for i in range(1, length))  # drafts that follow one
    lost = (drafted - kept) * after * draft
    rounds = (1 - kept) / (1 - kept ** (length + 1))
    return 1 / (draft + lost + rest * rounds)


def beginnings(layers: int) -> list[Skip]:
    """Sets to begin with: early exits, some with the last layer, too, and every other layer."""
    exits = sorted(
        {max(1, round(layers * share / 8)) for share in range(1, 7)} & set(range(layers))
    )
    found = [tuple(range(n, layers)) for n in exits]
    found += [tuple(range(n, layers - 1)) for n in exits[1::2] if n < layers - 1]
    found.append(tuple(range(1, layers - 1, 2)))
    found.append(tuple(range(1, layers - 1, 4)))
    return [one for one in dict.fromkeys(found) if 0 < len(one) < layers]


_searches: WeakKeyDictionary[nn.Module, dict[tuple[int, int, bool], Search]] = WeakKeyDictionary()


def search_of(model: nn.Module, target: Layered, length: int, seed: int, greedy: bool) -> Search:
    """The search on ``model``, whose ``target`` drafts at most ``length``; later calls go on."""
    made = _searches.setdefault(model, {})
    key = (length, seed, greedy)
    if key not in made:
        made[key] = Search(target.weights, target.resumes, length, seed)
    return made[key]


class Verified:
    """The tokens that the target has verified, by slot of its ``cache``, with the probability that
    it gave each.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        shape = (cache.size.batch, cache.size.capacity + 1)  # the last slot takes what is not kept
        device = cache.lengths.device
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.following = torch.zeros_like(self.tokens)
        self.probs = torch.zeros(shape, device=device)  # of ``following``; 0: none is known
        self.rows = torch.arange(shape[0], device=device)[:, None]
        self.rounds = 0

    @property
    def enough(self) -> bool:
        """Whether there is a window of tokens."""
        return self.rounds >= WINDOW // 2

    def forget(self, row: int) -> None:
        """A new text begins in ``row``."""
        self.probs[row] = 0

    def add(self, feedback: Feedback) -> None:
        """Take what a round committed."""
        self.rounds += 1
        tree, result = feedback.drafted
        assert feedback.tokens is not None
        path = result.path.clamp(min=0)  # [B, D + 1]
        order = torch.arange(path.shape[1], device=path.device)
        kept = result.kept if feedback.fresh is None else result.kept.where(~feedback.fresh, 0)
        kept = kept[:, None]
        slots = self.cache.lengths[:, None] - kept + order
        slots = slots.where(order < kept, self.cache.size.capacity)
        following = feedback.tokens[:, : path.shape[1]]
        self.tokens.scatter_(1, slots, tree.tokens.gather(1, path))
        self.following.scatter_(1, slots, following)
        probs = feedback.output.probs[self.rows, path, following]
        self.probs.scatter_(1, slots, probs.to(self.probs.dtype))

    def window(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The last ``count`` W slots [B, W] of each row, their tokens, those after them and their
        probabilities.
        """
        order = torch.arange(count, device=self.rows.device)
        slots = (self.cache.lengths[:, None] - count + order).clamp(min=0)
        known = self.probs.gather(1, slots)
        return slots, self.tokens.gather(1, slots), self.following.gather(1, slots), known


class Trial(NamedTuple):
    """What a trial saw: the number of ``tokens``, and by bound how many it would have ``drafted``
    and how many of those were ``kept`` (all T).
    """

    tokens: float
    drafted: Tensor
    kept: Tensor


def trial(target: Layered, processor: Processor, skip: Skip, verified: Verified) -> Trial:
    """One pass without the layers ``skip`` over the tokens verified last, by ``processor``."""
    slots, tokens, following, known = verified.window(WINDOW)
    logits, _ = target.logits(skip, tokens, slots, _beside(target.cache, slots))
    q = (Processor() if processor.greedy else processor)(logits.float())  # [B, W, V]
    there = known > 0
    if processor.greedy:
        kept = (q.argmax(-1) == following).to(q.dtype)
    else:  # the expected share of drafts from q that a rule keeps, of the text's own tokens
        kept = (q.gather(-1, following[..., None])[..., 0] / known.clamp(min=1e-9)).clamp(max=1)
    bounds = torch.tensor(BOUNDS, device=q.device)
    drafted = (acceptance_bound(q)[..., None] >= bounds) & there[..., None]  # [B, W, T]
    sums = torch.stack([drafted.double().sum((0, 1)), (drafted * kept[..., None]).sum((0, 1))])
    return Trial(float(there.sum()), *sums.double().cpu())


def _beside(cache: Cache, slots: Tensor) -> Tensor:
    """The mask [R, 1, W, S] of tokens once more in the scratch slots, where those at ``slots``
    [B, W] are committed: each attends what is before it and itself.
    """
    first = cache.size.capacity
    count = slots.shape[1]
    cache.aim(first, first + count)
    before = torch.arange(first, device=slots.device) < slots[..., None]  # [B, W, capacity]
    before = branched(before, cache.size.branches)
    committed = cache.prefix_bias()[:, None].masked_fill(~before, float("-inf"))
    own = torch.full((count, count), float("-inf"), dtype=cache.dtype, device=slots.device)
    own.fill_diagonal_(0)
    return torch.cat([committed, own.expand(len(committed), -1, -1)], dim=-1)[:, None]
