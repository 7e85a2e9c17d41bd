"""A picture of how drafting went: acceptance by position, and what was drafted and kept round by round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def plot_course(
    accepted: Sequence[float], depths: Sequence[int], traces: Sequence[Sequence[tuple[int, int]]], file: Path
) -> None:
    """Write ``file`` (PNG, PDF or SVG) from shares by position, tree depths by round, and DiffuSpec's (drafted, kept)
    of each row by round. Raises ``ValueError`` without matplotlib and for another kind of file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs the package matplotlib, got none; run: pip install 'specmm[bench]'") from None
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"plot must end in .png, .pdf or .svg, got {file.name}")
    figure = Figure(figsize=(9, 3.5), dpi=120, layout="constrained")  # no pyplot: no global state
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.bar(range(1, len(accepted) + 1), accepted)
    left.set(title="accepted by position", xlabel="draft", ylabel="share of rounds", ylim=(0, 1))
    right.step(range(1, len(depths) + 1), depths, where="mid", label="drafted (longest row)")
    for row, trace in enumerate(traces):
        right.plot(range(1, len(trace) + 1), [kept for _, kept in trace], ".", label=f"accepted, text {row + 1}")
    right.set(title="by round", xlabel="round", ylabel="tokens")
    right.legend(fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
