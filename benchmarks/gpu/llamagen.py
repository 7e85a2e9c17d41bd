"""pocket/llamagen on a GPU: plain, exact and LANTERN++ decoding by batch size and mode, in fact.

Modes: eager, captured forwards, and whole rounds captured. Without a GPU captured means eager.
Speed-ups are over the fastest plain decoding of a case.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from benchmarks.common import Row, dtype_name, label, load_pipeline, parse
from benchmarks.gpu.graphs import GraphTarget
from benchmarks.gpu.parts import Bench, Case
from benchmarks.gpu.rounds import ROUND
from specmm import methods
from specmm.core.decode import Play, Progress, decode, decode_plain, one_round, without_drafts
from specmm.core.drafter import Drafter
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.image_ar.tokens.assemble import assemble
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt, StaticTarget
from specmm.programs.graphs import GraphRound
from specmm.verify import Rule

METHODS = ("ar", "speculative", "lantern++(lambda_=2.0, k=10)")
MODES = ("eager", "graph", ROUND)
BATCHES = (1, 8, 64)


def cases(bench: Bench) -> Iterator[Case]:
    """A case for each batch size."""
    pipe = cache(lambda: load_pipeline("pocket/llamagen", device=bench.device))
    if bench.tiny:
        yield Case("batch 1", lambda: measure(pipe(), 1, bench, MODES[1:2], METHODS[:2]))
        return
    for batch in BATCHES:
        yield Case(
            f"batch {batch}", lambda batch=batch: measure(pipe(), batch, bench, MODES, METHODS)
        )


def measure(
    pipe: LlamaGenPipeline, batch: int, bench: Bench, modes: Sequence[str], wanted: Sequence[str]
) -> list[Row]:
    """Rows of ``modes`` and methods ``wanted`` at ``batch``, interleaved.

    Speed-ups are over the fastest plain one of them.
    """
    runs = [Run.of(pipe, mode, parse(method)) for mode in modes for method in wanted]
    repeats = max(1, bench.repeats // 3)
    with bench.memory() as memory:
        for repeat in range(repeats + 1):  # the first warms up
            for run in runs:
                run.once(pipe, batch, repeat)
        for run in runs:
            run.once(pipe, batch, 0, shares=True)
    plain = min(run.median for run in runs if run.name == label(methods.AR()))
    facts = {"repeats": repeats, "dtype": dtype_name(pipe), **memory}
    return [_row(batch, run, plain) | facts for run in runs]


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
        """``eager``: the pipeline's target; ``graph``: its forwards captured; else whole rounds."""
        target = pipe.target()
        if mode != "eager":
            target = GraphTarget(target) if mode == "graph" else StaticTarget(target)
        play = GraphRound() if mode == ROUND and pipe.device.type == "cuda" else one_round
        if isinstance(method, methods.AR):
            alone = without_drafts() if mode == ROUND else None
            return cls(mode, label(method), target, alone, play)
        target, drafter, rule = assemble(method, target, pipe.parts)
        return cls(mode, label(method), target, (drafter, rule), play)

    @property
    def median(self) -> float:
        """Seconds of a batch, the warm-up apart."""
        return statistics.median(self.seconds[1:])

    def once(self, pipe: LlamaGenPipeline, batch: int, seed: int, shares: bool = False) -> None:
        """Decode ``batch`` pictures and note the seconds, as a user has them; or what drafting and
        verifying have of them (``shares``), each waited for.
        """
        prompt = Prompt(
            torch.arange(batch, device=pipe.device) % pipe.transformer.config.num_classes
        )
        uniforms = Uniforms(
            [torch.Generator(pipe.device).manual_seed(seed * batch + i) for i in range(batch)]
        )
        on_gpu = pipe.device.type == "cuda"
        given = prompt, self.target.length, uniforms, on_gpu and shares
        clock = Clock(on_gpu)
        with clock("run"):
            if self.parts is None:
                steps = decode_plain(self.target, *given)
            else:
                steps = decode(self.target, *self.parts, *given, play=self.play)
            *_, self.last = steps
        if not shares:
            self.seconds.append(clock.seconds["run"])


def _row(batch: int, run: Run, plain: float) -> Row:
    assert run.last is not None
    stats = run.last.stats
    measured = float(run.last.measured)
    rounds = max(stats.batch_rounds, 1)
    return {
        "model": "pocket/llamagen",
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
