"""Stores keys and values of texts' beginnings in pages, so that later requests need not read them
again.

Pages form a tree: each holds some tokens after those of its parent. A text takes over the stored
pages of its beginning, and adds its own for later texts. The least recently used pages are dropped
first, and a page never before its descendants.

Shape letters: A arrays (of layers alike), L tokens of a text, P tokens of a page, H heads, D head
width, C width of the states that a drafter reads.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specmm.core.cache import Cache
from specmm.hf.models.target import Context

PAGE = 16  # tokens, P
SLAB = 32  # pages whose memory is allocated at a time


@dataclass
class Page:
    """Keys and values of P tokens, one of ``arrays`` [A, P, H, D] for each array of a cache, and a
    drafter's inputs, if any: ``hidden`` [1, P, C], ``embeddings`` and ``image`` [1, P].
    """

    arrays: Sequence[Tensor]
    hidden: Tensor | None = None
    embeddings: Tensor | None = None
    image: Tensor | None = None
    number: int = field(default=0, init=False)  # by which later pages refer to it

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the page."""
        rest = (self.hidden, self.embeddings, self.image)
        return [*self.arrays, *(x for x in rest if x is not None)]

    @property
    def bytes(self) -> int:
        """Its size."""
        return sum(x.nbytes for x in self.tensors)

    def map(self, change: Callable[[Tensor], Tensor]) -> Page:
        """A page with changed tensors."""
        rest = (self.hidden, self.embeddings, self.image)
        changed = (None if x is None else change(x) for x in rest)
        return Page([change(x) for x in self.arrays], *changed)


@dataclass
class Cut:
    """Cuts pages from a text in ``row`` of a ``cache``. ``context`` holds drafters' inputs for the
    tokens from ``start`` on; pages before that were cut earlier, or have been dropped since.
    """

    cache: Cache
    row: int
    context: Context | None
    start: int = 0

    def page(self, first: int) -> Page | None:
        """The page of the tokens from ``first`` on."""
        if first + PAGE <= self.start:
            return None
        arrays = [array[:, self.row, first : first + PAGE] for array in self.cache.arrays]
        if self.context is None or first < self.start:
            return Page(arrays)
        some = slice(first - self.start, first - self.start + PAGE)
        parts = (self.context.hidden, self.context.embeddings, self.context.image_mask)
        return Page(arrays, *(part[:, some] for part in parts))


def joined(pages: Sequence[Page], drafted: bool) -> tuple[list[Tensor], Context | None]:
    """Keys and values [A, L, H, D] of ``pages``, one for each array of a cache; and a drafter's
    inputs for them, if a network drafts (``drafted``) and all pages have them.
    """
    arrays = [torch.cat(parts, 1) for parts in zip(*(page.arrays for page in pages), strict=True)]
    parts = [(page.hidden, page.embeddings, page.image) for page in pages]
    if not drafted or any(part[0] is None for part in parts):
        return arrays, None
    hidden, embeddings, image = (torch.cat(same, 1) for same in zip(*parts, strict=True))
    lengths = torch.tensor([hidden.shape[1]], device=hidden.device)
    return arrays, Context(hidden, embeddings, lengths, image)


class Slabs:
    """Memory for pages, allocated in large blocks that stay: small allocations that come and go
    between other tensors would fragment it.
    """

    def __init__(self) -> None:
        self.free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def copy(self, x: Tensor) -> Tensor:
        """A copy of ``x``."""
        free = self.free.setdefault((x.shape, x.dtype), [])
        if not free:
            free += x.new_empty(SLAB, *x.shape)
        return free.pop().copy_(x)

    def leave(self, copy: Tensor) -> None:
        """Free ``copy`` for reuse."""
        self.free[copy.shape, copy.dtype].append(copy)


class Prefixes:
    """Pages of texts, of at most ``most`` bytes; 0 keeps none.

    The ``root`` of a text names everything it depends on besides its tokens, such as its pictures.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self.pages: OrderedDict[tuple[Hashable, tuple[int, ...]], Page] = OrderedDict()
        self.slabs = Slabs()
        self.count = 0

    def find(self, root: Hashable, ids: Sequence[int]) -> list[Page]:
        """The pages of the beginning of a text ``ids`` [L]."""
        found = []
        keys = []
        place = root
        for first in range(0, len(ids) - PAGE + 1, PAGE):
            key = (place, tuple(ids[first : first + PAGE]))
            page = self.pages.get(key)
            if page is None:
                break
            keys.append(key)
            found.append(page)
            place = page.number
        self._use(keys)
        return found

    def keep(self, root: Hashable, ids: Sequence[int], make: Callable[[int], Page | None]) -> None:
        """Store copies of the pages of a text ``ids`` [L]; ``make(first)`` returns the page of the
        tokens from ``first`` on, or None if it is not available.
        """
        keys = []
        place = root
        for first in range(0, len(ids) - PAGE + 1 if self.most else 0, PAGE):
            key = (place, tuple(ids[first : first + PAGE]))
            page = self.pages.get(key)
            if page is None:
                made = make(first)
                if made is None:
                    break
                self.count += 1
                page = self.pages[key] = made.map(self.slabs.copy)
                page.number = self.count
                self.bytes += page.bytes
            keys.append(key)
            place = page.number
        self._use(keys)
        while self.bytes > self.most:
            _, page = self.pages.popitem(last=False)
            self.bytes -= page.bytes
            for tensor in page.tensors:
                self.slabs.leave(tensor)

    def _use(self, keys: Sequence[tuple[Hashable, tuple[int, ...]]]) -> None:
        for key in reversed(keys):  # pages after a page must be older than it
            self.pages.move_to_end(key)


def digest_of(vision: Mapping[str, Any]) -> str:
    """A digest of a prompt's inputs besides tokens, such as pictures; empty without any."""
    found = hashlib.blake2b()
    for name, value in sorted(vision.items()):
        found.update(name.encode())
        if isinstance(value, Tensor):
            whole = value.detach().cpu().contiguous()
            found.update(str((whole.dtype, tuple(whole.shape))).encode())
            found.update(whole.flatten().view(torch.uint8).numpy().data)
        else:
            found.update(repr(value).encode())
    return found.hexdigest() if vision else ""
