"""Method ``auto`` against plain decoding by batch size, interleaved: it must never lose."""

from __future__ import annotations

import statistics
import time

import torch
from tqdm import tqdm

from benchmarks.arithmetic import quartiles, speedup
from benchmarks.common import (
    Budget,
    Row,
    dtype_name,
    environment,
    generators,
    load_pipeline,
    write_results,
)
from benchmarks.settings import Options
from specmm import methods
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline


def measure_autotune(options: Options) -> list[Row]:
    """Run the benchmark and write ``autotune.json`` and ``autotune.csv`` after every batch size."""
    torch.set_num_threads(options.threads)
    pipe = load_pipeline(options.model, options.dtype)
    facts = environment(model=str(options.model), dtype=dtype_name(pipe))
    rows: list[Row] = []
    for i, batch in enumerate(options.batches):
        minutes = None if options.minutes is None else options.minutes / len(options.batches)
        repeats = max(5, options.repeats // (1 + i))
        rows.append(compare(pipe, batch, repeats, Budget(minutes)))
        write_results(options.out, "autotune", rows, facts)
    return rows


def compare(pipe: LlamaGenPipeline, batch: int, repeats: int, budget: Budget) -> Row:
    """Seconds of ``auto`` and of plain decoding for ``batch`` pictures, first in turn."""
    contenders: tuple[methods.Method, ...] = (methods.AR(), methods.Auto())
    seconds: list[list[float]] = [[], []]
    start = time.perf_counter()
    for method in contenders:  # warm-up, and most trials are made here
        _draw(pipe, method, batch, 10**6)
    warmup = time.perf_counter() - start
    for repeat in tqdm(range(repeats), desc=f"autotune, batch {batch}", unit="repeat"):
        if budget.spent and repeat >= 3:
            break
        for i in (0, 1) if repeat % 2 == 0 else (1, 0):
            start = time.perf_counter()
            _draw(pipe, contenders[i], batch, repeat)
            seconds[i].append(time.perf_counter() - start)
    low, high = quartiles(*seconds)
    return {
        "batch": batch,
        "repeats": len(seconds[0]),
        "plain_seconds": statistics.median(seconds[0]),
        "auto_seconds": statistics.median(seconds[1]),
        "ratio": speedup(*seconds),
        "ratio_low": low,
        "ratio_high": high,
        "warmup_seconds": warmup,
        "plan": _plan_of(pipe, batch),
    }


def _draw(pipe: LlamaGenPipeline, method: methods.Method, batch: int, seed: int) -> None:
    classes = [(seed + i) % pipe.transformer.config.num_classes for i in range(batch)]
    seeds = generators(range(seed * batch, (seed + 1) * batch))
    pipe(classes=classes, generator=seeds, method=method, batch_size=batch, output_type="uint8")


def _plan_of(pipe: LlamaGenPipeline, batch: int) -> str:
    """What ``auto`` measured, as text."""
    records = pipe.parts.records.items()
    return next((record.reason() for key, record in records if key[0] == batch), "unknown")
