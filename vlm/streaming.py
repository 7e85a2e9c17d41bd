"""A decoding run as it goes: the tokens each row gained, and transformers' streamers.

Shape letters: B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from specmm.decode import Progress


def gains(steps: Iterator[Progress], streamer: Any = None) -> Iterator[tuple[Progress, list[Tensor]]]:
    """Each round's progress and the ids every row gained in it, told to ``streamer``, too, if there is one."""
    before: list[int] = []
    for progress in steps:
        counts = progress.counts.tolist()
        before = before or [0] * len(counts)
        new = [ids[i:n] for ids, i, n in zip(progress.tokens, before, counts, strict=True)]
        if streamer is not None:
            tell(streamer, new)
        yield progress, new
        before = counts
    if streamer is not None:
        streamer.end()


def tell(streamer: Any, new: list[Tensor]) -> None:
    """Hand a round's ids to a transformers ``streamer``, which takes one answer only, one id at a time."""
    if len(new) != 1:
        raise ValueError(f"a streamer takes one answer at a time, got {len(new)} questions; use stream() instead")
    for token in new[0].cpu():
        streamer.put(token[None])
