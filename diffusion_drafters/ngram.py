"""An n-gram model as causal proxy: counts of token sequences, smoothed so that no token has
probability 0.

p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)), where T(h) is the number of different tokens
seen after h, and h' is h without its first token: Witten and Bell's interpolation (IEEE Trans. Inf.
Theory 37, 1991). Unigrams are interpolated with the uniform distribution.

Shape letters: G n-grams of one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from specmm.loading.checkpoints import save_readable

Gram = tuple[int, ...]


class SeenAfter(NamedTuple):
    """After a context: log-probabilities (nats) of the tokens seen there, and ``less`` ≤ 0, which
    is added to the shorter context's log-probabilities of all other tokens.
    """

    logs: dict[int, float]
    less: float


class NGram:
    """Counts by n-gram, of every length up to ``order``, over ``vocabulary`` tokens; made by
    :func:`specmm.recipes.diffusion.fit_proxy`.

    All logarithms are precomputed: a path search needs tens of thousands a second.
    """

    def __init__(self, order: int, vocabulary: int, counts: dict[Gram, int]) -> None:
        if order < 1 or vocabulary < 1:
            raise ValueError(
                f"order and vocabulary must be at least 1, got {order} and {vocabulary}"
            )
        self.order = order
        self.vocabulary = vocabulary
        self.counts = counts
        # Without a context: log-probabilities of the tokens seen, and of any other.
        self.unigrams: dict[int, float] = {}
        self.unseen = -log(vocabulary)
        self.after: dict[Gram, SeenAfter] = {}
        seen: dict[Gram, dict[int, int]] = {}
        for gram, count in counts.items():
            seen.setdefault(gram[:-1], {})[gram[-1]] = count
        for context in sorted(seen, key=len):
            self.after[context] = self._interpolated(context, seen[context])
            if not context:
                self.unigrams, less = self.after[context]
                self.unseen += less

    def _interpolated(self, context: Gram, counts: dict[int, int]) -> SeenAfter:
        """Interpolate ``counts`` by token after ``context`` with the shorter context."""
        share = 1 / (sum(counts.values()) + len(counts))
        back = share * len(counts)
        shorter = self._log_probs(context[1:], list(counts), self._unigram_logs(counts))
        pairs = zip(counts.items(), shorter, strict=True)
        logs = {token: log(count * share + back * exp(less)) for (token, count), less in pairs}
        return SeenAfter(logs, log(back))

    def log_probs(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int]
    ) -> list[list[float]]:
        """Log-probabilities (nats) of ``tokens`` after the last tokens of each of ``contexts``."""
        unigrams = self._unigram_logs(tokens)
        count = self.order - 1
        reads = (tuple(context[-count:]) if count else () for context in contexts)
        return [self._log_probs(read, tokens, unigrams) for read in reads]

    def _unigram_logs(self, tokens: Iterable[int]) -> list[float]:
        return list(map(self.unigrams.get, tokens, repeat(self.unseen)))

    def _log_probs(self, read: Gram, tokens: Sequence[int], scores: Iterable[float]) -> list[float]:
        """Log-probabilities of ``tokens`` after ``read``; ``scores``: those without context."""
        for start in range(len(read) - 1, -1, -1):
            after = self.after.get(read[start:])
            if after is None:
                break  # nor was anything longer seen
            logs, less = after
            scores = map(logs.get, tokens, [less + shorter for shorter in scores])
        return list(scores)

    def save(self, file: str | Path) -> None:
        """Write one safetensors file: n-grams [G, n] and counts [G] for each length n."""
        tensors = {}
        for n in range(1, self.order + 1):
            grams = sorted(gram for gram in self.counts if len(gram) == n)
            counts = [self.counts[gram] for gram in grams]
            tensors[f"grams.{n}"] = _narrowed(torch.tensor(grams).view(-1, n))
            tensors[f"counts.{n}"] = _narrowed(torch.tensor(counts))
        save_readable(tensors, file, {"order": str(self.order), "vocabulary": str(self.vocabulary)})

    @classmethod
    def load(cls, file: str | Path) -> NGram:
        """Read what ``save`` wrote; raises ``ValueError`` for another file."""
        counts: dict[Gram, int] = {}
        with safe_open(file, "pt") as opened:
            facts = opened.metadata() or {}
            if not facts.keys() >= {"order", "vocabulary"}:
                raise ValueError(
                    f"{file} must hold an n-gram model, got a file without order and vocabulary"
                )
            for n in range(1, int(facts["order"]) + 1):
                grams = map(tuple, opened.get_tensor(f"grams.{n}").tolist())
                counts.update(zip(grams, opened.get_tensor(f"counts.{n}").tolist(), strict=True))
        return cls(int(facts["order"]), int(facts["vocabulary"]), counts)


def _narrowed(numbers: Tensor) -> Tensor:
    """``numbers`` in the narrowest dtype that holds them."""
    most = int(numbers.max()) if numbers.numel() else 0
    dtypes = (torch.int16, torch.int32, torch.int64)
    return numbers.to(next(d for d in dtypes if most <= torch.iinfo(d).max))
