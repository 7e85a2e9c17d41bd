"""``benchmarks/gpu/run.sh [all | report | PART …]``; see README.md here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.parts import MINUTES, PARTS, REPEATS, Bench, part_of
from benchmarks.gpu.report import write_report
from benchmarks.gpu.running import every, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 0 if all of it is there, 1 if not, 2 for a mistake."""
    options = read_arguments(arguments)
    if not options.parts:
        print("\n".join(f"{part.name:16} {part.about}" for part in PARTS.values()))
        print(f"{'all':16} every part, then the report\n{'report':16} the page of what is there")
        return 0
    try:
        given = options.device, options.tiny, options.out, options.minutes, options.repeats
        bench = Bench.at(*given)
        return 0 if _run(options, bench) else 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, bench: Bench) -> bool:
    fine = True
    for name in options.parts:
        if name == "all":
            fine &= every(PARTS.values(), _passed_on(options, bench))
        if name in ("all", "report"):
            print(f"written: {write_report(bench.out)}")
        else:
            fine &= run(part_of(name), bench, options.again)
    return fine


def _passed_on(options: argparse.Namespace, bench: Bench) -> list[str]:
    given = ["--device", bench.device.type, "--out", str(bench.out.resolve())]
    given += ["--minutes", str(bench.minutes)]
    given += ["--repeats", str(bench.most)]
    return given + ["--tiny"] * bench.tiny + ["--again"] * options.again


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh", description="Everything that a GPU alone can say"
    )
    parser.add_argument("parts", nargs="*", help="all, report or names of parts; none: their list")
    parser.add_argument("--again", action="store_true", help="measure what is there, too")
    parser.add_argument("--tiny", action="store_true", help="rehearse with small shapes")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu, where all is tiny")
    parser.add_argument("--out", type=Path, help="folder of results")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="no case of a part begins later"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of a measurement")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
