"""Method ``auto`` for answers with pictures: one trial in text and one inside a picture.

A method's speed differs between the two, and the first tokens of an answer do not represent it. So
each method generates a little text, and a little of a picture that begins right after the prompt.
The expected time of a token is the mean of both, weighted by the share of tokens in pictures. The
share comes from earlier answers; before the first, from an answer of as many pictures as fit.

Shape letters: B batch, T tokens of a picture.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specmm import methods
from specmm.choose.contest import MARGIN, PLAIN, Candidate, Record, clock_of
from specmm.hf.answers.choosing import begin_of
from specmm.hf.drafters.drafting import Drafters, Method
from specmm.hf.pictures.interleaved import DRAFTING, Grammar, InterleavedTarget
from specmm.hf.prompts.prompt import VLMPrompt

TOKENS = 32  # tokens of a trial, at most


class Records(NamedTuple):
    """The records of measurements in text and inside a picture."""

    words: Record
    pictures: Record


class DrawnAnswers:
    """Statistics for ``auto`` on a pipeline's answers with pictures: speeds, and token counts."""

    def __init__(self) -> None:
        self.records: dict[Hashable, Records] = {}
        self.tokens = 0
        self.drawn = 0  # tokens in pictures, included in ``tokens``

    def observe(self, answers: Sequence[Tensor], grammar: Grammar) -> None:
        """Count the tokens of ``answers`` [B] of ids."""
        for ids in answers:
            parts = grammar.parts(ids.tolist())
            self.tokens += len(ids)
            self.drawn += sum(len(run) for drawn, run in parts if drawn)

    def share(self, grammar: Grammar, max_new_tokens: int) -> float:
        """The expected share of an answer's tokens that are in pictures."""
        if self.tokens:
            return self.drawn / self.tokens
        fit = max_new_tokens // (grammar.length + 2)
        return fit * grammar.length / max_new_tokens

    def chosen(self, target: InterleavedTarget, prompt: VLMPrompt) -> tuple[Method, str]:
        """The method expected to be fastest after ``prompt``, and why; stores the measurements."""
        key = (len(prompt.lengths), target.processor.greedy, torch.get_num_threads())
        if key not in self.records:
            try:
                self.records[key] = measured(target, prompt)
            except ValueError as error:
                return PLAIN.method, f"no room to try others ({error})"
        share = self.share(target.grammar, prompt.max_new_tokens)
        words, pictures = self.records[key]
        took = {
            method: (1 - share) * words.each(method) + share * pictures.each(method)
            for method in words.samples
            if method in pictures.samples
        }
        gains = {method: took[PLAIN.method] / seconds for method, seconds in took.items()}
        best = max(gains, key=lambda method: gains[method])
        text = ", ".join(f"{methods.label(method)} {gain:.2f}x" for method, gain in gains.items())
        why = f"measured: {text}, {share:.0%} of it in pictures"
        return best if gains[best] > MARGIN else PLAIN.method, why


def measured(target: InterleavedTarget, prompt: VLMPrompt) -> Records:
    """Trials of plain decoding and of drafting methods after ``prompt``, in text and inside a
    picture.

    Raises ``ValueError`` if the model has no room for another token.
    """
    begins = torch.full_like(prompt.lengths, target.grammar.begin)
    begun = dataclasses.replace(prompt.extended(begins), max_new_tokens=prompt.max_new_tokens)
    target.check(begun)
    worded = copy.copy(target)
    worded.grammar = target.grammar.of_words()
    words = _tried(worded, prompt, min(TOKENS, prompt.max_new_tokens))
    return Records(words, _tried(target, begun, min(TOKENS, target.length)))


def _tried(target: InterleavedTarget, prompt: VLMPrompt, length: int) -> Record:
    """Trials of ``length`` tokens each."""
    drafting = [Candidate(methods.make(methods.VQA, name)) for name in DRAFTING]
    record = Record(drafting, now=clock_of(target.device))

    drafters = Drafters(None, target.name, target.model, {})  # none is trained for such answers
    begin = begin_of(drafters, target, prompt, None, length)
    record.choose(begin, length, length, math.inf)
    return record
