"""LlamaGen on a GPU: plain, exact and LANTERN++ decoding by batch size and mode.

``python -m benchmarks.gpu.llamagen --out benchmarks/results``; see README.md here. Modes: eager,
captured and compiled forwards. Without a GPU captured means eager, which is how it is tested.
Writes ``gpu_llamagen.csv`` and ``.json``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from benchmarks.common import Row, label, load_pipeline, parse
from benchmarks.gpu.batches import measure_batches, parser_of
from benchmarks.gpu.graphs import GraphTarget
from specmm import methods
from specmm.compiled import CompiledRound, prepare_compiler
from specmm.decode import Play, Progress, decode, decode_plain, one_round
from specmm.drafter import Drafter
from specmm.image_ar.tokens.assemble import assemble
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt, StaticTarget
from specmm.randomness import Uniforms
from specmm.stats import Clock
from specmm.verify import Rule

METHODS = ("ar", "speculative", "lantern++(lambda_=2.0, k=10)")
MODES = ("eager", "graph", "compile")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write."""
    options = read_arguments(arguments)
    pipe = move(load_pipeline(options.model), "cuda" if torch.cuda.is_available() else "cpu")
    return measure_batches("gpu_llamagen", pipe, options, measure)


def move(pipe: LlamaGenPipeline, device: str) -> LlamaGenPipeline:
    """The pipeline with everything it draws on moved to ``device``."""
    for module in (pipe.transformer, pipe.vq, *pipe.parts.drafters.values()):
        module.to(device)
    if pipe.parts.codebook is not None:
        pipe.parts.codebook = pipe.parts.codebook.to(device)
    return pipe


def measure(pipe: LlamaGenPipeline, batch: int, options: argparse.Namespace) -> list[Row]:
    """Rows of every mode and method at ``batch``, interleaved; speed-ups over the fastest plain."""
    if "compile" in options.modes:
        prepare_compiler(pipe.device)
    runs = [Run.of(pipe, mode, method) for mode in options.modes for method in options.methods]
    for repeat in tqdm(
        range(options.repeats + 1), desc=f"batch {batch}", unit="repeat"
    ):  # the first warms up
        for run in runs:
            run.once(pipe, batch, repeat)
    plain = min(run.median for run in runs if run.parts is None)
    return [_row(batch, run, plain) for run in runs]


@dataclass
class Run:
    """A method in a mode: its own target and, unless it is plain, its own drafter and rule."""

    mode: str
    name: str
    target: LlamaGenTarget
    parts: tuple[Drafter, Rule] | None
    play: Play = one_round
    seconds: list[float] = field(default_factory=list)
    last: Progress | None = None

    @classmethod
    def of(cls, pipe: LlamaGenPipeline, mode: str, method: methods.Method) -> Run:
        """``eager``: the pipeline's target; ``graph``: captured; ``compile``: steps and rounds."""
        target = pipe.target()
        if mode != "eager":
            target = GraphTarget(target) if mode == "graph" else StaticTarget(target)
        if isinstance(method, methods.AR):
            return cls(mode, label(method), target, None)
        target, drafter, rule = assemble(method, target, pipe.parts)
        return cls(
            mode,
            label(method),
            target,
            (drafter, rule),
            CompiledRound() if mode == "compile" else one_round,
        )

    @property
    def median(self) -> float:
        """Seconds of a batch, the warm-up apart."""
        return statistics.median(self.seconds[1:])

    def once(self, pipe: LlamaGenPipeline, batch: int, seed: int) -> None:
        """Decode ``batch`` pictures and note the seconds."""
        prompt = Prompt(
            torch.arange(batch, device=pipe.device) % pipe.transformer.config.num_classes
        )
        uniforms = Uniforms(
            [torch.Generator(pipe.device).manual_seed(seed * batch + i) for i in range(batch)]
        )
        on_gpu = pipe.device.type == "cuda"
        length = self.target.length
        clock = Clock(on_gpu)
        with clock("run"):
            if self.parts is None:
                steps = decode_plain(self.target, prompt, length, uniforms, on_gpu)
            else:
                steps = decode(
                    self.target, *self.parts, prompt, length, uniforms, on_gpu, play=self.play
                )
            *_, self.last = steps
        self.seconds.append(clock.seconds["run"])


def _row(batch: int, run: Run, plain: float) -> Row:
    assert run.last is not None
    stats = run.last.stats
    measured = float(run.last.measured)
    rounds = max(stats.batch_rounds, 1)
    return {
        "batch": batch,
        "mode": run.mode,
        "method": run.name,
        "seconds": run.median,
        "pictures_per_second": batch / run.median,
        "speedup": plain / run.median,
        "tau": stats.tau,
        "draft_ms": 1000 * stats.draft_seconds / rounds,
        "verify_ms": 1000 * stats.verify_seconds / rounds,
        "host_overhead": stats.host_overhead,
        "tv": float(run.last.excess) / measured if measured else 0.0,
    }


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = parser_of(
        "benchmarks.gpu.llamagen", "LlamaGen on a GPU", "pocket/llamagen", (1, 8, 64), MODES
    )
    parser.add_argument("--methods", type=parse, nargs="+", default=[parse(m) for m in METHODS])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
