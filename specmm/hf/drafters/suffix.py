"""Suffix decoding (arXiv 2411.04975): drafts the tokens that followed the longest earlier
occurrence of the latest ones, in the prompt, the answer so far, and stored earlier answers.

The texts' suffixes are states of a suffix automaton (Blumer et al. 1985), which grows by a token in
constant time and has a state for every node of the texts' suffix tree. Picture placeholders never
match and are never drafted. Drafts are point masses, so any is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from specmm import methods
from specmm.core.drafter import Feedback
from specmm.core.stats import Clock
from specmm.hf.drafters.drafting import Assembly
from specmm.hf.drafters.prompt_lookup import Recall, RecallDrafter, recalled
from specmm.hf.models.target import VLMTarget

COUNTED = 64  # suffixes of a text whose counts a token raises, the longest first
LATEST = 32  # tokens that are looked for in earlier answers
LEAST = 0.25  # a draft's least probability
ROOT = 0


class Guess(NamedTuple):
    """A chain of ``tokens``; ``probs`` estimate that each and all before it are accepted."""

    tokens: list[int]
    probs: list[float]


class SuffixTree:
    """All suffixes of texts, each with how often it occurred.

    States are numbers; ``ROOT`` is the empty suffix. A state has: the states that ``follow`` it by
    token; the state of its longest suffix that is in another state (``link``); the ``length`` of
    its longest text; and its ``count`` of occurrences.
    """

    def __init__(self) -> None:
        self.follow: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]

    def add(self, state: int, token: int) -> int:
        """The state of the text of ``state``, which ends here, with ``token`` after it."""
        length = self.length[state] + 1
        after = self.follow[state].get(token)
        if after is None:
            new = self._append({}, length, ROOT, 0)
            while state >= 0 and token not in self.follow[state]:
                self.follow[state][token] = new
                state = self.link[state]
            if state >= 0:
                self.link[new] = self._exactly(state, token)
        else:
            new = self._exactly(state, token)
        suffix = new
        for _ in range(COUNTED):
            if suffix == ROOT:
                break
            self.count[suffix] += 1
            suffix = self.link[suffix]
        return new

    def _append(self, follow: dict[int, int], length: int, link: int, count: int) -> int:
        self.follow.append(follow)
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        return len(self.link) - 1

    def _exactly(self, state: int, token: int) -> int:
        """The state after ``state`` by ``token``, split off if it also stands for longer texts."""
        after = self.follow[state][token]
        length = self.length[state] + 1
        if self.length[after] == length:
            return after
        new = self._append(self.follow[after].copy(), length, self.link[after], self.count[after])
        self.link[after] = new
        while state >= 0 and self.follow[state].get(token) == after:
            self.follow[state][token] = new
            state = self.link[state]
        return new

    def match(self, tokens: Iterable[int]) -> tuple[int, int]:
        """The state and the length of the longest suffix of ``tokens`` that occurs."""
        state, length = ROOT, 0
        for token in tokens:
            while state != ROOT and token not in self.follow[state]:
                state = self.link[state]
                length = self.length[state]
            after = self.follow[state].get(token)
            state, length = (ROOT, 0) if after is None else (after, length + 1)
        return state, length

    def guess(self, state: int, matched: int, length: int, least: float) -> Guess:
        """Up to ``length`` tokens that followed the last ``matched`` tokens of ``state``, while
        their probability is at least ``least``.

        Of several followers the newest is taken, because a change usually stays. If it accounts for
        c of the n followers, after m matching tokens, its probability is estimated as c / (n +
        1/m), by the rule of succession. So longer matches give longer drafts. A guess that reaches
        the end of the text goes on after the earlier occurrence, so that repetitions are drafted at
        full length.
        """
        tokens: list[int] = []
        probs: list[float] = []
        likely = 1.0
        count = self.count
        while len(tokens) < length:
            follow = self.follow[state]
            while not follow and state != ROOT:
                state = self.link[state]
                matched = min(matched, self.length[state])
                follow = self.follow[state]
            if state == ROOT or matched == 0:
                break
            token, state = next(reversed(follow.items()))
            total = count[state]
            if len(follow) > 1:
                total = sum([count[after] for after in follow.values()])
            likely *= count[state] / (total + 1 / matched)
            if likely < least:
                break
            matched += 1
            tokens.append(token)
            probs.append(likely)
        return Guess(tokens, probs)


class EarlierAnswers:
    """Earlier answers from which rows draft: about the ``capacity`` most recently used tokens.

    As the ``drafter`` of a pipeline with method ``suffix`` it keeps the answers of all calls. Then
    the tokens that a seed draws depend on earlier calls; their distribution does not.

    There are two trees. Answers go to the younger tree; when that reaches half of the ``capacity``,
    it becomes the elder, and the old elder is dropped. Text that a row drafted from an earlier
    answer is part of its own answer, too, and so enters the younger tree: the least recently used
    text is dropped first. For one thread at a time. Raises ``ValueError`` for a capacity below 2.
    """

    method: ClassVar[str] = "suffix"

    def __init__(self, capacity: int = 100_000) -> None:
        if capacity < 2:
            raise ValueError(f"capacity must be at least 2 tokens, got {capacity}")
        self.capacity = capacity
        self.trees = [SuffixTree()]
        self.tokens = 0  # the younger tree's
        self.open: list[list[int]] = []  # answers that are being written

    def begin(self, answers: list[list[int]]) -> None:
        """Store the answers of the last run; ``answers`` are the ones now being written."""
        for answer in self.open:
            self.add(answer)
        self.open = answers

    def restart(self, row: int, answer: list[int]) -> None:
        """Store the answer of ``row``, which now writes another ``answer``."""
        self.add(self.open[row])
        self.open[row] = answer

    def add(self, tokens: Iterable[int], banned: frozenset[int] = frozenset()) -> None:
        """Store the ``tokens`` of a finished answer, except ``banned`` tokens."""
        tree = self.trees[0]
        state = ROOT
        for token in tokens:
            state = ROOT if token in banned else tree.add(state, token)
            self.tokens += 1
        if self.tokens >= self.capacity // 2:
            self.trees = [SuffixTree(), tree]
            self.tokens = 0


class SuffixRow:
    """One row's text, and guesses of how it continues: from itself and, if given, from ``earlier``
    answers. ``answer`` holds the tokens appended after the initial ``tokens``.

    Tokens of ``banned`` never match and are never guessed.
    """

    def __init__(
        self,
        tokens: Iterable[int] = (),
        banned: frozenset[int] = frozenset(),
        earlier: EarlierAnswers | None = None,
    ) -> None:
        self.banned = banned
        self.earlier = earlier
        self.tree = SuffixTree()
        self.state = ROOT
        self.latest: deque[int] = deque(maxlen=LATEST)  # since the last banned token
        self.answer: list[int] = []
        self.extend(tokens)
        self.answer.clear()

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens`` to the text."""
        for token in tokens:
            if token in self.banned:
                self.state = ROOT
                self.latest.clear()
                continue
            self.state = self.tree.add(self.state, token)
            self.latest.append(token)
            self.answer.append(token)

    def guess(self, length: int, least: float = LEAST) -> Guess:
        """The likeliest chain of up to ``length`` tokens, each with a probability, jointly with the
        tokens before it, of at least ``least``; of several texts' chains the one with more expected
        accepted tokens.
        """
        tree = self.tree
        best = tree.guess(self.state, tree.length[self.state], length, least)
        if self.earlier is None:
            return best
        matches = [(other, *other.match(self.latest)) for other in self.earlier.trees]
        guesses = [other.guess(state, many, length, least) for other, state, many in matches]
        return max(best, *guesses, key=lambda guess: sum(guess.probs))


