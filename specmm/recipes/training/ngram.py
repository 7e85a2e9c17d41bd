"""Counting of n-grams: DiffuSpec's causal proxy, fitted in one pass over texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from specmm.diffusion_drafters.ngram import Gram, NGram


def fit(texts: Iterable[Sequence[int]], vocabulary: int, order: int = 3, least: int = 1) -> NGram:
    """The model of order ``order`` of ``texts`` (token ids below ``vocabulary``).

    N-grams of two and more tokens seen fewer than ``least`` times are dropped, for size. Raises
    ``ValueError`` for ids outside the vocabulary and for sizes below 1.
    """
    counts: Counter[Gram] = Counter()
    for text in texts:
        ids = list(text)
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"tokens must be in [0, {vocabulary}), got {min(ids)} to {max(ids)}")
        for n in range(1, order + 1):
            counts.update(zip(*(ids[i:] for i in range(n)), strict=False))
    return NGram(order, vocabulary, {g: c for g, c in counts.items() if len(g) == 1 or c >= least})
