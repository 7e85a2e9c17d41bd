"""Answers and texts as they are written, with accepted drafts set apart.

Shape letters: none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from specmm.app.models import MOST_SECONDS

DRAFT = "accepted draft"
Pieces = list[tuple[str, str | None]]


def written(rounds: Iterator[list[str]], tokenizer: Any) -> Iterator[tuple[Pieces, str]]:
    """The pieces of one answer after each round, and a line about it. Raises ``ValueError`` when it takes too long.

    A round ends with a token of the target's own; what comes before it in the round was drafted and accepted.
    """
    pieces: Pieces = []
    begin, tokens, count = time.monotonic(), 0, 0
    for (text,) in rounds:
        seconds = time.monotonic() - begin
        if seconds > MOST_SECONDS:
            raise ValueError(f"an answer may take {MOST_SECONDS:.0f} seconds, got longer; ask for fewer tokens")
        if not text:
            continue
        drafted, own, gained = parted(text, tokenizer)
        tokens, count = tokens + gained, count + 1
        pieces += [(drafted, DRAFT)] if drafted else []
        pieces += [(own, None)] if own else []
        yield pieces, f"{tokens} tokens in {count} rounds, {seconds:.1f} s"


def parted(text: str, tokenizer: Any) -> tuple[str, str, int]:
    """A round's text as accepted drafts and the target's own token, and the number of tokens.

    The text is encoded anew, which may part it elsewhere than it was written; it is for the eye only.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    own = str(tokenizer.decode(ids[-1:])) if ids else ""
    if len(ids) < 2 or not text.endswith(own):
        return "", text, max(len(ids), 1)
    return text[: len(text) - len(own)], own, len(ids)
