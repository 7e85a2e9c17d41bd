"""Feature vectors with the protocol that made them, as inputs of the metrics of sets.

The *protocol* describes the measurement (features, weights, resize, precision): numbers of
different protocols are never compared. Shapes: ``values`` [N, F], N samples of F features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Protocol = dict[str, Any]  # JSON values
ROWS = 2048  # samples checked at a time: isfinite makes a copy


@dataclass
class FeatureSet:
    """A floating-point matrix ``values`` [N, F] of finite numbers and its ``protocol``."""

    values: Tensor
    protocol: Protocol = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or not self.values.is_floating_point():
            got = f"{self.values.dtype} {list(self.values.shape)}"
            raise ValueError(f"features must be a floating-point matrix [N, F], got {got}")
        bad = ~torch.cat([rows.isfinite().all(1) for rows in self.values.split(ROWS)])
        if bad.any():
            raise ValueError(
                f"features must be finite, got NaN or inf in {int(bad.sum())} of {len(bad)} rows "
                f"(first: row {int(bad.int().argmax())}); check the pictures or drop these rows"
            )

    def __len__(self) -> int:
        return len(self.values)

    def save(self, path: Path) -> None:
        """Write ``values`` and ``protocol`` to ``path`` (.npz)."""
        values = self.values.float() if self.values.dtype == torch.bfloat16 else self.values
        facts = np.array(json.dumps(self.protocol))
        with path.open("wb") as file:
            np.savez(file, values=values.cpu().numpy(), protocol=facts)

    @classmethod
    def load(cls, path: Path) -> FeatureSet:
        """Read what ``save`` wrote; raises ``ValueError`` for any other file."""
        with np.load(path) as data:
            if not {"values", "protocol"} <= set(data.files):
                raise ValueError(f"{path} must hold 'values' and 'protocol', got {data.files}")
            return cls(torch.from_numpy(data["values"]), json.loads(str(data["protocol"])))


Features = FeatureSet | Tensor | np.ndarray


def as_features(features: Features) -> FeatureSet:
    """A bare matrix [N, F] as a ``FeatureSet`` of unknown protocol; a ``FeatureSet`` unchanged."""
    if isinstance(features, FeatureSet):
        return features
    return FeatureSet(torch.as_tensor(features))


def comparable(first: Features, second: Features) -> tuple[FeatureSet, FeatureSet, Protocol]:
    """Both sets and their common protocol; ``ValueError`` for NaN, other widths or protocols."""
    one = as_features(first)
    two = as_features(second)
    same_width(one.values.shape[1], two.values.shape[1])
    protocol = joint_protocol(one.protocol, two.protocol)
    return one, two, {**protocol, "counts": [len(one), len(two)]}


def joint_protocol(first: Mapping[str, Any], second: Mapping[str, Any]) -> Protocol:
    """Both protocols in one; raises ``ValueError`` naming the first entry that differs."""
    for key in first:
        if key in second and first[key] != second[key]:
            raise ValueError(
                f"both sets must have the same protocol, got {key}={first[key]!r} and "
                f"{second[key]!r}; extract both with the same settings"
            )
    return {**first, **second}


def same_width(first: int, second: int) -> None:
    """Raise ``ValueError`` unless both sets have the same number of features."""
    if first != second:
        raise ValueError(f"both sets must have the same width, got {first} and {second} features")
