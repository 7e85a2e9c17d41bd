"""An n-gram model as causal proxy: counts of token sequences, smoothed so that everything stays possible.

p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)), T(h) the number of different tokens seen behind h and h' one
token less: Witten and Bell's interpolation (IEEE Trans. Inf. Theory 37, 1991); below the unigrams, every token alike.

Shape letters: G n-grams of one order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Gram = tuple[int, ...]


class NGram:
    """Counts by n-gram, of every length up to ``order``, over ``vocabulary`` tokens; see :func:`fit`."""

    def __init__(self, order: int, vocabulary: int, counts: dict[Gram, int]) -> None:
        if order < 1 or vocabulary < 1:
            raise ValueError(f"order and vocabulary must be at least 1, got {order} and {vocabulary}")
        self.order, self.vocabulary = order, vocabulary
        self.behind: dict[Gram, dict[int, int]] = {}  # c(h w) by h and w
        for gram, count in counts.items():
            self.behind.setdefault(gram[:-1], {})[gram[-1]] = count
        self.totals = {context: sum(found.values()) for context, found in self.behind.items()}  # c(h)
        seen = self.behind.get((), {})
        share, back = self._shares(()) if seen else (0.0, 1.0)
        self.unseen = back * (1 / vocabulary)  # p of a token that no text has
        self.unigrams = {token: count * share + self.unseen for token, count in seen.items()}

    @property
    def counts(self) -> dict[Gram, int]:
        """Counts by n-gram."""
        return {(*context, token): n for context, found in self.behind.items() for token, n in found.items()}

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Natural log-probabilities of each of ``tokens`` behind ``context``, of which the last tokens are read."""
        read = tuple(context[max(len(context) - self.order + 1, 0) :])
        found = [self.unigrams.get(token, self.unseen) for token in tokens]
        for start in range(len(read) - 1, -1, -1):
            known = self.behind.get(read[start:])
            if known is None:
                break  # nor was anything longer seen
            (share, back), seen = self._shares(read[start:]), known.get
            found = [seen(token, 0) * share + back * less for token, less in zip(tokens, found, strict=True)]
        return [math.log(p) for p in found]

    def _shares(self, context: Gram) -> tuple[float, float]:
        """What one count behind ``context`` weighs, and what the shorter context does."""
        different = len(self.behind[context])
        share = 1 / (self.totals[context] + different)
        return share, share * different

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
                raise ValueError(f"{file} must hold an n-gram model, got a file without order and vocabulary")
            order, counts = int(facts["order"]), dict[Gram, int]()
            for n in range(1, order + 1):
                grams, seen = (opened.get_tensor(f"{name}.{n}").tolist() for name in ("grams", "counts"))
                counts.update(zip(map(tuple, grams), seen, strict=True))
        return cls(order, int(facts["vocabulary"]), counts)


def _small(numbers: Tensor) -> Tensor:
    """``numbers`` in the narrowest dtype that holds them."""
    most = int(numbers.max()) if numbers.numel() else 0
    return numbers.to(next(d for d in (torch.int16, torch.int32, torch.int64) if most <= torch.iinfo(d).max))


def fit(texts: Iterable[Sequence[int]], vocabulary: int, order: int = 3, least: int = 1) -> NGram:
    """The model of order ``order`` of ``texts`` (token ids below ``vocabulary``).

    N-grams of two and more tokens seen fewer than ``least`` times are dropped, for size. Raises ``ValueError`` for a
    token that is none and for sizes below 1.
    """
    counts: Counter[Gram] = Counter()
    for text in texts:
        ids = list(text)
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"tokens must be in [0, {vocabulary}), got {min(ids)} to {max(ids)}")
        for n in range(1, order + 1):
            counts.update(zip(*(ids[i:] for i in range(n)), strict=False))
    return NGram(order, vocabulary, {g: c for g, c in counts.items() if len(g) == 1 or c >= least})
