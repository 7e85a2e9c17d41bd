"""How many items at a time: found while working, halved when memory runs out.

Shape letters: none.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST, MOST = 4, 256
GAIN = 1.05  # a doubled batch must make this much more a second to be worth its latency


@dataclass
class BatchSizer:
    """The next batch's ``size``: doubled from ``FIRST`` while that pays, or ``fixed``; never above ``ceiling``."""

    fixed: int = 0
    size: int = 0
    ceiling: int = MOST
    rate: float = 0.0  # items a second of the size before
    settled: bool = False

    def __post_init__(self) -> None:
        self.size = self.fixed or FIRST
        self.settled = bool(self.fixed)
        self.warm = False

    def observe(self, items: int, seconds: float) -> None:
        """A batch of ``items`` took ``seconds``; the first one, which loads and compiles, does not count."""
        if self.settled or items < self.size:
            return
        if not self.warm:
            self.warm = True
            return
        rate = items / max(seconds, 1e-9)
        if rate < self.rate * GAIN:
            self.size, self.settled = max(self.size // 2, 1), True
        elif self.size * 2 > self.ceiling:
            self.settled = True
        else:
            self.rate, self.size = rate, self.size * 2

    def shrink(self, items: int) -> None:
        """Memory ran out at ``items``: from now on at most half as many."""
        self.ceiling = self.size = max(items // 2, 1)
        self.settled = True


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on the device or here."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
