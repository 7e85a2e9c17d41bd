"""Seconds a picture at batch 1: every method against the best plain decoding, interleaved.

Each repeat draws one picture with every contender in one process, with the same seed and class, so
that drift affects all alike. Wall clock is a whole call, pixels included.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.arithmetic import quartiles, round_times, speedup
from benchmarks.common import (
    Budget,
    Row,
    dtype_name,
    environment,
    label,
    load_pipeline,
    write_results,
)
from benchmarks.samples import Setting
from benchmarks.settings import Options
from specmm import methods
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.image_ar.tokens.target import Prompt, log_likelihood
from specmm.runs.race import in_turn


def measure_speed(options: Options, name: str = "speed") -> list[Row]:
    """Write ``name`` (compiled: ``name``_compiled) as JSON and CSV after every repeat."""
    torch.set_num_threads(options.threads)
    pipe = load_pipeline(options.model, options.dtype)
    both = [load_pipeline(options.model, d) for d in (torch.float32, torch.bfloat16)]
    runners = contenders(pipe, both, options, name)
    budget = Budget(options.minutes)
    rows = []
    facts = environment(
        model=str(options.model), dtype=dtype_name(pipe), batch=1, settings=pipe.settings.__dict__
    )
    for runner in runners:  # warm-up: caches, plans, compilation
        runner.draw([0], [10**6])
    classes = pipe.transformer.config.num_classes
    labels = torch.randperm(classes, generator=torch.Generator().manual_seed(0))
    for repeat in tqdm(range(options.repeats), desc="speed", unit="repeat"):
        if budget.spent and repeat:
            break
        for runner in in_turn(runners, repeat):
            runner.once([int(labels[repeat % classes])], [repeat])
        drawn = labels[torch.arange(repeat + 1) % classes]
        rows = tabulate(runners, both[0], drawn)
        write_results(options.out, f"{name}_compiled" if options.compile else name, rows, facts)
    return rows


def contenders(
    pipe: LlamaGenPipeline, plain: list[LlamaGenPipeline], options: Options, name: str
) -> list[Setting]:
    """Plain decoding by each of ``plain``, then the others by ``pipe``; all compiled on request.

    Then plain decoding runs uncompiled, too, and the baseline is the fastest of them all.
    """
    ways = (False, True) if options.compile else (False,)
    runners = [
        Setting("ar", p, {"method": methods.AR(), "compiled": way}) for way in ways for p in plain
    ]
    others = [m for m in options.contenders(pipe, name) if not isinstance(m, methods.AR)]
    if options.compile:
        print(
            "not compiled, left out:",
            ", ".join(label(m) for m in others if not m.static_shapes) or "none",
        )
        others = [m for m in others if m.static_shapes]
    return runners + [
        Setting(label(m), pipe, {"method": m, "compiled": options.compile}) for m in others
    ]


def tabulate(runners: list[Setting], judge: LlamaGenPipeline, labels: Tensor) -> list[Row]:
    """One row a contender; the baseline is the fastest plain one. ``judge`` gives likelihoods."""
    plain = min((r for r in runners if r.name == "ar"), key=lambda r: statistics.median(r.seconds))
    return [_row(r, plain, judge, labels) for r in runners]


def _row(runner: Setting, plain: Setting, judge: LlamaGenPipeline, labels: Tensor) -> Row:
    low, high = quartiles(plain.seconds, runner.seconds)
    tv = [c.tv for c in runner.certificates if c.tv is not None]
    return {
        "method": runner.name,
        "dtype": dtype_name(runner.pipe) + (", compiled" if runner.call["compiled"] else ""),
        "baseline": runner is plain,
        "pictures": len(runner.seconds),
        "seconds": statistics.median(runner.seconds),
        "speedup": speedup(plain.seconds, runner.seconds),
        "speedup_low": low,
        "speedup_high": high,
        **round_times(runner.total, plain.total.seconds, plain.total.tokens),
        "certificate": runner.certificates[-1].kind,
        "tv": sum(tv) / len(tv) if tv else None,
        "log_likelihood": float(
            log_likelihood(judge.target(), Prompt(labels), torch.cat(runner.tokens)).mean()
        ),
        "all_seconds": [round(s, 5) for s in runner.seconds],
    }
