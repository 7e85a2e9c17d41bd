"""The metrics as torchmetrics modules (which must be installed): states merge across processes.

Every number comes from the functional core. States stay as precise as the core wants them whatever
``set_dtype`` says, since a FID in float32 is wrong in its third digit. ``update`` takes features
[N, F], or pictures where an extractor was given, and whether they are ``real``; ``measurements()``
gives what ``compute()`` measured.

Shapes: features [N, F]; logits [N, C].
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from specmm.metrics.extractors import Extractor
from specmm.metrics.features import FeatureSet, Protocol, as_features, joint_protocol
from specmm.metrics.frechet import (
    THRESHOLD,
    FeatureStatistics,
    frechet_distance,
    memorisation_distance,
)
from specmm.metrics.inception_score import ScoreStatistics
from specmm.metrics.kernel import kernel_distance
from specmm.metrics.measurement import Measurement
from specmm.metrics.neighbours import density_coverage, precision_recall

SIDES = {True: "real", False: "made"}
Options = dict[str, Any]


class SampleMetric(Metric):
    """What the metrics of sets share: extraction, both protocols, keeping the real side."""

    full_state_update = False
    is_differentiable = False

    def __init__(
        self,
        extractor: Extractor | None = None,
        *,
        reset_real_features: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.extractor = extractor
        self.reset_real_features = reset_real_features
        self._protocols: dict[str, Protocol] = {side: {} for side in SIDES.values()}
        self._found: tuple[Measurement, ...] = ()

    def update(self, samples: Any, real: bool) -> None:
        """Add features [N, F], or pictures for the extractor, to the real or the made side."""
        found = self.extractor.features(samples) if self.extractor else as_features(samples)
        side = SIDES[bool(real)]
        self._protocols[side] = joint_protocol(self._protocols[side], found.protocol)
        self._add(FeatureSet(found.values.to(self.device)), side)

    def compute(self) -> Tensor | dict[str, Tensor]:
        """The value, or where there are several a dictionary of them by name."""
        self._found = self._measure()
        values = {
            m.metric: torch.tensor(m.value, dtype=torch.float64, device=self.device)
            for m in self._found
        }
        return values if len(values) > 1 else next(iter(values.values()))

    def measurements(self) -> tuple[Measurement, ...]:
        """What ``compute`` measured, over all processes, with parts and protocol."""
        self.compute()
        return self._found

    def reset(self) -> None:
        """Forget the samples; the real ones only if ``reset_real_features``."""
        kept = {}
        sides = list(SIDES.values())
        if not self.reset_real_features:
            states = {n: getattr(self, n) for n in self._defaults if n.startswith("real")}
            kept = {n: list(s) if isinstance(s, list) else s for n, s in states.items()}
            sides = ["made"]
        super().reset()  # empties lists in place
        for name, state in kept.items():
            setattr(self, name, state)
        self._protocols |= {side: {} for side in sides}

    def set_dtype(self, dst_type: str | torch.dtype) -> Metric:
        """Nothing: the states keep the precision they need."""
        return self

    @abstractmethod
    def _add(self, found: FeatureSet, side: str) -> None: ...

    @abstractmethod
    def _measure(self) -> tuple[Measurement, ...]: ...


class FrechetDistance(SampleMetric):
    """FID and the like (``frechet_distance``) of ``width`` features, in constant memory."""

    higher_is_better = False

    def __init__(self, *args: Any, width: int = 2048, **options: Any) -> None:
        super().__init__(*args, **options)
        for side in SIDES.values():
            empty = FeatureStatistics.empty(width)
            self.add_state(f"{side}_count", torch.tensor(0), dist_reduce_fx="sum")
            self.add_state(f"{side}_total", empty.total, dist_reduce_fx="sum")
            self.add_state(f"{side}_outer", empty.outer, dist_reduce_fx="sum")

    def _statistics(self, side: str) -> FeatureStatistics:
        count, total, outer = (getattr(self, f"{side}_{n}") for n in ("count", "total", "outer"))
        return FeatureStatistics(int(count), total, outer, self._protocols[side])

    def _add(self, found: FeatureSet, side: str) -> None:
        self._statistics(side).update(found)  # the sums in place
        setattr(self, f"{side}_count", getattr(self, f"{side}_count") + len(found))

    def _measure(self) -> tuple[Measurement, ...]:
        return (frechet_distance(self._statistics("real"), self._statistics("made")),)


class FeatureMetric(SampleMetric):
    """Keeps the features of both sides, which metrics of distances between samples need.

    torchmetrics can join the processes' features only if each of them has seen some of both sides.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for side in SIDES.values():
            self.add_state(f"{side}_features", [], dist_reduce_fx="cat")

    def _add(self, found: FeatureSet, side: str) -> None:
        getattr(self, f"{side}_features").append(found.values)

    def _sets(self) -> tuple[FeatureSet, FeatureSet]:
        """The real and the made side."""
        found = []
        for real, side in SIDES.items():
            parts = getattr(self, f"{side}_features")
            if isinstance(parts, list) and not parts:
                hint = f"call update(samples, real={real})"
                raise ValueError(f"both sides need samples, got no {side} ones; {hint}")
            found.append(FeatureSet(dim_zero_cat(parts), self._protocols[side]))
        return found[0], found[1]


