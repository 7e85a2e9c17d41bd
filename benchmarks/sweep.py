"""Settings of one image model side by side: seconds, quality, claim.

Seconds a picture are those of whole calls, pixels included; every repeat runs all settings with the
same classes and seeds, one after another, so that drift affects all alike.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.arithmetic import quartiles, speedup
from benchmarks.common import Budget, Row, balanced_labels, generators
from benchmarks.quality import Real
from benchmarks.samples import SampleSet, save, weights_key
from specmm.core.stats import Certificate, Stats, total
from specmm.image_ar.shared import ImageOutput
from specmm.metrics.report import draw_trade
from specmm.runs.race import in_turn


@dataclass
class Setting:
    """A line of a table: ``pipe`` called with the options ``call``, and its timed runs so far."""

    name: str
    pipe: Any
    call: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # a picture
    stats: list[Stats] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    certificates: list[Certificate] = field(default_factory=list)

    def draw(self, classes: Sequence[int], seeds: Sequence[int]) -> ImageOutput:
        """Pictures of ``classes``, all in one batch."""
        options: dict[str, Any] = dict(batch_size=len(classes), output_type="uint8")
        return self.pipe(classes=list(classes), generator=generators(seeds), **options, **self.call)

    def once(self, classes: Sequence[int], seeds: Sequence[int]) -> None:
        """Draw a batch and record its seconds."""
        start = time.perf_counter()
        out = self.draw(classes, seeds)
        self.seconds.append((time.perf_counter() - start) / len(classes))
        self.stats.append(out.stats)
        self.tokens.append(out.tokens)
        self.certificates.append(out.certificate)

    @property
    def total(self) -> Any:
        """The counts of all timed runs, of the family's own kind."""
        return total(self.stats)


def time_settings(
    settings: Sequence[Setting], classes: int, batch: int, repeats: int, budget: Budget
) -> None:
    """Run every setting ``repeats`` times on ``batch`` pictures, taking turns, in ``budget``."""
    for setting in settings:  # warm-up: tables, plans
        setting.draw([0] * batch, range(10**6, 10**6 + batch))
    for repeat in tqdm(range(repeats), desc=f"timing, batch {batch}", unit="repeat"):
        if budget.spent and repeat:
            return
        chosen = torch.randint(
            classes, (batch,), generator=torch.Generator().manual_seed(repeat)
        ).tolist()
        for setting in in_turn(settings, repeat):
            setting.once(chosen, range(repeat * batch, (repeat + 1) * batch))


def timing(setting: Setting, plain: Setting) -> Row:
    """Speed of ``setting`` against ``plain`` and what it may claim."""
    low, high = quartiles(plain.seconds, setting.seconds)
    return {
        "method": setting.name,
        "seconds": statistics.median(setting.seconds),
        "speedup": speedup(plain.seconds, setting.seconds),
        "speedup_low": low,
        "speedup_high": high,
        "repeats": len(setting.seconds),
        "certificate": setting.certificates[-1].kind,
    }


def draw_samples(
    settings: Sequence[Setting],
    folder: Path,
    model: Path,
    real: Real,
    count: int,
    batch: int,
    budget: Budget,
) -> dict[str, SampleSet]:
    """``count`` samples of every setting below ``folder``, in turn; existing ones are kept."""
    made = {}
    for s in settings:
        facts = [s.name, batch, {k: str(v) for k, v in vars(s.pipe.settings).items()}]
        made[s.name] = SampleSet(folder / weights_key(model.rglob("*.safetensors"), facts))
    labels = balanced_labels(real.labels, count)
    with tqdm(total=len(settings) * count, desc="samples", unit="picture") as bar:
        for first in range(0, count, batch):
            for setting in settings:
                if not budget.spent:
                    _batch(setting, made[setting.name], labels[first : first + batch], first)
                bar.update(len(labels[first : first + batch]))
    return made


def _batch(setting: Setting, found: SampleSet, labels: np.ndarray, first: int) -> None:
    if found.file(first).exists():
        return
    out = setting.draw([int(c) for c in labels], range(first, first + len(labels)))
    run = json.dumps(asdict(out.stats) | {"certificate": out.certificate.kind})
    save(found.file(first), images=out.images, labels=labels, run=np.array(run))


def quality(found: SampleSet, plain: SampleSet, real: Real) -> Row:
    """FID and KID of the samples, alone and over plain decoding's at the same number of samples."""
    count = min(found.count(), plain.count())
    if count < 2:
        return {}
    (fid, kid), (plain_fid, plain_kid) = real.distances(found, count), real.distances(plain, count)
    return {
        "samples": count,
        "fid": fid,
        "kid": kid.full,
        "fid_ratio": fid / plain_fid,
        "kid_ratio": (kid.full or 0) / (plain_kid.full or 1),
    }


def on_front(rows: Sequence[Row]) -> list[bool]:
    """Which rows no other beats in both seconds and FID."""
    points = [(r["seconds"], r["fid"]) for r in rows]
    return [not any(s <= a and f <= b and (s, f) != (a, b) for s, f in points) for a, b in points]


def plot(rows: Sequence[Row], real: Real, path: Path) -> None:
    """FID against speed-up of those rows that have both."""
    both = [r for r in rows if "fid" in r]
    if both:
        draw_trade(both, path, real.floor(max(r["samples"] for r in both))[1])
