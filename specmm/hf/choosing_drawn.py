"""Method ``auto`` of answers with pictures: a race among words, and another within a picture.

How fast a method is differs between the two, and the first tokens of an answer are no sample of it.
So each method answers a little of the prompt in words alone, and draws a little of a picture that
begins after the prompt. A token then takes the mean of both by the share of tokens in pictures:
that of the answers so far, and before the first that of an answer of as many pictures as fit.

Shape letters: B batch, T tokens of a picture.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specmm import methods
from specmm.decode import Progress, decode, decode_plain
from specmm.hf.choosing import SHARE, TOKENS, fastest, raced
from specmm.hf.drafting import Method, assemble, row_uniforms
from specmm.hf.interleaved import DRAFTING, Grammar, InterleavedTarget
from specmm.hf.prompt import VLMPrompt


class Speeds(NamedTuple):
    """Tokens a second of plain decoding and of every other method."""

    words: list[float]
    pictures: list[float]


class DrawnAnswers:
    """What ``auto`` knows of a pipeline's answers with pictures: speeds, and tokens so far."""

    def __init__(self) -> None:
        self.speeds: dict[Hashable, Speeds] = {}
        self.tokens = 0
        self.drawn = 0  # of the tokens those in pictures

    def observe(self, answers: Sequence[Tensor], grammar: Grammar) -> None:
        """Count the tokens of ``answers`` [B] of ids."""
        for ids in answers:
            parts = grammar.parts(ids.tolist())
            self.tokens += len(ids)
            self.drawn += sum(len(run) for drawn, run in parts if drawn)

    def share(self, grammar: Grammar, max_new_tokens: int) -> float:
        """The part of an answer's tokens that should be in pictures."""
        if self.tokens:
            return self.drawn / self.tokens
        fit = max_new_tokens // (grammar.length + 2)
        return fit * grammar.length / max_new_tokens

    def chosen(self, target: InterleavedTarget, prompt: VLMPrompt) -> tuple[Method, str]:
        """The method that should be fastest here, and why; speeds measured are kept."""
        drafting = [methods.make(methods.VQA, name) for name in DRAFTING]
        key = (len(prompt.lengths), target.processor.greedy, torch.get_num_threads())
        if key not in self.speeds:
            try:
                self.speeds[key] = measured(drafting, target, prompt)
            except ValueError as error:
                return methods.AR(), f"no room to race ({error})"
        words, pictures = self.speeds[key]
        share = self.share(target.grammar, prompt.max_new_tokens)
        pairs = zip(words, pictures, strict=True)
        plain, *others = [(1 - share) / word + share / drawn for word, drawn in pairs]
        gains = dict(zip(drafting, (plain / other for other in others), strict=True))
        made = fastest(gains)
        return made.draft_free or methods.AR(), f"{made.reason}, {share:.0%} of it in pictures"


def measured(drafting: Sequence[Method], target: InterleavedTarget, prompt: VLMPrompt) -> Speeds:
    """Of races of plain decoding and ``drafting`` after ``prompt``, among words and in a picture.

    Raises ``ValueError`` where the model has no room for a token more.
    """
    begins = torch.full_like(prompt.lengths, target.grammar.begin)
    begun = dataclasses.replace(prompt.extended(begins), max_new_tokens=prompt.max_new_tokens)
    target.check(begun)
    worded = copy.copy(target)
    worded.grammar = target.grammar.of_words()
    words = _raced(drafting, worded, prompt, min(TOKENS, prompt.max_new_tokens))
    return Speeds(words, _raced(drafting, target, begun, min(TOKENS, target.length)))


def _raced(
    drafting: Sequence[Method], target: InterleavedTarget, prompt: VLMPrompt, length: int
) -> list[float]:
    """Tokens a second of plain decoding and of ``drafting``, of ``length`` tokens each."""

    def plain() -> Iterator[Progress]:
        return decode_plain(copy.copy(target), prompt, length, row_uniforms(prompt))

    def drafted(method: Method) -> Iterator[Progress]:
        own = copy.copy(target)  # drafters tell their target what they read
        drafter, rule = assemble(method, own)
        return decode(own, drafter, rule, prompt, length, row_uniforms(prompt))

    worth = SHARE / 2 * prompt.max_new_tokens * len(prompt.lengths)
    return raced([plain, *(partial(drafted, method) for method in drafting)], worth=worth)
