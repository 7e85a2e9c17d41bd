"""Settings of one image model side by side: seconds, quality, claim.

Seconds a picture are those of whole calls, pixels included; every repeat runs all settings with the
same classes and seeds, one after another, so that drift affects all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.arithmetic import quartiles, speedup
from benchmarks.common import Budget, Row, balanced_labels
from benchmarks.quality import Real
from benchmarks.samples import SampleSet, Setting, draw_samples, weights_key
from specmm.metrics.report import draw_trade
from specmm.runs.race import in_turn


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


def draw_all(
    settings: Sequence[Setting],
    folder: Path,
    model: Path,
    real: Real,
    count: int,
    batch: int,
    budget: Budget,
) -> dict[str, SampleSet]:
    """``count`` samples of every setting below ``folder``, by name; existing ones are kept."""
    made = {}
    for s in settings:
        facts = [s.name, batch, {k: str(v) for k, v in vars(s.pipe.settings).items()}]
        made[s.name] = SampleSet(folder / weights_key(model.rglob("*.safetensors"), facts))
    pairs = [(s, made[s.name]) for s in settings]
    draw_samples(pairs, balanced_labels(real.labels, count), batch, budget)
    return made


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
