"""Seconds and peak memory of whole commands, over a Python that only imports what they rest on.

    OMP_NUM_THREADS=1 python -m benchmarks.startup

Each is a process of its own, all in turn; medians. Seconds are the processor's (Linux).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
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
# what a process took, by a small one that begins it: a process starts with the peak of its parent
ASK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, capture_output=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
Reading = tuple[float, float]


def measured(words: Sequence[str], place: Path) -> Reading:
    """Processor seconds and peak memory in MB of a Python with these ``words``, in ``place``."""
    command = [sys.executable, "-c", ASK, sys.executable, *words]
    said = subprocess.run(command, cwd=place, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, memory = said.split()
    return float(seconds), int(memory) / 1024


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
                found.setdefault(name, []).append(measured(["-c", f"import {module}"], place))
            for command in COMMANDS:
                found.setdefault(command, []).append(measured(["-m", "specmm", *command], place))
    median = statistics.median
    middle = {key: tuple(map(median, zip(*each, strict=True))) for key, each in found.items()}
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
