"""Decodes the ids that continue a prompt to text, and ends it at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

Ids: TypeAlias = Tensor | list[int]
TRIED = 64  # tokens of which one begins with a blank, where decoders drop that
PARTIAL = "\ufffd"  # stands for the bytes of a character that is not whole yet


@dataclass
class Continuations:
    """Decodes ids with a ``tokenizer`` as the continuation of a prompt.

    Some decoders (Llama's) drop a text's leading blank.
    """

    tokenizer: Any
    _anchor: list[int] = field(init=False, repr=False)  # ids after which that blank stays

    def __post_init__(self) -> None:
        size = len(self.tokenizer)
        tried = (*range(size // 2, size), *range(size // 2))[:TRIED]
        texts = ((i, self.decode([i])) for i in tried)
        dropping = (i for i, text in texts if self.decode([i] * 2) == f"{text} {text}")
        self._anchor = list(islice(dropping, 1))

    def decode(self, ids: Ids, skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` alone, without an incomplete last character."""
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return str(text).rstrip(PARTIAL)

    def behind(self, ids: Ids, skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` as a continuation."""
        if not self._anchor:
            return self.decode(ids, skip_special_tokens)
        listed = ids.tolist() if isinstance(ids, Tensor) else ids
        text = self.decode([*self._anchor, *listed], skip_special_tokens)
        return text[len(self.decode(self._anchor)) :]

    def whole(self, ids: Ids) -> str:
        """The text of ``ids`` as a continuation, with special tokens."""
        return self.behind(ids, skip_special_tokens=False)

    @cached_property
    def tidied(self) -> bool:
        """Whether further tokens may remove blanks from a text, as before a full stop."""
        return bool(getattr(self.tokenizer, "clean_up_tokenization_spaces", False))


class StopStrings:
    """Ends a row at the token that completes one of ``texts``; a :class:`specmm.core.decode.Stop`.

    Stop strings are searched in the ``whole`` text of a row's ids, special tokens included; users
    see the ``shown`` text without special tokens. Every round decodes the whole row, because a
    token may be half a character. If texts are ``tidied``, a word is shown once it is known to have
    ended.
    """

    def __init__(
        self,
        texts: Sequence[str],
        whole: Callable[[Ids], str],
        shown: Callable[[Ids], str],
        tidied: bool = False,
    ) -> None:
        self.texts = tuple(texts)
        self.whole = whole
        self.shown = shown
        self.tidied = tidied

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        bounds = zip(before.tolist(), after.tolist(), strict=True)
        ends = [self._end(ids, *pair) for ids, pair in zip(tokens, bounds, strict=True)]
        counts = torch.tensor([0 if end is None else end for end in ends], device=after.device)
        done = torch.tensor([end is not None for end in ends], device=after.device)
        return torch.where(done, counts, after), done

    def cut(self, ids: Ids) -> str:
        """The text of ``ids`` as shown to users, up to the first stop string."""
        if not self.texts:
            return self.shown(ids)
        text = self.whole(ids)
        return self._shown_of(ids, text, self._place(text))

    def sure(self, ids: Ids) -> str:
        """The part of an unfinished row's text that cannot change or be part of a stop string."""
        if not self.texts:
            part = self.shown(ids)
        else:
            text = self.whole(ids)
            end = self._place(text)
            if end == len(text):
                for stop in self.texts:  # letters at the end that may begin one
                    sizes = range(1, min(len(stop), len(text) + 1))
                    begun = (len(text) - n for n in sizes if text.endswith(stop[:n]))
                    end = min([end, *begun])
            part = self._shown_of(ids, text, end)
        if self.tidied and part and not part[-1].isspace():
            return part[: max(part.rfind(" "), 0)]
        return part.rstrip() if self.tidied else part

    def _place(self, text: str) -> int:
        """Index of the first stop string in ``text``, else the text's length."""
        indices = [text.find(stop) for stop in self.texts]
        return min((index for index in indices if index >= 0), default=len(text))

    def _shown_of(self, ids: Ids, text: str, end: int) -> str:
        """The shown part of the first ``end`` characters of ``text``, which decodes ``ids``."""
        if end >= len(text):
            return self.shown(ids)
        count = len(ids) - 1
        while len(self.whole(ids[:count])) > end:
            count -= 1
        text_before = self.shown(ids[:count])
        if self.shown(ids[: count + 1]) == text_before:  # later ids show nothing
            return text_before
        return text_before + text[len(self.whole(ids[:count])) : end]

    def _end(self, ids: Tensor, before: int, after: int) -> int | None:
        """The first count in (``before``, ``after``] at which the text of ``ids`` has a stop."""
        if before < after and not self.stopped(ids[:after]):
            return None
        return next((n for n in range(before + 1, after + 1) if self.stopped(ids[:n])), None)

    def stopped(self, ids: Ids) -> bool:
        """Whether a row's ``ids`` hold one of the texts."""
        text = self.whole(ids)
        return any(stop in text for stop in self.texts)
