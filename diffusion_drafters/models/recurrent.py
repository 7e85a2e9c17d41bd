"""A memory that runs along a block: what binds each draft to those before it, where they are
drafted at once.

    h_k = silu(token e(x_{k-1}) + place s_k + memory h_{k-1}),   logits_k = head(s_k + out h_k)

with the block's states s, the target's normed embeddings e and its head: a few small products a
draft. What tokens say to it is worked out once for all of them. Source: DSpark's sequential head,
by the facts page's description; the cell and its names are our own.

Shape letters: B batch, A blocks, K drafts of a block, C width, R size of the memory, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.hardware import state_of

NORM_EPS = 1e-6  # beside an embedding's mean square
ROWS = 8192  # of the embeddings normed at a time


class Recurrent(nn.Module):
    """A memory of ``size`` R for states of ``width`` C."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.token, self.place = nn.Linear(width, size, bias=False), nn.Linear(width, size)
        self.memory, self.out = (
            nn.Linear(size, size, bias=False),
            nn.Linear(size, width, bias=False),
        )
        self._table, self._of = torch.empty(0), tuple[Any, ...]()

    def read(self, embeddings: Tensor) -> Tensor:
        """What drafted tokens say to the memory, [..., R], from the target's ``embeddings`` [...,
        C] of them.
        """
        found: Tensor = self.token(F.rms_norm(embeddings, embeddings.shape[-1:], eps=NORM_EPS))
        return found

    @torch.inference_mode(False)
    @torch.no_grad()
    def table(self, embeddings: Tensor) -> Tensor:
        """What every token of ``embeddings`` [V, C] says, [V, R]; made anew where they or their
        reader have changed.
        """
        state = state_of(embeddings), state_of(self.token.weight)
        if self._of[:2] != state:
            parts = [self.read(part) for part in embeddings.split(ROWS)]
            self._table, self._of = (
                torch.cat(parts),
                (*state, embeddings),
            )  # held, or its place could be another's
        return self._table

    def places(self, states: Tensor) -> Tensor:
        """The block's ``states`` [..., C] and what they say to the memory, side by side [..., C +
        R].
        """
        return torch.cat([states, self.place(states)], dim=-1)

    def forward(self, place: Tensor, token: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """A draft's state [..., C] and the memory [..., R] after it.

        ``place`` [..., C + R] is of :meth:`places`, ``token`` [..., R] of the draft before by
        :meth:`read`, ``memory`` what came of that draft (None: the block begins).
        """
        states, told = place.split([self.out.out_features, self.out.in_features], dim=-1)
        told = told + token
        memory = F.silu(told if memory is None else told + self.memory(memory))
        return states + self.out(memory), memory

    def along(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """The states [B, A, K, C] after the real tokens before each draft, whose ``embeddings`` are
        [B, A, K, C].
        """
        memory, found = None, []
        for place, token in zip(
            self.places(states).unbind(2), self.read(embeddings).unbind(2), strict=True
        ):
            state, memory = self(place, token, memory)
            found.append(state)
        return torch.stack(found, dim=2)

    @torch.no_grad()
    def start(self) -> None:
        """Begin to learn from nothing: the memory says nothing yet."""
        self.place.bias.zero_()
        self.out.weight.zero_()
