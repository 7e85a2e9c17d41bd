"""Method ``sjd`` for answers with pictures: Jacobi drafts inside pictures, prompt lookup in text.

A row in text drafts, as point masses, the tokens that followed an earlier occurrence of its latest
words; without one, it drafts as speculative Jacobi decoding does. The choice depends only on the
row's committed tokens, so every node still records the distribution it was drawn from.

Shape letters: B batch, W window, N = W + 1 nodes, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specmm import methods
from specmm.core.drafter import Feedback
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree
from specmm.extending.registry import named
from specmm.hf.drafters.drafting import Assembly
from specmm.hf.drafters.prompt_lookup import lookup
from specmm.hf.pictures.interleaved import TEXT, InterleavedTarget
from specmm.verify import Recursive
from specmm.verify.exact import one_hot

JACOBI = "specmm.image_ar.tokens.drafters.jacobi:JacobiDrafter"
NGRAM = 3


class InterleavedDrafter:
    """Chains of ``window`` tokens; raises ``ValueError`` if that is longer than a picture."""

    def __init__(self, target: InterleavedTarget, window: int = 8) -> None:
        self.target = target
        self.jacobi: Any = named(JACOBI)(target, window)
        self.recall = lookup(target, NGRAM)
        self.window = window
        self.max_nodes = window + 1
        self.max_depth = window

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Index the prompts and the first tokens."""
        self.clock = clock
        self.recall.begin(feedback.token)
        self.jacobi.begin(feedback, clock)

    def start_row(self, row: int) -> None:
        self.recall.start_row(row)
        self.jacobi.start_row(row)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Jacobi's chain inside pictures, what followed the latest words in text."""
        tree: DraftTree = self.jacobi.propose(feedback, uniforms)
        with self.clock("draft"):
            self.recall.extend(feedback)
            guesses, known = self._guesses(feedback)
        assert tree.probs is not None, "Jacobi drafts record their distributions"
        tokens = torch.where(known, guesses, tree.tokens)
        probs = torch.where(known[..., None], one_hot(tokens, tree.probs), tree.probs)
        return DraftTree(tokens, tree.shape, probs)

    def _guesses(self, feedback: Feedback) -> tuple[Tensor, Tensor]:
        """Tokens [B, N] looked up for rows in text, and a mask [B, N] of tokens that were found."""
        opened = self.target.grammar.after(self.target.opened, feedback.token).tolist()
        tokens = torch.zeros(len(opened), self.window + 1, dtype=torch.int64)
        known = torch.zeros_like(tokens, dtype=torch.bool)
        for row, (state, recalled) in enumerate(zip(opened, self.recall.rows, strict=True)):
            guess = recalled.guess(self.window) if state == TEXT else []
            tokens[row, 1 : 1 + len(guess)] = torch.tensor(guess, dtype=torch.int64)
            known[row, 1 : 1 + len(guess)] = True
        return tokens.to(feedback.token.device), known.to(feedback.token.device)


def make(method: methods.AnswerSJD, target: object, drafter: object, tokenizer: object) -> Assembly:
    """The parts of method ``sjd``; raises ``ValueError`` for targets that write text alone."""
    if not isinstance(target, InterleavedTarget):
        raise ValueError(
            "method 'sjd' drafts pictures within answers: give draw=True to a model that writes "
            "them, or use prompt-lookup"
        )
    return Assembly(InterleavedDrafter(target, method.window), Recursive())
