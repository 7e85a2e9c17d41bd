"""Speed against quality: rows of methods from result files, a Markdown table and a plot.

Result files are what ``specmm bench --json`` and ``specmm eval … --json`` print and what the
benchmarks write (rows in .csv or .json). A row has ``method``; ``speedup`` and ``certificate`` from
a speed measurement; ``fid`` (or another metric) and ``samples`` from a quality one.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmm.loading.extras import needed
from specmm.loading.files import text_lines
from specmm.metrics.measurement import Measurement, difference, parse_measurements, read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
PLAIN = "ar"  # the baseline's name
COLUMNS = {
    "method": "method",
    "speedup": "speed-up",
    "tau": "τ",
    "certificate": "certificate",
    "samples": "samples",
    "fid": "FID",
    "fid_low": "FID, low",
    "fid_high": "FID, high",
    "fid_ratio": "FID / plain",
    "kid": "KID",
    "log_likelihood": "log p / token",
}


def read_files(paths: Sequence[Path]) -> tuple[list[Row], list[Row]]:
    """The speed rows and the quality rows of all files; ``ValueError`` for different protocols."""
    speed: list[Row] = []
    quality: dict[str, Row] = {}
    measured: dict[str, Measurement] = {}
    for row in itertools.chain.from_iterable(map(_read, paths)):
        result = row.get("measurement")
        if isinstance(row.get("speedup"), int | float):
            speed.append(row)
        elif isinstance(result, Measurement):
            difference(measured.setdefault(result.metric, result), result)  # or raises
            entry = quality.setdefault(row["method"], {"method": row["method"]})
            counts = result.protocol.get("counts", [None])
            entry |= {result.metric: result.value, "samples": counts[0]}
            if result.interval:
                entry[f"{result.metric}_low"] = result.interval.low
                entry[f"{result.metric}_high"] = result.interval.high
        elif isinstance(row.get("fid"), int | float):
            quality.setdefault(row["method"], {}).update(row)
    return speed, list(quality.values())


def join(speed: Sequence[Row], quality: Sequence[Row]) -> list[Row]:
    """Rows of methods that have both a speed and a quality; of several speeds the fastest."""
    fastest = {r["method"]: r for r in sorted(speed, key=lambda r: r["speedup"])}
    return [{**fastest[q["method"]], **q} for q in quality if q["method"] in fastest]


def joined(speed: Sequence[Row], quality: Sequence[Row]) -> list[Row]:
    """As ``join``, fastest last, with ``fid_ratio`` to plain decoding; ``ValueError`` if empty."""
    rows = [r for r in join(speed, quality) if r.get("fid") is not None]
    if not rows:
        sides = [sorted({r["method"] for r in side}) for side in (speed, quality)]
        speeds, fids = (", ".join(names) or "none" for names in sides)
        raise ValueError(
            f"no method has both a speed and a FID: speeds of {speeds}, FIDs of {fids}; "
            "give eval the method's name with --name"
        )
    plain = next((r["fid"] for r in rows if r["method"] == PLAIN), None)
    if plain is not None:
        rows = [{**r, "fid_ratio": r["fid"] / plain} for r in rows]
    return sorted(rows, key=lambda r: r["speedup"])


def table(rows: Sequence[Row], columns: dict[str, str] | None = None) -> str:
    """A Markdown table of ``rows``; ``columns`` picks and titles them (default: all by key)."""
    if not rows:
        return ""
    titles = columns or {k: k for row in rows for k in row}
    used = {k: t for k, t in titles.items() if any(row.get(k) is not None for row in rows)}
    lines = ["| " + " | ".join(used.values()) + " |", "|---" * len(used) + "|"]
    lines += ["| " + " | ".join(cell(row.get(k)) for k in used) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: object) -> str:
    """A value in a Markdown table."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value).replace("|", "\\|")
    digits = 4 if abs(value) < 0.1 else 3 if abs(value) < 10 else 1
    return f"{value:.{digits}f}"


