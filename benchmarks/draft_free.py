"""Methods without a drafter beside LANTERN++: tau, total variation, likelihood and seconds.

``python -m benchmarks.draft_free``: what SJD's guesses begin from, GSD's groups and ZipAR's
windows, on samples of the quality benchmark (its seeds, classes and cache). Writes ``draft_free``;
``python -m benchmarks.run quality --methods "ar, lantern++, gsd, zipar"`` adds FID and KID.
"""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.common import CACHE, EMOJI, RESULTS, CacheFolder, DataFolder, Out, Threads
from benchmarks.lantern_residual import measure
from benchmarks.settings import Options
from specmm import methods

METHODS = (
    methods.AR(),
    methods.LanternPP(),
    methods.SJD(),
    methods.SJD(init="left"),
    methods.SJD(init="above"),
    methods.SJD(init="random"),
    methods.GSD(),
    methods.GSD(k=60),
    methods.GSD(span=30, gap=0.5),
    methods.ZipAR(window=2),
    methods.ZipAR(window=4),
    methods.ZipAR(window=6),
    methods.ZipAR(window=8),
)


def main(
    samples: Annotated[int, typer.Option(help="A method.")] = 640,
    batch: Annotated[int, typer.Option(help="Pictures drawn together.")] = 64,
    cache: CacheFolder = CACHE,
    data: DataFolder = EMOJI,
    out: Out = RESULTS,
    threads: Threads = 1,
) -> None:
    """Make what samples are missing, then measure the first of each method."""
    options = Options(samples=samples, batch=batch, cache=cache, data=data, threads=threads)
    measure(METHODS, "draft_free", out, data, options)


if __name__ == "__main__":
    typer.run(main)
