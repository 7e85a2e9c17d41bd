"""Answers and texts as they are written, with accepted drafts set apart.

Shape letters: none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from specmm.app.models import MOST_SECONDS
from specmm.hf.running import RoundText

DRAFT = "accepted draft"
Pieces = list[tuple[str, str | None]]


def written(rounds: Iterator[list[RoundText]]) -> Iterator[tuple[Pieces, str]]:
    """The pieces of one answer after each round, and a line about it. Raises ``ValueError`` when it
    takes too long.
    """
    pieces: Pieces = []
    begin, tokens, count = time.monotonic(), 0, 0
    for (said,) in rounds:
        seconds = time.monotonic() - begin
        if seconds > MOST_SECONDS:
            raise ValueError(
                f"an answer may take {MOST_SECONDS:.0f} seconds, got longer; ask for fewer tokens"
            )
        tokens, count = tokens + said.tokens, count + 1
        pieces += [(text, DRAFT if drafted else None) for text, drafted in said.pieces]
        yield pieces, f"{tokens} tokens in {count} rounds, {seconds:.1f} s"
