"""Measure everything: ``python -m benchmarks.run [speed|quality|acceptance|report|all]``.

Every part writes its results as it goes and the report after it: a run that is stopped early still
reports what it has. The releases' own code, of clones that the user fetches, is measured beside
ours by ``python -m benchmarks.official``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.acceptance import measure_acceptance
from benchmarks.common import parse
from benchmarks.quality import measure_quality
from benchmarks.report import write_report
from benchmarks.settings import Options
from benchmarks.speed import measure_speed

PARTS: dict[str, Callable[[Options], object]] = {
    "speed": measure_speed,
    "acceptance": measure_acceptance,
    "quality": measure_quality,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    part, options = read_arguments(arguments)
    try:
        for name in PARTS if part == "all" else [part]:
            if name == "report":
                continue
            start = time.perf_counter()
            PARTS[name](options)
            print(f"{name}: {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
            write_report(options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was measured is kept", file=sys.stderr)
    print(f"report: {write_report(options.out)}")
    return 0


def read_arguments(arguments: Sequence[str] | None = None) -> tuple[str, Options]:
    """The part to run and the options of ``arguments`` (default: the command line's)."""
    plain = Options()
    parser = argparse.ArgumentParser(
        prog="benchmarks.run", description="measure speed, quality and acceptance"
    )
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "report", "all"])
    parser.add_argument("--model", default=plain.model)
    parser.add_argument("--out", type=Path, default=plain.out)
    parser.add_argument(
        "--cache", type=Path, default=plain.cache, help="where samples and features are kept"
    )
    parser.add_argument(
        "--data", type=Path, default=plain.data, help="folder of the emoji pictures"
    )
    parser.add_argument(
        "--budget-minutes", dest="minutes", type=float, help="for each part; quality resumes later"
    )
    parser.add_argument("--threads", type=int, default=min(plain.threads, os.cpu_count() or 1))
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: the pipeline's choice; plain is timed in both"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        type=parse,
        default=(),
        help='e.g. ar "lantern++(lambda_=3.0, k=10)"',
    )
    parser.add_argument(
        "--repeats", type=int, default=plain.repeats, help="speed: pictures a method"
    )
    parser.add_argument(
        "--compile", action="store_true", help="speed: every method compiled that can be"
    )
    parser.add_argument(
        "--samples", type=int, default=plain.samples, help="quality: samples a method"
    )
    parser.add_argument(
        "--batch", type=int, default=plain.batch, help="quality: pictures at a time"
    )
    parser.add_argument(
        "--network", default=plain.network, help="quality: whose features, as of specmm eval fd"
    )
    parser.add_argument(
        "--pictures", type=int, default=plain.pictures, help="acceptance: pictures a rule"
    )
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=plain.budgets, help="acceptance: drafts a round"
    )
    given = vars(parser.parse_args(arguments))
    part = given.pop("part")
    dtype = given.pop("dtype")
    if dtype is not None:
        given["dtype"] = DTYPES[dtype]
    return part, Options(**given | {"budgets": tuple(given["budgets"])})


if __name__ == "__main__":
    sys.exit(main())
