"""What one token says of the next, as logits of low rank: what binds the tokens of a block that is
drafted at once.

A block's marginals do not know which tokens were drawn before; adding W2 W1[x] after a token x
costs one small product a draft. Source: DSpark's Markov head, by the facts page's description;
names and sizes are our own.

Shape letters: v tokens of the drafter, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Markov(nn.Module):
    """``rank`` numbers a token, before and after; the last token before stands for all that the
    drafter lacks.
    """

    def __init__(self, tokens: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Embedding(tokens + 1, rank)
        self.after = nn.Linear(rank, tokens, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        """What is added to the logits [..., v] after tokens ``previous`` [...] of the drafter."""
        found: Tensor = self.after(self.before(previous))
        return found

    @torch.no_grad()
    def start(self, spread: float) -> None:
        """Begin to learn from nothing: the pairs say nothing yet."""
        self.before.weight.normal_(0, spread)
        self.after.weight.zero_()
