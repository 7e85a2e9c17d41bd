"""The kernels on a GPU: correctness first, then tree attention's time.

Against SDPA, flex_attention and a copy of the bytes. ``benchmarks/gpu/run.sh``; see README.md here.
Within ``--minutes``: all shapes of ours, SDPA and the copy come first; flex_attention, which
compiles for every shape, gets what is left. Without a GPU nothing is timed and the table says so.
Writes ``gpu_kernels.csv``.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import triton

from benchmarks.gpu import checks
from benchmarks.gpu.contenders import CONTENDERS, calls
from benchmarks.gpu.shapes import BATCHES, LENGTHS, MODELS, NODES, Inputs, Shape, every_shape
from benchmarks.gpu.timing import copies_of, milliseconds

RESULTS = Path("benchmarks/results")
MISSING = "not measured"
Times = dict[tuple[Shape, str], float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print, write."""
    options = read_arguments(arguments)
    if not torch.cuda.is_available():
        print(f"no GPU here: nothing is checked or timed\n\n{table({})}\n\n{bars({}, None)}")
        return 0
    end = time.monotonic() + 60 * options.minutes
    device = torch.device("cuda")
    syncs = check(device)
    times: Times = {}
    measure(times, [name for name in CONTENDERS if name != "flex"], device, end)
    measure(times, ["flex"], device, end)
    print(f"\n{table(times)}\n\n{bars(times, syncs)}")
    write(
        options.out,
        times,
        {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "syncs": syncs},
    )
    return 0


def check(device: torch.device) -> int:
    """What must be true before a time means anything; returns the host syncs of a round."""
    for model in MODELS:
        for shape in (
            Shape(model, 257, 1, 2),
            Shape(model, 1024, 26, 2),
            Shape(model, 4097, 64, 1),
        ):
            errors = checks.attention_error(shape, device)
            print(f"{model} S={shape.length} T={shape.nodes}: {errors}", flush=True)
            if not errors["ours"] < checks.TOLERANCE:
                raise SystemExit(
                    f"tree attention is off by {errors['ours']:.2e}, expected {checks.TOLERANCE}"
                )
    checks.check_commit(device)
    share = checks.check_acceptance(device)
    syncs = checks.syncs_in_a_round(device)
    acceptance = f"acceptance as the rules on {share:.2%} of the rows"
    print(f"KV commit exact; {acceptance}; host syncs a round: {syncs}")
    return syncs


def measure(times: Times, names: Iterable[str], device: torch.device, end: float) -> None:
    """Milliseconds of every shape by the contenders ``names``, until the time is over."""
    names = list(names)
    for shape in every_shape():
        if time.monotonic() > end:
            print(f"out of time before {shape}: left out for {', '.join(names)}")
            return
        count = copies_of(shape.bytes)
        inputs = [Inputs.random(shape, device, seed=i) for i in range(count)]
        for name in names:
            times[shape, name] = milliseconds(calls(name, inputs))
        del inputs


def table(times: Times) -> str:
    """Medians over models by S, T and batch."""
    lines = ["|     S |  T | batch | ours, ms | over SDPA | over flex | bytes/s over a copy's |"]
    lines.append("|---|---|---|---|---|---|---|")
    for length in LENGTHS:
        for rows in BATCHES:
            for nodes in NODES:
                shapes = [Shape(model, length, nodes, rows) for model in MODELS]
                found = [
                    _median(f(times, s) for s in shapes)
                    for f in (_ours, _over("sdpa"), _over("flex"), _rate)
                ]
                lines.append(
                    f"| {length} | {nodes} | {rows} | " + " | ".join(map(_text, found)) + " |"
                )
    return "\n".join(lines)


def bars(times: Times, syncs: int | None) -> str:
    """The bars with what was found."""
    wanted = [s for s in every_shape() if s.length >= 1000]
    gains = [g for s in wanted if (g := _over("sdpa")(times, s)) is not None]
    rate = _median(_rate(times, s) for s in every_shape() if s.length == max(LENGTHS))
    least = min(gains) if gains else None
    return "\n".join(
        (
            f"over SDPA with a dense mask, S >= 1k, median (bar 1.5): {_text(_median(gains))}",
            f"the same, least (bar 1.0): {_text(least)}",
            f"bytes/s at S = 32k over a plain copy's, median (bar 0.75): {_text(rate)}",
            f"host syncs a round (bar 0): {MISSING if syncs is None else syncs}",
        )
    )


def _ours(times: Times, shape: Shape) -> float | None:
    return times.get((shape, "ours"))


def _over(name: str) -> Callable[[Times, Shape], float | None]:
    def gain(times: Times, shape: Shape) -> float | None:
        return times[shape, name] / times[shape, "ours"] if (shape, name) in times else None

    return gain


def _rate(times: Times, shape: Shape) -> float | None:
    """Bytes a second over those of a copy, which reads and writes each byte of keys and values."""
    if (shape, "copy") not in times:
        return None
    _, kv, width = shape.sizes
    copied = 2 * 2 * 2 * shape.rows * kv * width * (shape.length + shape.nodes)
    return shape.bytes / times[shape, "ours"] / (copied / times[shape, "copy"])


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _text(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"


def write(out: Path, times: Times, facts: dict[str, object]) -> None:
    """``gpu_kernels.csv``: one row a shape, milliseconds by contender."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "gpu_kernels.csv").open("w", newline="") as file:
        file.writelines(
            f"# {key}: {value}\n" for key, value in (facts | {"triton": triton.__version__}).items()
        )
        rows = csv.writer(file)
        rows.writerow(["model", "S", "T", "batch", *(f"{name}_ms" for name in CONTENDERS), "bytes"])
        for shape in every_shape():
            found = [times.get((shape, name), MISSING) for name in CONTENDERS]
            rows.writerow([shape.model, shape.length, shape.nodes, shape.rows, *found, shape.bytes])
    print(f"written: {out / 'gpu_kernels.csv'}")


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.kernels", description="The kernels on a GPU"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--minutes", type=float, default=6.5, help="when to stop starting new measurements"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
