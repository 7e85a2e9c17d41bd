"""Methods without a drafter beside LANTERN++: tau, total variation, likelihood and seconds.

``python -m benchmarks.draft_free``: what SJD's guesses begin from, GSD's groups and ZipAR's
windows, on samples of the quality benchmark (its seeds, classes and cache). Writes ``draft_free``;
``python -m benchmarks.run quality --methods "ar, lantern++, gsd, zipar"`` adds FID and KID.

``python -m benchmarks.draft_free --speed 12``: SJD's windows and guesses, coupled and drawn afresh,
against plain decoding, interleaved picture by picture. Writes ``draft_free_speed``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
import typer

from benchmarks.common import CACHE, EMOJI, RESULTS, CacheFolder, DataFolder, Out, Threads, parse
from benchmarks.lantern_residual import measure
from benchmarks.settings import Options
from benchmarks.speed import measure_speed
from specmm import methods

METHODS = (
    methods.AR(),
    methods.LanternPP(),
    methods.SJD(),
    *(
        methods.SJD(window=8, init=init, coupled=False)
        for init in ("last", "left", "above", "random")
    ),
    methods.GSD(),
    methods.GSD(k=60),
    methods.GSD(span=30, gap=0.5),
    methods.ZipAR(window=2),
    methods.ZipAR(window=4),
    methods.ZipAR(window=6),
    methods.ZipAR(window=8),
)
TRAINED = methods.Speculative(tree=(1, 1, 1, 1, 1, 1))  # beside them: the block drafter's chain
TIMED = (
    methods.AR(),
    *(
        methods.SJD(window=window, init=init, coupled=coupled)
        for coupled in (True, False)
        for window in (8, 11, 15)
        for init in ("last", "above")
    ),
    methods.SJD(init="left"),
    methods.SJD(rule="block", coupled=False),
    TRAINED,
)


def main(
    samples: Annotated[int, typer.Option(help="A method.")] = 640,
    batch: Annotated[int, typer.Option(help="Pictures drawn together.")] = 64,
    cache: CacheFolder = CACHE,
    data: DataFolder = EMOJI,
    out: Out = RESULTS,
    threads: Threads = 1,
    speed: Annotated[int, typer.Option(help="Pictures to time instead.")] = 0,
    method: Annotated[list[str], typer.Option(help="These alone; may be repeated.")] = [],  # noqa: B006
) -> None:
    """Make what samples are missing, then measure the first of each method."""
    options = Options(samples=samples, batch=batch, cache=cache, data=data, threads=threads)
    if speed:
        timed = replace(options, out=out, methods=TIMED, repeats=speed, dtype=torch.float32)
        measure_speed(timed, "draft_free_speed")
        return
    measure([*map(parse, method)] or METHODS, "draft_free", out, data, options)


if __name__ == "__main__":
    typer.run(main)
