"""Seconds and peak memory of whole commands, over a Python that only imports what they rest on.

    OMP_NUM_THREADS=1 python -m benchmarks.startup

Each is a process of its own, all in turn; medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from PIL import Image

from benchmarks.common import RESULTS, Out, Row, environment, write_results

BASES = {
    "torch": "torch",
    "qwen2": "transformers.models.qwen2.modeling_qwen2",
    "llava": "transformers.models.llava.modeling_llava",
}
FEW = ("--max-new-tokens", "2")
COMMANDS = {  # by what they rest on
    ("generate", "pocket/llamagen", "--class", "heart"): "torch",
    ("generate", "pocket/var", "--class", "heart"): "torch",
    ("complete", "pocket/coder", "-p", "def add(a, b):", *FEW): "qwen2",
    ("ask", "pocket/llava", "picture.png", "-q", "What is it?", *FEW): "llava",
}
Reading = tuple[float, float]


def measured(words: tuple[str, ...], place: Path) -> Reading:
    """Seconds and peak memory in MB of a Python with these ``words``, run in ``place``."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words], cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ValueError(f"{' '.join(words)} failed: run it by hand")
    return time.perf_counter() - begin, used.ru_maxrss / 1024


def main(
    runs: Annotated[int, typer.Option(min=1, help="Of each command.")] = 7, out: Out = RESULTS
) -> None:
    """Measure all commands and write the table."""
    found: dict[object, list[Reading]] = {}
    with TemporaryDirectory() as folder:
        place = Path(folder)
        Image.new("RGB", (96, 96), "red").save(place / "picture.png")
        for _ in range(runs):
            for name, module in BASES.items():
                found.setdefault(name, []).append(measured(("-c", f"import {module}"), place))
            for command in COMMANDS:
                found.setdefault(command, []).append(measured(("-m", "specmm", *command), place))
    middle = {
        key: tuple(map(statistics.median, zip(*readings, strict=True)))
        for key, readings in found.items()
    }
    rows: list[Row] = []
    for command, base in COMMANDS.items():
        (seconds, memory), (least, smallest) = middle[command], middle[base]
        rows.append(
            {
                "command": " ".join(command[:2]),
                "over import of": BASES[base],
                "seconds": round(seconds, 2),
                "of the import": round(least, 2),
                "ratio": round(seconds / least, 3),
                "peak, MB": round(memory),
                "of the import, MB": round(smallest),
                "memory ratio": round(memory / smallest, 3),
            }
        )
        print(rows[-1])
    write_results(out, "startup", rows, environment(runs=runs))


if __name__ == "__main__":
    typer.run(main)
