"""Pictures that a target draws by plain decoding for its drafter to learn from.

Shape letters: M pictures, T tokens a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

AT_ONCE = 96  # pictures


def draw_all(
    pipe: Any, asked: Sequence[int] | Sequence[str], kept: Path, seed: int, **options: Any
) -> Tensor:
    """Tokens [M, T] of a picture of each of what is ``asked``, classes or prompts, ``kept`` batch
    by batch, so that an interrupted run continues; ``options`` are those of ``pipe``.
    """
    pipe.set_progress_bar_config(disable=True)
    found = []
    for i, first in enumerate(tqdm(range(0, len(asked), AT_ONCE), desc="draw")):
        part = list(asked[first : first + AT_ONCE])
        file = kept / f"{i:04d}-{len(part)}.pt"
        if not file.exists():
            generator = torch.Generator().manual_seed(1_000_003 * seed + i)
            given = dict(generator=generator, batch_size=len(part), output_type="latent")
            made = pipe(part, **given, **options)
            torch.save(made.tokens, file)
        found.append(torch.load(file, weights_only=True))
    return torch.cat(found)
