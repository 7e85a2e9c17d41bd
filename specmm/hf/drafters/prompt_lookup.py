"""Drafts of earlier tokens: prompt lookup, which drafts the tokens that followed the last earlier
occurrence of the latest ones in the prompt or answer; and the base that suffix decoding shares.

Picture placeholders never match and are never drafted. Drafts are point masses, so any is exact.

Shape letters: B batch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice, takewhile
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specmm import methods
from specmm.core.drafter import Feedback
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.drafting import Assembly, Verification
from specmm.hf.models.target import VLMTarget
from specmm.verify.matching import Matching
from specmm.verify.rule import Rule

TRUST = 0.4  # share of right followers that an n-gram of each length begins with
LATELY = 0.2  # the latest follower's weight in that share
LEAST = 0.15  # of it, for drafts to be made


class LookupRow:
    """One row's tokens, and the place after the last occurrence of each n-gram with a follower."""

    def __init__(self, tokens: list[int], ngram: int, banned: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.ngram = ngram
        self.banned = banned
        self.places: dict[tuple[int, ...], int] = {}
        self.expected: tuple[int, int] | None = None  # n and the token that follows next by it
        self.right = [TRUST] * (ngram + 1)  # by n, how often that token did follow lately
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        """Append ``tokens``; n-grams that end just before one of them now have a follower."""
        if self.expected is not None and tokens:
            n, follower = self.expected
            self.right[n] += LATELY * ((tokens[0] == follower) - self.right[n])
        for token in tokens:
            end = len(self.tokens)
            for n in range(1, min(self.ngram, end) + 1):
                self.places[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def guess(self, length: int, least: int = 1) -> list[int]:
        """Up to ``length`` tokens that followed an earlier occurrence of the longest possible
        n-gram, of at least ``least`` tokens.

        A guess that reaches the latest token repeats itself, so that repetitions are drafted at
        full length.
        """
        for n in range(min(self.ngram, len(self.tokens)), least - 1, -1):
            latest = tuple(self.tokens[-n:])
            begin = self.places.get(latest)
            if begin is not None and not self.banned.intersection(latest):
                self.expected = n, self.tokens[begin]
                period = self.tokens[begin : begin + length]
                guess = islice(cycle(period), length)
                return list(takewhile(lambda token: token not in self.banned, guess))
        self.expected = None
        return []

    def trusted_guess(self, length: int) -> list[int]:
        """:meth:`guess`, unless recent guesses from equally long n-grams were mostly wrong: a
        rejected draft costs time.
        """
        guess = self.guess(length)
        return guess if self.expected and self.right[self.expected[0]] >= LEAST else []


class Row(Protocol):
    """An index of the tokens of one row."""

    def extend(self, tokens: list[int]) -> None:
        """Append ``tokens``."""


R = TypeVar("R", bound=Row)


class Recall(Generic[R]):
    """An index of each row's tokens, read and written, made by ``make(tokens, banned)``."""

    def __init__(self, target: VLMTarget, make: Callable[[list[int], frozenset[int]], R]) -> None:
        self.target = target
        self.make = make
        self.rows: list[R] = []

    def begin(self, token: Tensor) -> None:
        """Index the prompts and the first tokens [B]."""
        self.rows = self._read(self.target)
        self._extend(token[:, None].tolist(), [1] * len(self.rows))

    def start_row(self, row: int) -> None:
        """Index the prompt that the target has just begun in ``row``."""
        [self.rows[row]] = self._read(self.target.started)

    def extend(self, feedback: Feedback) -> None:
        """Index the tokens that the last round committed."""
        if feedback.result is not None and feedback.tokens is not None:
            self._extend(feedback.tokens.tolist(), feedback.result.kept.tolist())

    def _read(self, target: VLMTarget) -> list[R]:
        banned = frozenset(target.image_tokens)
        rows = target.prompt.rows()
        if not target.family.shared:  # the prompt's ids are of other tokens
            rows = [[] for _ in rows]
        return [self.make(tokens, banned) for tokens in rows]

    def _extend(self, tokens: list[list[int]], kept: list[int]) -> None:
        for row, new, count in zip(self.rows, tokens, kept, strict=True):
            row.extend(new[:count])


def lookup(target: VLMTarget, ngram: int) -> Recall[LookupRow]:
    """Prompt lookup of ``target``'s rows by n-grams of at most ``ngram`` tokens."""
    return Recall(target, lambda tokens, banned: LookupRow(tokens, ngram, banned))


class RecallDrafter(Generic[R]):
    """Chains of up to ``length`` tokens, ``guess(row, length)`` of each row of ``recall``."""

    def __init__(
        self, recall: Recall[R], guess: Callable[[R, int], list[int]], length: int
    ) -> None:
        self.target = recall.target
        self.guess = guess
        self.length = length
        self.full = False  # chains of full length; see ``serve``
        self.recall = recall
        self.max_nodes = length + 1
        self.max_depth = length
        self.shapes = [TreeShape.chain(n, self.target.device) for n in range(length + 1)]

    def serve(self, rule: Rule) -> None:
        """Draft full-length chains if the sampling ``rule`` takes a uniform for each draft instead
        of each token: a row's uniforms must not depend on other rows' guesses.
        """
        self.full = not (self.target.processor.greedy or isinstance(rule, Matching))

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Index the prompts and the first tokens."""
        self.clock = clock
        self.recall.begin(feedback.token)

    def start_row(self, row: int) -> None:
        self.recall.start_row(row)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Each row's guess as a chain, padded with the root's token (any token would do).

        Chains are as long as the longest guess of any row, or of full length for some rules.
        """
        with self.clock("draft"):
            self.recall.extend(feedback)
            guesses = [self.guess(row, self.length) for row in self.recall.rows]
            drafted = max(map(len, guesses))
            longest = self.length if self.full else drafted
            roots = feedback.token.tolist()
            chains = [[root, *guess] for root, guess in zip(roots, guesses, strict=True)]
            padded = [chain + chain[:1] * (longest + 1 - len(chain)) for chain in chains]
            tokens = torch.tensor(padded, device=feedback.token.device)
        return DraftTree(tokens, self.shapes[longest], drafted=drafted)


def recalled(drafter: RecallDrafter[R]) -> Assembly:
    """The ``drafter`` and its rule, under which sampling gives the tokens of plain decoding."""
    return Assembly(drafter, Verification.of("matching", drafter.target).rule)


class PromptLookupDrafter(RecallDrafter[LookupRow]):
    """Chains of up to ``length`` tokens looked up by n-grams of at most ``ngram`` tokens.

    Raises ``ValueError`` for sizes below 1.
    """

    def __init__(self, target: VLMTarget, ngram: int = 3, length: int = 8) -> None:
        if ngram < 1 or length < 1:
            raise ValueError(f"ngram and length must be at least 1, got {ngram} and {length}")
        super().__init__(lookup(target, ngram), LookupRow.trusted_guess, length)


def make(
    method: methods.PromptLookup, target: VLMTarget, drafter: object, tokenizer: object
) -> Assembly:
    """The parts of method ``prompt-lookup``."""
    return recalled(PromptLookupDrafter(target, method.ngram, method.length))