def _read(path: Path) -> list[Row]:
    """The rows of a result file, each with its method."""
    if path.suffix == ".csv":
        return _csv(path)
    if path.suffix != ".json":
        got = path.suffix or "no suffix"
        raise ValueError(f"{path} must be .json or .csv, got {got}; give results of bench or eval")
    value = read_json(path)
    rows = value.get("rows", value) if isinstance(value, dict) else value
    if isinstance(rows, list) and rows and all(isinstance(r, dict) and "method" in r for r in rows):
        return [{**r, "method": r.get("label", r["method"]), "certificate": _kind(r)} for r in rows]
    measurements = parse_measurements(value, path)
    return [{"method": value.get("name", path.stem), "measurement": m} for m in measurements]


def _kind(row: Row) -> object:
    certificate = row.get("certificate")
    return certificate.get("kind") if isinstance(certificate, dict) else certificate


def _csv(path: Path) -> list[Row]:
    reader = csv.DictReader(line for line in text_lines(path) if not line.startswith("# "))
    rows = [{k: _value(v) for k, v in row.items() if k} for row in reader]
    if not rows or "method" not in rows[0] or not {"speedup", "fid"} & set(rows[0]):
        raise ValueError(f"{path} must have columns 'method' and 'speedup' or 'fid'")
    return rows


def _value(text: str | None) -> str | int | float | None:
    if not text:
        return None
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def draw_trade(rows: Sequence[Row], path: Path, floor: float | None = None) -> Path:
    """Plot FID over speed-up (``method``, ``speedup``, ``fid``, ``certificate``) into ``path``.

    Bars are the intervals ``fid_low`` to ``fid_high``; lines mark plain decoding, a tenth above it,
    and ``floor``, the FID of real against real. Raises ``ValueError`` without matplotlib.
    """
    figure, axes = _axes(rows)
    for row in rows:
        exact = str(row.get("certificate")).startswith("exact")
        reach = None
        if row.get("fid_low") is not None and row.get("fid_high") is not None:
            reach = [[max(row["fid"] - row["fid_low"], 0)], [max(row["fid_high"] - row["fid"], 0)]]
        marker, name = "o" if exact else "^", _name(row, rows)
        at = row["speedup"], row["fid"]
        axes.errorbar(*at, reach, marker=marker, label=name, ls="", elinewidth=1, capsize=3)
    plain = next((r["fid"] for r in rows if r["method"] == PLAIN), None)
    if plain is not None:
        axes.axhline(plain, color="black", linewidth=0.8, label="plain decoding")
        tenth = "plain decoding + 10%"
        axes.axhline(1.1 * plain, color="black", linestyle="--", linewidth=0.8, label=tenth)
    if floor is not None:
        axes.axhline(floor, color="gray", linestyle=":", label="real against real (halves)")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=figure.dpi)
    return path


def _axes(rows: Sequence[Row]) -> tuple[Figure, Axes]:
    """A figure with the plot's axes, titles and grid."""
    with needed("a plot", "bench"):
        from matplotlib import color_sequences
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")  # no pyplot: no global state
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=color_sequences["tab20"])
    suffix = f" ({rows[0]['samples']} samples each)" if _same_count(rows) else ""
    axes.set(title=f"Quality against speed: circles exact, triangles relaxed{suffix}")
    axes.set(xlabel="speed-up over plain decoding", ylabel="FID (lower is better)")
    axes.grid(alpha=0.3)
    return figure, axes


def _name(row: Row, rows: Sequence[Row]) -> str:
    counted = row.get("samples") and not _same_count(rows)
    return f"{row['method']}, n = {row['samples']}" if counted else str(row["method"])


def _same_count(rows: Sequence[Row]) -> bool:
    return len({row.get("samples") for row in rows}) == 1 and bool(rows[0].get("samples"))
