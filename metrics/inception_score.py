"""Inception Score: how confident and how varied a classifier finds the pictures (Salimans et al.
2016, sec. 4).

exp of the mean over samples of KL(p(c|x) ‖ p(c)), where the marginal p(c) is the samples' own,
averaged over splits. Since the mean KL is the mean of Σ p ln p less Σ q ln q of the mean q, two
float64 sums a split are sufficient: they merge across batches and processes, and memory does not
grow with N.

Shapes: logits [N, C]; S splits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specmm.metrics.features import FeatureSet, Protocol, as_features, joint_protocol, same_width
from specmm.metrics.measurement import Measurement

ROWS = 8192  # samples turned into probabilities at a time


@dataclass
class ScoreStatistics:
    """Of each split: ``counts`` [S] int64, sum of probabilities ``total`` [S, C] and of Σ p ln p
    ``certainty`` [S].
    """

    counts: Tensor
    total: Tensor
    certainty: Tensor
    protocol: Protocol = field(default_factory=dict)

    @classmethod
    def empty(
        cls, classes: int, splits: int = 10, device: torch.device | str = "cpu"
    ) -> ScoreStatistics:
        """Statistics of no samples; raises ``ValueError`` unless there are two classes and one
        split at least.
        """
        if classes < 2 or splits < 1:
            raise ValueError(
                f"a score needs classes >= 2 and splits >= 1, got {classes} and {splits}"
            )
        exact = torch.zeros(splits, classes + 1, dtype=torch.float64, device=device)
        return cls(
            torch.zeros(splits, dtype=torch.int64, device=device),
            exact[:, :classes],
            exact[:, classes],
        )

    def update(
        self, logits: FeatureSet | Tensor | np.ndarray, into: Tensor | None = None
    ) -> ScoreStatistics:
        """Add logits [N, C] in place, dealt out to the splits in turn, or as ``into`` [N] says.

        Raises ``ValueError`` on NaN, another number of classes or another protocol.
        """
        found = as_features(logits)
        same_width(self.total.shape[1], found.values.shape[1])
        self.protocol = joint_protocol(self.protocol, found.protocol)
        if into is None:
            into = (int(self.counts.sum()) + torch.arange(len(found))) % len(self.counts)
        into = into.to(self.counts.device)
        self.counts += torch.bincount(into, minlength=len(self.counts))
        for rows, where in zip(found.values.split(ROWS), into.split(ROWS), strict=True):
            logs = rows.to(self.total).log_softmax(1)
            self.total.index_add_(0, where, logs.exp())
            self.certainty.index_add_(
                0, where, (logs.exp() * logs).nan_to_num(0.0).sum(1)
            )  # 0 ln 0 = 0
        return self

    def merge(self, other: ScoreStatistics) -> ScoreStatistics:
        """Statistics of both sets together, split by split, as a new object."""
        same_width(self.total.shape[1], other.total.shape[1])
        protocol = joint_protocol(self.protocol, other.protocol)
        total, certainty = (
            self.total + other.total.to(self.total),
            self.certainty + other.certainty.to(self.certainty),
        )
        return ScoreStatistics(
            self.counts + other.counts.to(self.counts), total, certainty, protocol
        )

    def scores(self) -> Tensor:
        """The score [S] of each split; raises ``ValueError`` when one is empty."""
        if not self.counts.all():
            raise ValueError(
                f"a score over {len(self.counts)} splits needs as many samples, got {int(self.counts.sum())}; "
                "add pictures or make fewer splits"
            )
        marginal = self.total / self.counts[:, None]
        return (self.certainty / self.counts - torch.xlogy(marginal, marginal).sum(1)).exp()

    def whole(self) -> ScoreStatistics:
        """The same samples as one split."""
        sums = (
            self.counts.sum(0, keepdim=True),
            self.total.sum(0, keepdim=True),
            self.certainty.sum(0, keepdim=True),
        )
        return ScoreStatistics(*sums, self.protocol)

    def measurement(self) -> Measurement:
        """The mean over splits; ``parts`` hold their population ``std`` and the score of the
        ``whole`` set.
        """
        scores = self.scores()
        parts = {"std": float(scores.std(correction=0)), "whole": float(self.whole().scores())}
        protocol = {**self.protocol, "splits": len(scores), "counts": [int(self.counts.sum())]}
        return Measurement("inception_score", float(scores.mean()), protocol, parts)


def inception_score(
    logits: FeatureSet | Tensor | np.ndarray, *, splits: int = 10, order: Tensor | None = None
) -> Measurement:
    """Inception Score of classifier ``logits`` [N, C] (before the softmax), the mean over
    ``splits``.

    ``order`` [N] is the permutation whose successive parts are the splits, as the published code
    takes them; without it samples are dealt out in turn. Raises ``ValueError`` for NaN, or fewer
    samples than splits.
    """
    found = as_features(logits)
    into = None
    if order is not None:
        n = len(found)
        edges = torch.arange(1, splits + 1) * n // splits
        into = torch.empty(n, dtype=torch.int64)
        into[order.cpu()] = torch.searchsorted(edges, torch.arange(n), right=True)
    statistics = ScoreStatistics.empty(found.values.shape[1], splits, found.values.device)
    return statistics.update(found, into).measurement()
