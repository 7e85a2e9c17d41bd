"""A decoding run as it goes: the tokens each row gained, transformers' streamers, and texts that
end a row.

Shape letters: B batch, T room for tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specmm.decode import Progress


def gains(
    steps: Iterator[Progress], streamer: Any = None
) -> Iterator[tuple[Progress, list[Tensor]]]:
    """Each round's progress and the ids every row gained in it, told to ``streamer``, too, if there
    is one.
    """
    before: list[int] = []
    for progress in steps:
        counts = progress.counts.tolist()
        before = before or [0] * len(counts)
        new = [ids[i:n] for ids, i, n in zip(progress.tokens, before, counts, strict=True)]
        if streamer is not None:
            tell(streamer, new)
        yield progress, new
        before = counts


@contextmanager
def ending(streamer: Any) -> Iterator[None]:
    """Tells a ``streamer`` of the end, whatever the end is: somebody may be waiting at it."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def tell(streamer: Any, new: list[Tensor]) -> None:
    """Hand a round's ids to a transformers ``streamer``, which takes one answer only, one id at a
    time.
    """
    if len(new) != 1:
        raise ValueError(
            f"a streamer takes one answer at a time, got {len(new)} questions; use stream() instead"
        )
    for token in new[0].cpu():
        streamer.put(token[None])


def stop_texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One text or several as several; raises ``ValueError`` for an empty one."""
    found = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(found):
        raise ValueError(
            "stop must be texts of one letter at least, got an empty one; leave it out"
        )
    return found


class StopStrings:
    """Ends a row at the token that completes one of ``texts``; a :class:`specmm.decode.Stop`.

    ``decode`` gives the text of a row's ids. Every round reads the whole row: a token may say half
    a letter only.
    """

    def __init__(self, texts: Sequence[str], decode: Callable[[Tensor], str]) -> None:
        self.texts, self.decode = tuple(texts), decode

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`specmm.decode.Stop`."""
        bounds = zip(before.tolist(), after.tolist(), strict=True)
        ends = [self._end(ids, *pair) for ids, pair in zip(tokens, bounds, strict=True)]
        counts = torch.tensor([0 if end is None else end for end in ends], device=after.device)
        done = torch.tensor([end is not None for end in ends], device=after.device)
        return torch.where(done, counts, after), done

    def cut(self, text: str) -> str:
        """``text`` up to the first of the stops."""
        places = [text.find(stop) for stop in self.texts]
        return text[: min((place for place in places if place >= 0), default=len(text))]

    def sure(self, text: str) -> str:
        """What of a growing ``text`` cannot belong to a stop."""
        cut = self.cut(text)
        for stop in self.texts if cut == text else ():
            held = next(
                (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])),
                0,
            )
            cut = min(cut, text[: len(text) - held], key=len)
        return cut

    def _end(self, ids: Tensor, before: int, after: int) -> int | None:
        """The first of the counts above ``before`` up to ``after`` whose text holds a stop."""
        if before < after and not self._stops(ids[:after]):
            return None
        return next((n for n in range(before + 1, after + 1) if self._stops(ids[:n])), None)

    def _stops(self, ids: Tensor) -> bool:
        text = self.decode(ids)
        return any(stop in text for stop in self.texts)
