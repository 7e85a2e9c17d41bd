"""Reads a GPU's results one round late, so that the host can launch the next round instead of
waiting.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Late:
    """A copy of ``values`` to the host, started when this is made."""

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
        """The numbers; waits for the copy if necessary."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers: list[float] = self.values.flatten().tolist()
        return numbers
