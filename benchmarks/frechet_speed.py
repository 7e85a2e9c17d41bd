"""Precomputed features to FID, ours against torchmetrics: ``python -m benchmarks.frechet_speed``.

Every measurement is a separate process, so that its peak memory is its own; the two libraries take
turns. The features, from a file, are fed in batches, or each set at once. Seconds are those of the
library's calls without reading; memory is what the process grew by after its imports and a tiny
distance, with its whole peak beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

LIBRARIES = ("specmm", "torchmetrics")
FEEDS = ("batches", "at once")
BATCH = 1000
MEGABYTE = 2**20
Row = dict[str, Any]


def main() -> None:
    """Measure, print and write the table, or (``--measure``, by itself) one line of it."""
    parser = argparse.ArgumentParser(
        description="precomputed features to FID, ours against torchmetrics"
    )
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument(
        "--measure", nargs=3, metavar=("LIBRARY", "FEED", "FOLDER"), help=argparse.SUPPRESS
    )
    chosen = parser.parse_args()
    if chosen.measure:
        library, feed, folder = chosen.measure
        print(json.dumps(measure(library, feed, Path(folder), chosen.width)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in enumerate(("real", "made")):
            write_features(Path(folder) / name, chosen.count, chosen.width, seed)
        rows = contest(Path(folder), chosen.width, chosen.repeats)
    write_table(rows, chosen)


def write_features(path: Path, count: int, width: int, seed: int) -> None:
    """float32 features like a network's: non-negative, skewed, correlated, decaying spectrum."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=torch.Generator().manual_seed(9))
    mix *= torch.arange(1, width + 1).pow(-0.5)[:, None]
    with path.open("wb") as file:
        for done in range(0, count, BATCH):
            noise = torch.randn(min(BATCH, count - done), width, generator=generator)
            (0.1 * (noise @ mix) + 0.1 * seed).relu().numpy().tofile(file)


def contest(folder: Path, width: int, repeats: int) -> list[Row]:
    """Medians over interleaved processes."""
    found: dict[tuple[str, str], list[Row]] = {}
    for _ in range(repeats):
        for feed in FEEDS:
            for library in LIBRARIES:
                module = [sys.executable, "-m", "benchmarks.frechet_speed", f"--width={width}"]
                call = [*module, "--measure", library, feed, str(folder)]
                done = subprocess.run(call, check=True, capture_output=True, text=True)
                found.setdefault((feed, library), []).append(json.loads(done.stdout))
                print(feed, library, done.stdout.strip(), flush=True)
    return [
        {"features fed": feed, "library": library}
        | {k: float(np.median([r[k] for r in runs])) for k in runs[0]}
        for (feed, library), runs in found.items()
    ]


def measure(library: str, feed: str, folder: Path, width: int) -> Row:
    """Seconds, memory and FID of one library, in this process."""
    make = {"specmm": ours, "torchmetrics": theirs}[library]()
    rehearse(make)
    before = current_memory()
    update, compute = make(width)
    spent = 0.0
    for name in ("real", "made"):
        for rows in read_features(folder / name, width, feed):
            start = time.perf_counter()
            update(name, rows)
            spent += time.perf_counter() - start
            del rows
    start = time.perf_counter()
    value = compute()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    grown = {"peak_over_imports_mb": (peak - before) / MEGABYTE, "peak_mb": peak / MEGABYTE}
    return {
        "update_s": spent,
        "compute_s": seconds,
        "total_s": spent + seconds,
        **grown,
        "fid": value,
    }


def rehearse(make: Callable[[int], Calls]) -> None:
    """A tiny distance, so that the linear algebra is loaded before anything is counted."""
    update, compute = make(256)
    for name in ("real", "made"):
        update(name, torch.randn(600, 256))
    compute()


def read_features(path: Path, width: int, feed: str) -> Iterator[torch.Tensor]:
    """Batches of a set's features [n, F], or all of them."""
    with path.open("rb") as file:
        while len(
            rows := np.fromfile(file, np.float32, BATCH * width if feed == "batches" else -1)
        ):
            yield torch.from_numpy(rows).view(-1, width)
            del rows  # before the next are read


Calls = tuple[Callable[[str, torch.Tensor], Any], Callable[[], float]]  # update one side, compute


def ours() -> Callable[[int], Calls]:
    """Imports ``specmm.metrics``; the result takes the width."""
    from specmm.metrics.frechet import FeatureStatistics, frechet_distance

    def make(width: int) -> Calls:
        found = {name: FeatureStatistics.empty(width) for name in ("real", "made")}
        return lambda name, rows: found[name].update(
            rows
        ), lambda: frechet_distance(*found.values()).value

    return make


def theirs() -> Callable[[int], Calls]:
    """Imports torchmetrics, with a network that passes features on; the result takes the width."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    def make(width: int) -> Calls:
        through = torch.nn.Identity()
        through.num_features = width
        metric = FrechetInceptionDistance(feature=through)
        return lambda name, rows: metric.update(rows, real=name == "real"), lambda: float(
            metric.compute()
        )

    return make


def current_memory() -> int:
    """Bytes this process occupies now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def write_table(rows: list[Row], chosen: argparse.Namespace) -> None:
    """The rows with ratios to torchmetrics', and the facts of the machine."""
    import torchmetrics

    from benchmarks.common import environment, write_results  # heavy: not in the measured processes

    for row in rows:
        base = next(
            r
            for r in rows
            if r["features fed"] == row["features fed"] and r["library"] == "torchmetrics"
        )
        row["total_speedup"] = base["total_s"] / row["total_s"]
        row["compute_speedup"] = base["compute_s"] / row["compute_s"]
        row["memory_ratio"] = row["peak_over_imports_mb"] / base["peak_over_imports_mb"]
        row["fid_relative_error"] = abs(row["fid"] / base["fid"] - 1)
    options = f"--count {chosen.count} --repeats {chosen.repeats}"
    sets = f"two sets of {chosen.count} x {chosen.width} float32"
    facts = environment(
        torchmetrics=torchmetrics.__version__,
        command=f"python -m benchmarks.frechet_speed {options}",
        features=f"{sets}; medians of {chosen.repeats} processes each",
    )
    write_results(chosen.out, "frechet_speed", rows, facts)


if __name__ == "__main__":
    main()
