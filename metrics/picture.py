"""The picture of FID against speed: every method a point with its name, no name on another or on a
point.

Shapes: boxes are matplotlib's, in pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmm.metrics.report import PLAIN, Row

REACH = (9, 18, 30, 45, 65, 90, 120, 160)  # points between a mark and its name, tried in turn
TURNS = (0, 45, -45, 90, -90, 180, 135, -135, 20, -20, 160, -160)  # degrees, to the right first


def draw_trade(rows: Sequence[Row], path: Path, floor: float | None = None) -> Path:
    """Draw FID over speed-up of ``rows`` (``method``, ``speedup``, ``fid``, ``certificate``) into
    ``path`` (.png).

    Circles are exact, triangles relaxed; bars are the intervals ``fid_low`` to ``fid_high``. Lines
    mark plain decoding and a tenth above it, and ``floor``, the FID of real against real. Raises
    ``ValueError`` without matplotlib.
    """
    figure, axes = _axes(rows)
    for row in rows:
        axes.errorbar(
            row["speedup"], row["fid"], _reach(row), **_mark(row), elinewidth=1, capsize=3
        )
    plain = next((r["fid"] for r in rows if r["method"] == PLAIN), None)
    if plain is not None:
        axes.axhline(plain, color="C0", linewidth=0.8, label="plain decoding")
        axes.axhline(
            1.1 * plain, color="C3", linestyle="--", linewidth=0.8, label="plain decoding + 10%"
        )
    if floor is not None:
        axes.axhline(floor, color="gray", linestyle=":", label="real against real (halves)")
    axes.margins(x=0.2, y=0.2)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    place_names(figure, axes, rows)
    figure.savefig(path, dpi=figure.dpi)
    figure.clear()
    return path


def place_names(figure: Any, axes: Any, rows: Sequence[Row]) -> list[Any]:
    """Write every row's name beside its mark, inside ``axes`` and clear of all else; the boxes of
    the names.
    """
    figure.canvas.draw()
    figure.set_layout_engine("none")  # nothing moves from here on
    scale, frame = figure.dpi / 72, axes.get_window_extent()
    marks = [axes.transData.transform((r["speedup"], r["fid"])) for r in rows]
    taken = [_box(x, y, 12 * scale, 12 * scale) for x, y in marks]
    taken += [_box(frame.x0 + frame.width / 2, y, frame.width, 2) for y in _heights(axes)]
    names = []
    for row, name, (x, y) in zip(rows, _names(rows), marks, strict=True):
        text = axes.annotate(
            name, (row["speedup"], row["fid"]), (0, 0), textcoords="offset points", fontsize=8
        )
        text.set(ha="center", va="center")
        size = text.get_window_extent()
        tried = [
            _shifted(x, y, size, reach * scale, turn)
            for reach, turn in itertools.product(REACH, TURNS)
        ]
        best = min(
            tried, key=lambda box: _trouble(box, taken, frame) + _astray(box, marks, (x, y))
        )  # nearest first
        centre = (best.x0 + best.x1) / 2, (best.y0 + best.y1) / 2
        text.set_position(((centre[0] - x) / scale, (centre[1] - y) / scale))
        taken.append(best)
        names.append(best)
        _leader(axes, (x, y), centre, best)
    return names


def _axes(rows: Sequence[Row]) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "a picture needs the package matplotlib, got none; run: pip install 'specmm[bench]'"
        ) from None
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")  # no pyplot: no global state
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    each = f" ({rows[0]['samples']} samples each)" if _same_count(rows) else ""
    axes.set(title=f"Quality against speed: circles exact, triangles relaxed{each}")
    axes.set(xlabel="speed-up over plain decoding", ylabel="FID (lower is better)")
    axes.grid(alpha=0.3)
    return figure, axes


def _mark(row: Row) -> dict[str, Any]:
    exact = str(row.get("certificate")).startswith("exact")
    return {"marker": "o" if exact else "^", "color": "C0" if exact else "C1"}


def _reach(row: Row) -> list[list[float]] | None:
    """Lengths of the error bar below and above the mark."""
    if row.get("fid_low") is None or row.get("fid_high") is None:
        return None
    return [[max(row["fid"] - row["fid_low"], 0)], [max(row["fid_high"] - row["fid"], 0)]]


def _names(rows: Sequence[Row]) -> list[str]:
    """Methods, with their counts of samples where these differ (else the title says it once)."""
    told = not _same_count(rows)
    return [
        f"{r['method']}\nn = {r['samples']}" if told and r.get("samples") else str(r["method"])
        for r in rows
    ]


def _same_count(rows: Sequence[Row]) -> bool:
    return len({row.get("samples") for row in rows}) == 1 and bool(rows[0].get("samples"))


def _box(x: float, y: float, width: float, height: float) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox.from_bounds(x - width / 2, y - height / 2, width, height)


def _heights(axes: Any) -> list[float]:
    """Pixel heights of the horizontal lines."""
    lines = [
        line
        for line in axes.get_lines()
        if line.get_label() and not line.get_label().startswith("_")
    ]
    return [axes.transData.transform((0, line.get_ydata()[0]))[1] for line in lines]


def _shifted(x: float, y: float, size: Any, reach: float, turn: float) -> Any:
    """A box of ``size`` whose edge is ``reach`` pixels from (x, y) in direction ``turn`` (degrees)."""
    across, up = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    return _box(
        x + across * (reach + size.width / 2),
        y + up * (reach + size.height / 2),
        size.width,
        size.height,
    )


def _trouble(box: Any, taken: Sequence[Any], frame: Any) -> float:
    """Square pixels of ``box`` on other boxes and outside of ``frame``."""
    area = box.width * box.height
    outside = area - _shared(box, frame)
    return sum(_shared(box.padded(2), other) for other in taken) + (
        10 * outside if outside > 1e-6 * area else 0
    )


def _astray(box: Any, marks: Sequence[Any], own: tuple[float, float]) -> float:
    """Square pixels of ``box`` if it lies nearer to another of the ``marks`` than to its ``own``,
    else 0.
    """
    reach = math.dist(_edge(box, own), own) * (1 - 1e-9)
    return float(any(math.dist(_edge(box, m), m) < reach for m in marks) * box.width * box.height)


def _edge(box: Any, mark: tuple[float, float]) -> tuple[float, float]:
    """The point of ``box`` nearest to ``mark``."""
    return min(max(mark[0], box.x0), box.x1), min(max(mark[1], box.y0), box.y1)


def _shared(one: Any, two: Any) -> float:
    width, height = (
        min(one.x1, two.x1) - max(one.x0, two.x0),
        min(one.y1, two.y1) - max(one.y0, two.y0),
    )
    return max(width, 0) * max(height, 0)


def _leader(axes: Any, mark: tuple[float, float], centre: tuple[float, float], box: Any) -> None:
    """A thin line from the mark to a name that is far off."""
    edge = _edge(box, mark)
    if math.dist(edge, mark) > 20 * axes.figure.dpi / 72:
        ends = axes.transData.inverted().transform([mark, edge])
        axes.plot(*ends.T, color="gray", linewidth=0.6, scalex=False, scaley=False)