class KernelDistance(FeatureMetric):
    """KID (``kernel_distance``, whose keyword options it takes as ``kernel_options``)."""

    higher_is_better = False

    def __init__(self, *args: Any, kernel_options: Options | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kernel_options = kernel_options or {}

    def _measure(self) -> tuple[Measurement, ...]:
        return (kernel_distance(*self._sets(), **self.kernel_options).measurement(),)


class PrecisionRecall(FeatureMetric):
    """Improved precision and recall (``precision_recall``)."""

    higher_is_better = True

    def __init__(self, *args: Any, k: int = 3, **options: Any) -> None:
        super().__init__(*args, **options)
        self.k = k

    def _measure(self) -> tuple[Measurement, ...]:
        return precision_recall(*self._sets(), k=self.k)


class DensityCoverage(FeatureMetric):
    """Density and coverage (``density_coverage``)."""

    higher_is_better = True

    def __init__(self, *args: Any, k: int = 5, **options: Any) -> None:
        super().__init__(*args, **options)
        self.k = k

    def _measure(self) -> tuple[Measurement, ...]:
        return density_coverage(*self._sets(), k=self.k)


class MemorisationDistance(FeatureMetric):
    """MiFID (``memorisation_distance``); the real side is the training set."""

    higher_is_better = False

    def __init__(self, *args: Any, threshold: float = THRESHOLD, **options: Any) -> None:
        super().__init__(*args, **options)
        self.threshold = threshold

    def _measure(self) -> tuple[Measurement, ...]:
        return (memorisation_distance(*self._sets(), threshold=self.threshold),)


class InceptionScore(SampleMetric):
    """Inception Score of logits of ``classes``; real samples are ignored, memory is constant."""

    higher_is_better = True
    counts: Tensor
    total: Tensor
    certainty: Tensor

    def __init__(self, *args: Any, classes: int = 1008, splits: int = 10, **options: Any) -> None:
        super().__init__(*args, **options)
        empty = ScoreStatistics.empty(classes, splits)
        for name in ("counts", "total", "certainty"):
            self.add_state(name, getattr(empty, name), dist_reduce_fx="sum")

    def update(self, samples: Any, real: bool = False) -> None:
        """Add logits [N, C], or pictures where there is an extractor, unless they are ``real``."""
        if not real:
            super().update(samples, real=False)

    def _statistics(self) -> ScoreStatistics:
        return ScoreStatistics(self.counts, self.total, self.certainty, self._protocols["made"])

    def _add(self, found: FeatureSet, side: str) -> None:
        self._statistics().update(found)  # the sums in place

    def _measure(self) -> tuple[Measurement, ...]:
        return (self._statistics().measurement(),)
