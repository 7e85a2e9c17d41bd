"""What a device has computed, read on the host a round later: waiting for it would leave a GPU idle
until the host has told it the next round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specmm.processors import handed_over, not_finite


class Late:
    """``values``, on their way to the host since this was made."""

    def __init__(self, values: Tensor) -> None:
        self.arrived: torch.cuda.Event | None = None
        if not values.is_cuda:
            self.values = values.clone()  # as a copy from a device: of now
            return
        self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self.values.copy_(values, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        """The numbers, waited for if need be."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[float] = self.values.flatten().tolist()
        return found


class LateChecks:
    """Whether what rounds computed is finite (:func:`specmm.processors.check_finite`).

    ``late``: known at the end of the round after; else at once, as without this.
    """

    def __init__(self, late: bool) -> None:
        self.late = late
        self.latest: list[tuple[Late, str]] = []
        self.before: list[tuple[Late, str]] = []

    @contextmanager
    def of_a_round(self) -> Iterator[None]:
        """What is checked within the block is kept for later."""
        if not self.late:
            yield
            return
        with handed_over(self._keep):
            yield

    def _keep(self, total: Tensor, origin: str) -> None:
        if not (total.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.latest.append((Late(total), origin))

    def end_round(self) -> None:
        """Raise ``ValueError`` for what the round before found."""
        for total, origin in self.before:
            if not math.isfinite(total.read()[0]):
                raise not_finite(origin)
        self.before = self.latest
        self.latest = []

    def settle(self) -> None:
        """Raise ``ValueError`` for what any round found; waits for the last one."""
        self.end_round()
        self.end_round()
