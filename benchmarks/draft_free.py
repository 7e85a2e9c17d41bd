"""SJD's windows and guesses, coupled and drawn afresh, against plain decoding, in turn by picture.

``python -m benchmarks.draft_free`` writes ``draft_free_speed``; ``python -m benchmarks.run quality
--methods "ar, lantern++, gsd"`` measures the quality of methods without a drafter.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from benchmarks.common import RESULTS, Out, Threads
from benchmarks.settings import Options
from benchmarks.speed import measure_speed
from specmm import methods

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
    pictures: Annotated[int, typer.Option(help="A method.")] = 12,
    out: Out = RESULTS,
    threads: Threads = 1,
) -> None:
    """Time each method in turn."""
    options = Options(
        out=out, methods=TIMED, repeats=pictures, dtype=torch.float32, threads=threads
    )
    measure_speed(options, "draft_free_speed")


if __name__ == "__main__":
    typer.run(main)
