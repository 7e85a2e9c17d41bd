"""Inception Score: how confident and varied a classifier finds pictures (Salimans et al. 2016).

exp of the mean KL(p(c|x) ‖ p(c)), where the marginal p(c) is the samples' own, averaged over
splits. The mean KL is the mean of Σ p ln p less Σ q ln q of the mean q: two float64 sums a split
are sufficient, and grow batch by batch.

Shapes: logits [N, C]; S splits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specmm.metrics.features import Features, Protocol, as_features, joint_protocol, same_width
from specmm.metrics.measurement import Measurement

ROWS = 8192  # samples turned into probabilities at a time


@dataclass
class ScoreStatistics:
    """Each split's ``counts`` [S] int64, sums of p ``total`` [S, C], Σ p ln p ``certainty`` [S]."""

    counts: Tensor
    total: Tensor
    certainty: Tensor
    protocol: Protocol = field(default_factory=dict)

    @classmethod
    def empty(
        cls, classes: int, splits: int = 10, device: torch.device | str = "cpu"
    ) -> ScoreStatistics:
        """No samples; raises ``ValueError`` below two classes or without a split."""
        if classes < 2 or splits < 1:
            got = f"{classes} and {splits}"
            raise ValueError(f"a score needs classes >= 2 and splits >= 1, got {got}")
        counts = torch.zeros(splits, dtype=torch.int64, device=device)
        sums = torch.zeros(splits, classes + 1, dtype=torch.float64, device=device)
        return cls(counts, sums[:, :classes], sums[:, classes])

    def update(self, logits: Features) -> ScoreStatistics:
        """Add logits [N, C] in place, to the splits in turn."""
        samples = as_features(logits)
        same_width(self.total.shape[1], samples.values.shape[1])
        self.protocol = joint_protocol(self.protocol, samples.protocol)
        order = torch.arange(len(samples), device=self.counts.device)
        into = (self.counts.sum() + order) % len(self.counts)
        self.counts += torch.bincount(into, minlength=len(self.counts))
        for rows, where in zip(samples.values.split(ROWS), into.split(ROWS), strict=True):
            logs = rows.to(self.total).log_softmax(1)
            certainty = (logs.exp() * logs).nan_to_num(0.0).sum(1)  # 0 ln 0 = 0
            self.total.index_add_(0, where, logs.exp())
            self.certainty.index_add_(0, where, certainty)
        return self

    def scores(self) -> Tensor:
        """The score [S] of each split; raises ``ValueError`` when one is empty."""
        if not self.counts.all():
            need = f"{len(self.counts)} splits needs as many samples"
            raise ValueError(f"a score over {need}, got {int(self.counts.sum())}; add pictures")
        return _scores(self.counts, self.total, self.certainty)

    def measurement(self) -> Measurement:
        """The mean over splits; ``parts``: their population ``std``, and the ``whole`` set's."""
        scores = self.scores()
        overall = _scores(
            *(s.sum(0, keepdim=True) for s in (self.counts, self.total, self.certainty))
        )
        parts = {"std": float(scores.std(correction=0)), "whole": float(overall)}
        protocol = {**self.protocol, "splits": len(scores), "counts": [int(self.counts.sum())]}
        return Measurement("inception_score", float(scores.mean()), protocol, parts)


def _scores(counts: Tensor, total: Tensor, certainty: Tensor) -> Tensor:
    marginal = total / counts[:, None]
    return (certainty / counts - torch.xlogy(marginal, marginal).sum(1)).exp()


def inception_score(logits: Features, *, splits: int = 10) -> Measurement:
    """Inception Score of logits [N, C] (before the softmax), the mean over ``splits``, among which
    samples are dealt in turn.
    """
    rows = as_features(logits)
    statistics = ScoreStatistics.empty(rows.values.shape[1], splits, rows.values.device)
    return statistics.update(rows).measurement()
