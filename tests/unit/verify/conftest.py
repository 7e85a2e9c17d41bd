"""Random target and drafter tables, and the tree shapes every rule is tried on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmm.core.processors import Processor
from specmm.core.tree import TreeShape
from specmm.verify.exhaustive import draws, emitted_probs, sequence_probs, total_variation
from tests.sampling import expected_excess

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
        pairs = [(logits(vocab**d), logits(vocab**d)) for d in range(length)]
        return [process(torch.lerp(uncond, cond, cfg)) for cond, uncond in pairs]

    return make


@pytest.fixture
def drift(tables: TableMaker) -> Callable[..., tuple[float, float]]:
    """How far the texts of a rule are from the target's, and the excess that it says, over all
    drafts of a small tree drawn by a scheme.
    """

    def find(rule: object, scheme: str) -> tuple[float, float]:
        target = tables(7, 4, 3)
        drawn = draws(TreeShape.from_parents([-1, 0, 0, 1, 1]), tables(8, 4, 3), scheme)
        apart = total_variation(emitted_probs(rule, drawn, target), sequence_probs(target, 3))
        return apart, float(expected_excess(rule, drawn, target))

    return find
