"""A picture of how drafting went: acceptance by position, what was drafted and kept round by round,
where time went.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmm.files import writable

if TYPE_CHECKING:
    from specmm.stats import Stats

KINDS = (".png", ".pdf", ".svg")
FEW = 4  # rows that can be told apart in one picture
APART = 0.12  # tokens by which rows are moved apart, or one would hide another
Trace = Sequence[tuple[int, int]]


def check_plot(file: Path) -> None:
    """Raise ``ValueError`` unless ``plot_course`` can write ``file``; its folder is made."""
    if file.suffix not in KINDS or file.is_dir():
        given = "a folder" if file.is_dir() else file.name
        raise ValueError(f"plot must be a file that ends in .png, .pdf or .svg, got {given}")
    try:
        import matplotlib.figure  # noqa: F401  only whether it is there
    except ImportError:
        raise ValueError(
            "a picture needs the package matplotlib, got none; run: pip install 'specmm[bench]'"
        ) from None
    writable(file.parent, "--plot")


def plot_course(stats: Stats, traces: Sequence[Trace], file: Path) -> None:
    """Write ``file``, which ``check_plot`` has passed, from a run's ``stats`` and DiffuSpec's
    (drafted, kept) of each row by round; those of rows are drawn where they are few.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), dpi=120, layout="constrained")  # no pyplot: no global state
    FigureCanvasAgg(figure)
    positions, rounds, times = figure.subplots(1, 3, width_ratios=(3, 5, 2))
    _positions(positions, stats.accepted_by_position)
    _rounds(rounds, stats.depths, traces if len(traces) <= FEW else [])
    _times(times, stats)
    figure.savefig(file)


def _positions(axes: Any, accepted: Sequence[float]) -> None:
    axes.bar(range(1, len(accepted) + 1), accepted)
    axes.set(title="accepted by position", xlabel="draft", ylabel="share of rounds", ylim=(0, 1))


def _rounds(axes: Any, depths: Sequence[int], traces: Sequence[Trace]) -> None:
    """Drafted lengths as steps, what was accepted as dots in the same colour."""
    if len(traces) != 1:  # of one row its own line says it all
        rows = ", longest row" if traces else ""
        axes.step(
            range(1, len(depths) + 1), depths, where="mid", color="0.6", label=f"drafted{rows}"
        )
    for row, trace in enumerate(traces):
        order, text = range(1, len(trace) + 1), "" if len(traces) == 1 else f", text {row + 1}"
        shift = APART * (row - (len(traces) - 1) / 2)
        drafted, kept = [shift + count for count, _ in trace], [shift + count for _, count in trace]
        axes.step(order, drafted, where="mid", color=f"C{row}", label=f"drafted{text}")
        axes.plot(order, kept, ".", color=f"C{row}", label=f"accepted{text}")
    axes.set(title="by round", xlabel="round", ylabel="tokens", ylim=(-0.4, None))
    if depths:
        axes.legend(fontsize="small")


def _times(axes: Any, stats: Stats) -> None:
    """Where the seconds went; drafting without its search for paths."""
    parts = {
        "draft": stats.draft_seconds - stats.search_seconds,
        "search": stats.search_seconds,
        "verify": stats.verify_seconds,
        "other": stats.seconds - stats.draft_seconds - stats.verify_seconds,
    }
    axes.bar_label(axes.bar(list(parts), list(parts.values())), fmt="%.2f", fontsize="small")
    axes.set(title="where time went", ylabel="seconds")
    axes.margins(y=0.12)
