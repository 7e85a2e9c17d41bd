"""An n-gram model as causal proxy: counts of token sequences, smoothed so that everything stays
possible.

p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)), T(h) the number of different tokens seen after
h and h' one token less: Witten and Bell's interpolation (IEEE Trans. Inf. Theory 37, 1991); below
the unigrams, every token alike.

Shape letters: G n-grams of one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Gram = tuple[int, ...]


class Behind(NamedTuple):
    """What was seen after a context: the tokens' natural log-probabilities, and what others lose
    against theirs after the shorter context (a logarithm, too).
    """

    logs: dict[int, float]
    less: float


class NGram:
    """Counts by n-gram, of every length up to ``order``, over ``vocabulary`` tokens; see
    :func:`fit`.

    Every n-gram's logarithm is taken beforehand: a path search asks for tens of thousands a second.
    """

    def __init__(self, order: int, vocabulary: int, counts: dict[Gram, int]) -> None:
        if order < 1 or vocabulary < 1:
            raise ValueError(
                f"order and vocabulary must be at least 1, got {order} and {vocabulary}"
            )
        self.order, self.vocabulary, self.counts = order, vocabulary, counts
        self.alone, self.unseen = (
            dict[int, float](),
            -log(vocabulary),
        )  # after nothing: of tokens seen, of any other
        self.behind: dict[Gram, Behind] = {}
        seen: dict[Gram, dict[int, int]] = {}
        for gram, count in counts.items():
            seen.setdefault(gram[:-1], {})[gram[-1]] = count
        for context in sorted(seen, key=len):
            self.behind[context] = self._interpolated(context, seen[context])
            if not context:
                logs, less = self.behind[context]
                self.alone, self.unseen = logs, less + self.unseen

    def _interpolated(self, context: Gram, counts: dict[int, int]) -> Behind:
        """Of ``counts`` by token after ``context``, and of the shorter context."""
        share = 1 / (sum(counts.values()) + len(counts))
        back = share * len(counts)
        shorter = self._behind(context[1:], list(counts), self._behind_nothing(counts))
        found = zip(counts.items(), shorter, strict=True)
        return Behind(
            {token: log(count * share + back * exp(less)) for (token, count), less in found},
            log(back),
        )

    def log_probs(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int]
    ) -> list[list[float]]:
        """Natural log-probabilities of each of ``tokens`` after each of ``contexts``, whose last
        tokens are read.
        """
        alone, count = self._behind_nothing(tokens), self.order - 1
        return [self._behind(tuple(c[-count:]) if count else (), tokens, alone) for c in contexts]

    def _behind_nothing(self, tokens: Iterable[int]) -> list[float]:
        return list(map(self.alone.get, tokens, repeat(self.unseen)))

    def _behind(self, read: Gram, tokens: Sequence[int], found: Iterable[float]) -> list[float]:
        """The log-probabilities of ``tokens`` after ``read``, from those ``found`` after nothing."""
        for start in range(len(read) - 1, -1, -1):
            behind = self.behind.get(read[start:])
            if behind is None:
                break  # nor was anything longer seen
            logs, less = behind
            found = map(logs.get, tokens, [less + shorter for shorter in found])
        return list(found)

    def save(self, file: str | Path) -> None:
        """Write one safetensors file: n-grams [G, n] and counts [G] for each length n."""
        tensors, counts = {}, self.counts
        for n in range(1, self.order + 1):
            grams = sorted(gram for gram in counts if len(gram) == n)
            tensors[f"grams.{n}"] = _small(torch.tensor(grams).view(-1, n))
            tensors[f"counts.{n}"] = _small(torch.tensor([counts[gram] for gram in grams]))
        save_file(tensors, file, {"order": str(self.order), "vocabulary": str(self.vocabulary)})

    @classmethod
    def load(cls, file: str | Path) -> NGram:
        """Read what ``save`` wrote; raises ``ValueError`` for another file."""
        with safe_open(file, "pt") as opened:
            facts = opened.metadata() or {}
            if not facts.keys() >= {"order", "vocabulary"}:
                raise ValueError(
                    f"{file} must hold an n-gram model, got a file without order and vocabulary"
                )
            order, counts = int(facts["order"]), dict[Gram, int]()
            for n in range(1, order + 1):
                grams, seen = (
                    opened.get_tensor(f"{name}.{n}").tolist() for name in ("grams", "counts")
                )
                counts.update(zip(map(tuple, grams), seen, strict=True))
        return cls(order, int(facts["vocabulary"]), counts)


def _small(numbers: Tensor) -> Tensor:
    """``numbers`` in the narrowest dtype that holds them."""
    most = int(numbers.max()) if numbers.numel() else 0
    return numbers.to(
        next(d for d in (torch.int16, torch.int32, torch.int64) if most <= torch.iinfo(d).max)
    )


def fit(texts: Iterable[Sequence[int]], vocabulary: int, order: int = 3, least: int = 1) -> NGram:
    """The model of order ``order`` of ``texts`` (token ids below ``vocabulary``).

    N-grams of two and more tokens seen fewer than ``least`` times are dropped, for size. Raises
    ``ValueError`` for a token that is none and for sizes below 1.
    """
    counts: Counter[Gram] = Counter()
    for text in texts:
        ids = list(text)
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"tokens must be in [0, {vocabulary}), got {min(ids)} to {max(ids)}")
        for n in range(1, order + 1):
            counts.update(zip(*(ids[i:] for i in range(n)), strict=False))
    return NGram(order, vocabulary, {g: c for g, c in counts.items() if len(g) == 1 or c >= least})
