"""VAR and CoDe on a GPU by batch size: eager, and with the whole picture as one captured graph.

``python -m benchmarks.gpu.var --out benchmarks/results``; see README.md here. Without a GPU
captured means eager, which is how it is tested. Writes ``gpu_var.csv`` and ``.json``. Seconds are
of tokens and sums of codes; pixels, the same for all, are in another column.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import Row, load_pipeline
from benchmarks.gpu.batches import measure_batches, parser_of
from benchmarks.gpu.graphs import PictureGraph
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.randomness import Uniforms
from specmm.stats import Clock

MODES = ("eager", "graph")


@dataclass
class Run:
    """Seconds by part and repeat of a mode; the first ``n`` scales are the large model's."""

    mode: str
    n: int
    picture: PictureGraph
    tokens: list[float] = field(default_factory=list)
    pixels: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of a batch's tokens, the median, the warm-up apart."""
        return statistics.median(self.tokens[1:])

    def once(self, labels: Tensor, numbers: Tensor) -> None:
        """Draw one batch and note the seconds."""
        pipe = self.picture.pipe
        clock = Clock(labels.is_cuda)
        draw = self.picture if self.mode == "graph" else self.picture.eager
        with clock("tokens"):
            _, sums = draw(labels, numbers)
        with clock("pixels"):
            pipe.decode(sums)
        self.tokens.append(clock.seconds["tokens"])
        self.pixels.append(clock.seconds["pixels"])


def measure(pipe: VARPipeline, batch: int, options: argparse.Namespace) -> list[Row]:
    """Rows of every mode and N at ``batch``, interleaved; speed-ups over the fastest plain."""
    scales = len(pipe.transformer.config.schedule)
    shares = [scales] + [n for n in options.n if pipe.small is not None and n < scales]
    runs = [
        Run(mode, n, PictureGraph(pipe, n, pipe.target())) for mode in options.modes for n in shares
    ]
    labels = torch.arange(batch, device=pipe.device) % pipe.transformer.config.num_classes
    for repeat in tqdm(
        range(options.repeats + 1), desc=f"batch {batch}", unit="repeat"
    ):  # the first warms up
        generators = [
            torch.Generator(pipe.device).manual_seed(repeat * batch + i) for i in range(batch)
        ]
        numbers = Uniforms(generators).draw(pipe.transformer.config.schedule.length)
        for run in runs:
            run.once(labels, numbers)
    plain = min(run.seconds for run in runs if run.n == scales)
    return [_row(batch, run, scales, plain) for run in runs]


def _row(batch: int, run: Run, scales: int, plain: float) -> Row:
    return {
        "batch": batch,
        "mode": run.mode,
        "method": "ar" if run.n == scales else f"code, N = {run.n}",
        "seconds": run.seconds,
        "pixels": statistics.median(run.pixels[1:]),
        "speedup": plain / run.seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write."""
    options = read_arguments(arguments)
    pipe = load_pipeline(options.model).to("cuda" if torch.cuda.is_available() else "cpu")
    return measure_batches("gpu_var", pipe, options, measure)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = parser_of(
        "benchmarks.gpu.var", "VAR and CoDe on a GPU", "pocket/var", (1, 16, 64), MODES
    )
    parser.add_argument(
        "--n", type=int, nargs="+", default=(5, 3, 0), help="scales the large model draws"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
