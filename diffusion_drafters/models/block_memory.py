"""A recurrent memory along a block of drafts, for text drafters.

Shape letters: C width, R size of the memory, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.core.derived import Derived

NORM_EPS = 1e-6  # added to an embedding's mean square
TABLE_ROWS = 8192  # embeddings normed at a time


class BlockMemory(nn.Module):
    """A memory of ``size`` R along a block of states of ``width`` C, which makes each draft depend
    on the earlier drafts.

        h_k = silu(token e(x_{k-1}) + place s_k + memory h_{k-1}),   logits_k = head(s_k + out h_k)

    with the block's states s, the target's normed embeddings e and its head: a few small products a
    draft. The products of all tokens are computed once. Source: DSpark's sequential head; the cell
    and its names are our own.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.token = nn.Linear(width, size, bias=False)
        self.place = nn.Linear(width, size)
        self.memory = nn.Linear(size, size, bias=False)
        self.out = nn.Linear(size, width, bias=False)
        self._table: Derived[Tensor] = Derived()

    def read(self, embeddings: Tensor) -> Tensor:
        """The part [..., R] of drafted tokens with the target's ``embeddings`` [..., C]."""
        part: Tensor = self.token(F.rms_norm(embeddings, embeddings.shape[-1:], eps=NORM_EPS))
        return part

    @torch.inference_mode(False)
    @torch.no_grad()
    def table(self, embeddings: Tensor) -> Tensor:
        """``read`` of all tokens [V, R] with ``embeddings`` [V, C]."""
        return self._table.of(
            (embeddings, self.token.weight),
            lambda: torch.cat([self.read(part) for part in embeddings.split(TABLE_ROWS)]),
        )

    def places(self, states: Tensor) -> Tensor:
        """The block's ``states`` [..., C] and their part of the memory, joined [..., C + R]."""
        return torch.cat([states, self.place(states)], dim=-1)

    def forward(self, place: Tensor, token: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """A draft's state [..., C] and the memory [..., R] after it.

        ``place`` [..., C + R] is from :meth:`places`, ``token`` [..., R] from :meth:`read` of the
        previous token, and ``memory`` the memory after that token (None: the block begins).
        """
        states, inner = place.split([self.out.out_features, self.out.in_features], dim=-1)
        inner = inner + token
        memory = F.silu(inner if memory is None else inner + self.memory(memory))
        return states + self.out(memory), memory
