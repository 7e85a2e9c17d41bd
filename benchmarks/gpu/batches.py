"""What the GPU benchmarks of whole models share: options, and a table that grows by batch size."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, Row, dtype_name, environment, write_results


def parser_of(
    prog: str, description: str, model: str, batches: Sequence[int], modes: Sequence[str]
) -> argparse.ArgumentParser:
    """A command line with the options that all of them have."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--model", default=model)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--batches", type=int, nargs="+", default=batches)
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    parser.add_argument("--repeats", type=int, default=7)
    return parser


def measure_batches(
    name: str,
    pipe: Any,
    options: argparse.Namespace,
    measure: Callable[[Any, int, argparse.Namespace], list[Row]],
) -> int:
    """Call ``measure(pipe, batch, options)`` by batch size; write ``name`` after every one."""
    facts = environment(
        model=options.model,
        dtype=dtype_name(pipe),
        device=pipe.device.type,
        cuda=torch.version.cuda,
        repeats=options.repeats,
    )
    rows: list[Row] = []
    for batch in options.batches:
        rows += measure(pipe, batch, options)
        write_results(options.out, name, rows, facts)
    print(f"written: {options.out / name}.csv")
    return 0
