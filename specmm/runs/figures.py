"""Tables that compare methods, and plots of a run's drafting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmm.core.stats import Stats
from specmm.loading.extras import needed
from specmm.loading.files import writable

# ---- methods compared

BENCH = ("speed-up", "quartiles", "tau", "host", "ideal")
PICTURES = ("method", "s/picture", *BENCH, "log-lik", "certificate")
TEXTS = ("method", "ms/token", *BENCH, "certificate")


def table_of(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """The ``columns`` and a row of texts for each summary of a race."""
    return [list(columns), *([_cells(row)[column] for column in columns] for row in rows)]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """The texts of a summary by column, a dash for what is not known."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    tv = row["certificate"]["tv"]
    return {
        "method": row["label"],
        "s/picture": f"{row['seconds_per_picture']:.3f}",
        "ms/token": f"{1000 * row['seconds_per_token']:.2f}",
        "speed-up": f"{row['speedup']:.2f}x",
        "quartiles": "{:.2f}-{:.2f}".format(*row["quartiles"]),
        "tau": f"{row['tau']:.2f}",
        "host": f"{row['host_overhead']:.0%}",
        "ideal": f"{row['ideal']:.2f}x",
        "log-lik": number(row["quality"]["log_likelihood"], ".3f"),
        "certificate": row["certificate"]["kind"] + (f", tv {tv:.4f}" if tv else ""),
    }


# ---- how drafting went

KINDS = (".png", ".pdf", ".svg")
FEW = 4  # rows that can be told apart in one picture
APART = 0.12  # tokens by which rows are moved apart, so that none hides another
Trace = Sequence[tuple[int, int]]  # (drafted, kept) by round


def check_plot(file: Path) -> None:
    """Raise ``ValueError`` unless ``plot_drafting`` can write ``file``; its folder is made."""
    if file.suffix not in KINDS or file.is_dir():
        given = "a folder" if file.is_dir() else file.name
        raise ValueError(f"plot must be a file that ends in .png, .pdf or .svg, got {given}")
    with needed("--plot", "bench"):
        import matplotlib.figure  # noqa: F401  only whether it is there
    writable(file.parent, "--plot")


def plot_drafting(stats: Stats, traces: Sequence[Trace], file: Path) -> None:
    """Draw acceptance by position, lengths by round and where time went into ``file``.

    ``traces`` are DiffuSpec's by row; rows are drawn apart where they are few.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), dpi=120, layout="constrained")  # no pyplot: no global state
    FigureCanvasAgg(figure)
    positions, rounds, times = figure.subplots(1, 3, width_ratios=(3, 5, 2))
    accepted = stats.accepted_by_position
    positions.bar(range(1, len(accepted) + 1), accepted)
    labels = dict(xlabel="draft", ylabel="share of rounds", ylim=(0, 1))
    positions.set(title="accepted by position", **labels)
    _plot_rounds(rounds, stats.depths, traces if len(traces) <= FEW else [])
    parts = {
        "draft": stats.draft_seconds - stats.search_seconds,
        "search": stats.search_seconds,
        "verify": stats.verify_seconds,
        "other": stats.seconds - stats.draft_seconds - stats.verify_seconds,
    }
    times.bar_label(times.bar(list(parts), list(parts.values())), fmt="%.2f", fontsize="small")
    times.set(title="where time went", ylabel="seconds")
    times.margins(y=0.12)
    figure.savefig(file)


def _plot_rounds(axes: Any, depths: Sequence[int], traces: Sequence[Trace]) -> None:
    """Drafted lengths as steps, what was accepted as dots in the same colour."""
    if len(traces) != 1:  # a single row is drawn by its own line below
        drafted = "drafted, longest row" if traces else "drafted"
        axes.step(range(1, len(depths) + 1), depths, where="mid", color="0.6", label=drafted)
    for row, trace in enumerate(traces):
        order = range(1, len(trace) + 1)
        text = "" if len(traces) == 1 else f", text {row + 1}"
        shift = APART * (row - (len(traces) - 1) / 2)
        drafts = [shift + count for count, _ in trace]
        kept = [shift + count for _, count in trace]
        axes.step(order, drafts, where="mid", color=f"C{row}", label=f"drafted{text}")
        axes.plot(order, kept, ".", color=f"C{row}", label=f"accepted{text}")
    axes.set(title="by round", xlabel="round", ylabel="tokens", ylim=(-0.4, None))
    if depths:
        axes.legend(fontsize="small")