class SuffixDrafter(RecallDrafter[SuffixRow]):
    """Chains of up to ``length`` tokens whose estimated probabilities are at least ``least``.

    Raises ``ValueError`` for a length below 1 and a ``least`` outside [0, 1].
    """

    def __init__(
        self,
        target: VLMTarget,
        length: int = 32,
        least: float = LEAST,
        earlier: EarlierAnswers | None = None,
    ) -> None:
        if length < 1 or not 0 <= least <= 1:
            raise ValueError(
                f"length must be at least 1 and least from 0 to 1, got {length} and {least}"
            )
        self.earlier = earlier
        super().__init__(
            Recall(target, lambda tokens, banned: SuffixRow(tokens, banned, earlier)),
            lambda row, most: row.guess(most, least).tokens,
            length,
        )

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Index the prompts and the first tokens."""
        super().begin(feedback, clock)
        if self.earlier is not None:
            self.earlier.begin([row.answer for row in self.recall.rows])

    def start_row(self, row: int) -> None:
        super().start_row(row)
        if self.earlier is not None:
            self.earlier.restart(row, self.recall.rows[row].answer)


def make(
    method: methods.Suffix, target: VLMTarget, drafter: EarlierAnswers | None, tokenizer: object
) -> Assembly:
    """The parts of method ``suffix``; ``drafter`` holds the answers of earlier calls, if any."""
    return recalled(SuffixDrafter(target, method.length, method.least, drafter))
