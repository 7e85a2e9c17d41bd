"""Methods against plain decoding on this machine, for a plot.

Shape letters: none.
"""

from __future__ import annotations

from typing import Any

MOST_RUNS = 5
COLUMNS = ("method", "speedup", "seconds a picture", "tau", "certificate")


def measured(pipe: Any, names: list[str], runs: int, seed: int) -> Any:
    """A data frame with a row a method, as ``specmm bench`` measures them, plain decoding first.

    Raises ``ValueError`` for no method, an unknown one, and too many runs.
    """
    import pandas

    from specmm.methods import AR, make
    from specmm.runs.race import race, summary

    if not names or not 1 <= runs <= MOST_RUNS:
        raise ValueError(f"choose one method at least and 1 to {MOST_RUNS} runs, got {len(names)} and {runs}")
    registry = pipe_methods(pipe)
    contenders = [AR(), *(make(registry, name) for name in names if name != AR.name)]
    count = pipe.transformer.config.num_classes
    lanes = race(pipe, contenders, [[i % count] for i in range(runs)], seed)
    rows = [summary(lane, lanes[0], 1) for lane in lanes]
    cells = [
        (r["label"], round(r["speedup"], 3), round(r["seconds"], 4), round(r["tau"], 2), r["certificate"]["kind"])
        for r in rows
    ]
    return pandas.DataFrame(cells, columns=list(COLUMNS))


def pipe_methods(pipe: Any) -> Any:
    """The methods of the pipeline's family."""
    from specmm.image_ar.pipeline import FAMILIES

    return next(family.methods for family in FAMILIES.values() if family.pipeline == type(pipe).__name__)
