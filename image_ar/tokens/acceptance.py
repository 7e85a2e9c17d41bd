"""How often the block drafter's child of a level and rank is the one kept: what ``auto`` plans
trees from.
"""

from __future__ import annotations

from collections.abc import Sequence

from specmm.autotune import WIDEST, AcceptanceCounter
from specmm.decode import decode
from specmm.image_ar.tokens.drafters.block import BlockDrafter, BlockHead
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.randomness import Uniforms
from specmm.shape.trees import spine
from specmm.verify import Recursive


def measure_acceptance(
    head: BlockHead, target: LlamaGenTarget, prompt: Prompt, seeds: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    """Acceptance by level and rank over one batch of pictures, one seed each, under exact decoding."""
    shape = spine(WIDEST[: head.config.levels])
    counter = AcceptanceCounter(BlockDrafter(head, target, shape), shape)
    for _ in decode(
        target, counter, Recursive(), prompt, target.length, Uniforms.from_seeds(seeds)
    ):
        pass
    return counter.table()
