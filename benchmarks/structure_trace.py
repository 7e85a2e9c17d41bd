"""Run ``specmm`` with the arguments given; print how many files and functions of it were called."""

from __future__ import annotations

import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1].resolve()
OPTIMIZED = 1  # of code.co_flags: a function's, not a module's or a class's


def main() -> None:
    """Trace what the console script runs."""
    [script] = entry_points(group="console_scripts", name="specmm")
    run = script.load()
    called: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & OPTIMIZED and not code.co_name.startswith("<"):
            called.add((code.co_filename, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    ours = [(Path(file).resolve(), line) for file, line in called if file.endswith(".py")]
    inside = [(f, line) for f, line in ours if f.is_relative_to(ROOT) and ".venv" not in f.parts]
    inside = [(f, line) for f, line in inside if f.parent.name != "benchmarks"]
    print(len({f for f, _ in inside}), len(inside))


if __name__ == "__main__":
    main()
