"""The options of a run, shared by the benchmarks and filled from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.common import CACHE, EMOJI, RESULTS, playable
from benchmarks.contenders import QUALITY, SPEED
from specmm import methods
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline


@dataclass
class Options:
    """``model``, folders, and ``minutes`` for each benchmark; the rest is for the ones named."""

    model: str | Path = "pocket/llamagen"
    out: Path = RESULTS
    cache: Path = CACHE
    data: Path = EMOJI
    minutes: float | None = None
    threads: int = 2
    dtype: torch.dtype | None = None  # the pipeline's own choice for this model on this machine
    methods: Sequence[methods.Method] = ()
    repeats: int = 24  # speed
    compile: bool = False  # speed
    samples: int = 2000  # quality
    batch: int = 64  # quality
    network: str = "inception"  # quality: one of specmm.metrics.extractors
    pictures: int = 48  # acceptance
    budgets: tuple[int, ...] = (8, 16, 26)  # acceptance

    def contenders(
        self, pipe: LlamaGenPipeline, kind: Literal["speed", "quality"]
    ) -> list[methods.Method]:
        """The chosen methods, else those of ``kind``, if the model has a drafter for them."""
        return playable(pipe, self.methods or {"speed": SPEED, "quality": QUALITY}[kind])
