"""When a row of a batch ends before its length: end tokens, looked for at the tokens of one round.

Shape letters: B batch, T room for tokens, E end tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Stop(Protocol):
    """Says where rows end; called once a round, on the device, without waiting for a value where it
    can.
    """

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Counts [B] to commit and whether rows are done [B] bool.

        ``tokens`` [B, T] holds each row's tokens; those from ``before`` [B] to ``after`` [B] are
        this round's.
        """
        ...


class EndTokens:
    """Ends a row after the first of the end tokens ``ids``, which is kept."""

    def __init__(self, ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.ids = torch.tensor(list(ids), dtype=torch.int64, device=device)  # [E]

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Stop`."""
        column = torch.arange(tokens.shape[1], device=tokens.device)
        fresh = (column >= before[:, None]) & (column < after[:, None])
        ends = torch.isin(tokens, self.ids) & fresh
        done = ends.any(1)
        return torch.where(done, ends.int().argmax(1) + 1, after), done


def all_of(*stops: Stop) -> Stop:
    """Ends a row where the first of ``stops`` does."""

    def both(tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        done = torch.zeros_like(after, dtype=torch.bool)
        for stop in stops:
            after, ended = stop(tokens, before, after)
            done = done | ended
        return after, done

    return both
