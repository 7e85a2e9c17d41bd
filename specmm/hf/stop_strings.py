"""Texts that end an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class StopStrings:
    """Ends a row at the token that completes one of ``texts``; a :class:`specmm.decode.Stop`.

    ``decode`` gives the text of a row's ids. Every round reads the whole row: a token may be half
    a letter only.
    """

    def __init__(self, texts: Sequence[str], decode: Callable[[Tensor], str]) -> None:
        self.texts = tuple(texts)
        self.decode = decode

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
        if cut != text:
            return cut
        held = 0  # letters at the end that may begin a stop
        for stop in self.texts:
            sizes = range(1, min(len(stop), len(text) + 1))
            held = max([held, *(n for n in sizes if text.endswith(stop[:n]))])
        return text[: len(text) - held]

    def _end(self, ids: Tensor, before: int, after: int) -> int | None:
        """The first of the counts above ``before`` up to ``after`` whose text holds a stop."""
        if before < after and not self._stops(ids[:after]):
            return None
        return next((n for n in range(before + 1, after + 1) if self._stops(ids[:n])), None)

    def _stops(self, ids: Tensor) -> bool:
        text = self.decode(ids)
        return any(stop in text for stop in self.texts)
