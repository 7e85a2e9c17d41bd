"""Prompt lookup: drafts what followed the last occurrence of the latest tokens in the prompt and the answer so far.

Picture placeholders never match and are never drafted. Exact as point masses: any guess is allowed.

Shape letters: B batch, N nodes.
"""

from __future__ import annotations

import torch

from specmm.drafter import Feedback
from specmm.randomness import Uniforms
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape
from specmm.vlm.target import VLMTarget


class Row:
    """One row's tokens and, for each n-gram in them, the place behind its last occurrence that has a follower."""

    def __init__(self, tokens: list[int], ngram: int, banned: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.ngram, self.banned = ngram, banned
        self.places: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        """Append ``tokens``; the n-grams that end before each of them now have a follower."""
        for token in tokens:
            end = len(self.tokens)
            for n in range(1, min(self.ngram, end) + 1):
                self.places[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def guess(self, length: int) -> list[int]:
        """Up to ``length`` tokens that may follow, by the longest n-gram that was there before."""
        for n in range(min(self.ngram, len(self.tokens)), 0, -1):
            latest = tuple(self.tokens[-n:])
            place = self.places.get(latest)
            if place is not None and not self.banned.intersection(latest):
                return self._until_banned(self.tokens[place : place + length])
        return []

    def _until_banned(self, tokens: list[int]) -> list[int]:
        stop = next((i for i, token in enumerate(tokens) if token in self.banned), len(tokens))
        return tokens[:stop]


class PromptLookupDrafter:
    """Chains of up to ``length`` tokens looked up by n-grams of at most ``ngram`` tokens; raises on sizes below 1."""

    def __init__(self, target: VLMTarget, ngram: int = 3, length: int = 8) -> None:
        if ngram < 1 or length < 1:
            raise ValueError(f"ngram and length must be at least 1, got {ngram} and {length}")
        self.target, self.ngram, self.length = target, ngram, length
        self.max_nodes, self.max_depth = length + 1, length
        self.shapes = [TreeShape.chain(n, target.device) for n in range(length + 1)]

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Index the prompts and the first tokens."""
        self.clock = clock
        self.rows = self._rows(self.target)
        self._extend(feedback.token[:, None].tolist(), [1] * len(self.rows))

    def admit(self, row: int) -> None:
        """Index the prompt admitted."""
        [self.rows[row]] = self._rows(self.target.admitted)

    def propose(self, feedback: Feedback, uniforms: Uniforms) -> DraftTree:
        """A chain of each row's guess, filled up with the root's token, which is as good as any.

        All rows' chains are as long as the longest guess; but where dice are thrown, always of full length, for a
        row's dice must not depend on what the others guess.
        """
        with self.clock("draft"):
            if feedback.verdict is not None and feedback.tokens is not None:
                self._extend(feedback.tokens.tolist(), feedback.verdict.kept.tolist())
            guesses = [row.guess(self.length) for row in self.rows]
            longest = max(map(len, guesses)) if self.target.processor.greedy else self.length
            chains = [[row.tokens[-1], *g] for row, g in zip(self.rows, guesses, strict=True)]
            padded = [chain + chain[:1] * (longest + 1 - len(chain)) for chain in chains]
            tokens = torch.tensor(padded, device=feedback.token.device)
        tokens[:, 0] = feedback.token  # a finished row's log stands still
        return DraftTree(tokens, self.shapes[longest])

    def _rows(self, target: VLMTarget) -> list[Row]:
        banned = frozenset(target.image_tokens)
        return [Row(tokens, self.ngram, banned) for tokens in target.prompt.rows()]

    def _extend(self, tokens: list[list[int]], kept: list[int]) -> None:
        for row, new, count in zip(self.rows, tokens, kept, strict=True):
            row.extend(new[:count])
