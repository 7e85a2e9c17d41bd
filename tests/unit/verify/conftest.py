"""Random target and drafter tables, and the tree shapes every rule is tried on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmm.processors import Processor, guide

TableMaker = Callable[..., list[Tensor]]


@pytest.fixture
def tables() -> TableMaker:
    """Make tables [V**d, V] for d = 0 … length - 1 from random logits: guided, then processed,
    float64.
    """

    def make(
        seed: int, vocab: int, length: int, processor: Processor | None = None, cfg: float = 1.0
    ) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def logits(rows: int) -> Tensor:
            return torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 1.3

        process = processor or Processor()
        return [process(guide(logits(vocab**d), logits(vocab**d), cfg)) for d in range(length)]

    return make
