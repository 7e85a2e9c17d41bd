"""FID, KID, likelihood and nearest training pictures of every method's samples of emoji.

Real pictures: the training set. Floor: random disjoint halves of the training set against one
another, at the same number of samples (the held-out set is too small for that). Inception runs in
bfloat16 for all. ``--network efficientnet-lite0`` is a fifteenth of its work, where there is no
time for it; its numbers are its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import (
    Budget,
    Row,
    balanced_labels,
    dtype_name,
    environment,
    label,
    load_pipeline,
    write_results,
)
from benchmarks.samples import SampleSet, Setting, draw_samples
from benchmarks.settings import Options
from recipes import emoji
from specmm.metrics.features import FeatureSet
from specmm.metrics.frechet import FeatureStatistics, frechet_distance
from specmm.metrics.kernel import KernelResult, kernel_distance

GROUPS = 8  # of samples, each left out once
ERRORS = float(student.ppf(0.975, GROUPS - 1))  # standard errors of a 95% interval


class Network(Protocol):
    """What turns pictures into features."""

    def features(self, pictures: Any, *, batch: int = 32, progress: bool = True) -> FeatureSet:
        """Features of pictures [N, R, R, 3] uint8."""
        ...


def measure_quality(options: Options, network: Network | None = None) -> list[Row]:
    """Make the missing samples within the budget, then measure all there are into ``quality``."""
    torch.set_num_threads(options.threads)
    pipe = load_pipeline(options.model, options.dtype)
    real = Real(options, network)
    contenders = options.contenders(pipe, "quality")
    sets = {
        label(m): SampleSet.of(options.cache, pipe, options.model, m, options.batch)
        for m in contenders
    }
    count = -(-options.samples // options.batch) * options.batch  # whole, so that more can follow
    labels = balanced_labels(real.labels, count)
    pairs = [(Setting(label(m), pipe, {"method": m}), sets[label(m)]) for m in contenders]
    draw_samples(pairs, labels, options.batch, Budget(options.minutes), pipe.target())
    facts = environment(
        model=str(options.model),
        dtype=dtype_name(pipe),
        train=len(real.train),
        test=len(real.test),
        settings=pipe.settings.__dict__,
        floor="random disjoint halves of the training pictures",
        network=options.network,
    )
    rows: list[Row] = []
    for name, found in sets.items():
        if found.count() >= 2:
            rows.append({"method": name, **assess(found, sets.get("ar"), real)})
            floor = _floor_row(real, rows)
            write_results(options.out, "quality", [*rows, floor], facts)
    return rows


class Real:
    """The real pictures and their features, which are kept in the cache."""

    def __init__(self, options: Options, network: Network | None = None) -> None:
        self.options = options
        self.given = network
        self.known: dict[tuple[Path, int], tuple[float, KernelResult]] = {}
        train, test = (emoji.load(options.data, split) for split in ("train", "test"))
        self.train = train.images
        self.labels = train.labels
        self.test = test.images

    @cached_property
    def network(self) -> Network:
        """Loaded only when there is something to measure."""
        from specmm.metrics.extractors import extractor

        usual = self.options.network == Options.network
        dtype = torch.bfloat16 if usual else torch.float32
        return self.given or extractor(self.options.network, dtype=dtype)

    @property
    def kept(self) -> str:
        """The folder of features in that of pictures."""
        usual = self.options.network == Options.network
        return "features" if usual else f"features-{self.options.network}"

    @cached_property
    def features(self) -> FeatureSet:
        """Of the training pictures."""
        return cached_features(self.network, self.train, self.options.cache / self.kept)

    @cached_property
    def statistics(self) -> FeatureStatistics:
        """Of the training pictures."""
        return FeatureStatistics.of(self.features)

    @cached_property
    def test_distance(self) -> float:
        """Median pixel distance of a held-out picture to the nearest training picture."""
        return float(nearest(self.test, self.train).median())

    def distances(self, found: SampleSet, count: int) -> tuple[float, KernelResult]:
        """FID and KID of the first ``count`` samples against the training pictures, cached."""
        key = (found.folder, count)
        if key not in self.known:
            features = self.features_of(found, count)
            fid = frechet_distance(features, self.statistics).value
            self.known[key] = fid, kernel_distance(features, self.features)
        return self.known[key]

    def features_of(self, found: SampleSet, count: int) -> FeatureSet:
        """Of the first ``count`` samples, cached."""
        (images,) = found.arrays("images", limit=count)
        return cached_features(self.network, images, found.folder / self.kept)

    def without(self, found: SampleSet, count: int, group: int) -> float:
        """FID of the first ``count`` samples but those of a ``group``, every :data:`GROUPS`-th."""
        features = self.features_of(found, count)
        kept = features.values[torch.arange(count) % GROUPS != group]
        return frechet_distance(FeatureSet(kept, features.protocol), self.statistics).value

    def floor(self, count: int, draws: int = 3) -> tuple[int, float, float]:
        """Count used, mean FID and mean KID between random halves, the first cut to ``count``."""
        half = len(self.train) // 2
        fid = []
        kid = []
        count = min(count, half)
        for seed in range(draws):
            order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
            halves = (order[:count], order[half:])
            a, b = (
                FeatureSet(self.features.values[rows], self.features.protocol) for rows in halves
            )
            fid.append(frechet_distance(a, b).value)
            kid.append(kernel_distance(a, b, subsets=1, subset_size=2).full or 0.0)
        return count, float(np.mean(fid)), float(np.mean(kid))


def cached_features(
    network: Network, pictures: np.ndarray, folder: Path, block: int = 256
) -> FeatureSet:
    """Features of ``pictures`` [N, R, R, 3], cached in ``folder`` in blocks by their hash."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[FeatureSet] = []
    for first in tqdm(range(0, len(pictures), block), desc="features", unit="block", leave=False):
        part = np.ascontiguousarray(pictures[first : first + block])
        file = folder / f"{hashlib.sha256(part.tobytes()).hexdigest()[:20]}.npz"
        if not file.exists():
            network.features(part, progress=False).save(file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
        found.append(FeatureSet.load(file))
    return FeatureSet(torch.cat([f.values for f in found]), found[0].protocol)


def assess(found: SampleSet, plain: SampleSet | None, real: Real) -> Row:
    """All measures of a method's samples; FID and KID also over plain decoding's at equal count."""
    count = found.count()
    fid, kid = real.distances(found, count)
    row: Row = {
        "samples": count,
        "fid": fid,
        "kid": kid.full,
        "kid_subsets": kid.mean,
        "kid_std": kid.std,
    }
    if plain is not None and (equal := min(count, plain.count())) >= 2:
        (fid, kid), (plain_fid, plain_kid) = (
            real.distances(found, equal),
            real.distances(plain, equal),
        )
        low, high = fid_interval(found, plain, equal, fid / plain_fid, real)
        row |= {
            "compared_at": equal,
            "fid_ratio": fid / plain_fid,
            "fid_ratio_low": low,
            "fid_ratio_high": high,
            "kid_ratio": (kid.full or 0) / (plain_kid.full or 1),
        }
    (loglik,) = found.arrays("log_likelihood")
    counts = found.counts()
    row |= {
        "log_likelihood": float(loglik.mean()),
        "tau": sum((i + 1) * n for i, n in enumerate(counts["kept"])) / max(counts["rounds"], 1),
    }
    row |= {"tv": counts["tv"], "certificate": counts["certificate"], "seconds": counts["seconds"]}
    return row | _memorised(found.arrays("images")[0], real)


def fid_interval(
    found: SampleSet, plain: SampleSet, count: int, ratio: float, real: Real
) -> tuple[float, float]:
    """The 95% interval of a ``ratio`` of FIDs at ``count`` samples, whose classes and seeds are the
    same: a jackknife of its logarithm over groups of samples.

    The ratio itself where there are too few samples for groups.
    """
    if found == plain or count < 3 * GROUPS:
        return ratio, ratio
    groups = range(GROUPS)
    logs = np.log([real.without(found, count, g) / real.without(plain, count, g) for g in groups])
    error = float(np.sqrt((GROUPS - 1) * logs.var()))
    return float(ratio * np.exp(-ERRORS * error)), float(ratio * np.exp(ERRORS * error))


def nearest(pictures: np.ndarray, known: np.ndarray) -> Tensor:
    """The root mean square [N] of the differences of pixels in [0, 1] to the nearest of ``known``.

    Both are uint8, [N, R, R, 3] and [M, R, R, 3].
    """
    x, y = (torch.as_tensor(some).flatten(1).float() / 255 for some in (pictures, known))
    return torch.cat([torch.cdist(rows, y).amin(1) for rows in x.split(1024)]) / y.shape[1] ** 0.5


def _memorised(images: np.ndarray, real: Real) -> Row:
    distances = nearest(images, real.train)
    return {
        "nearest_train": float(distances.median()),
        "nearest_train_of_test": real.test_distance,
        "closer_than_test": float((distances < real.test_distance).double().mean()),
    }


def _floor_row(real: Real, rows: Sequence[Row]) -> Row:
    count, fid, kid = real.floor(max(r["samples"] for r in rows))
    return {"method": "real against real", "samples": count, "fid": fid, "kid": kid}
