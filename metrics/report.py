"""Speed against quality: rows of methods from result files, one Markdown table, one picture.

Result files are what ``specmm bench --json`` and ``specmm eval … --json`` print and what the
benchmarks write (rows in .csv or .json). A row is a dictionary: ``method``, ``speedup`` and
``certificate`` from a speed measurement, ``fid`` (or another metric) and ``samples`` from a quality
one.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specmm.metrics.measurement import Measurement
from specmm.metrics.results import measurements, same_protocol

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
    """The speed rows and the quality rows of all files.

    Raises ``ValueError`` for a file that is none of the known ones, and for two measurements of one
    metric that were made differently.
    """
    speed: list[Row] = []
    quality: dict[str, Row] = {}
    measured: dict[str, Measurement] = {}
    for path in paths:
        for row in _read(path):
            if isinstance(row.get("speedup"), int | float):
                speed.append(row)
            elif isinstance(found := row.get("measurement"), Measurement):
                same_protocol(measured.setdefault(found.metric, found), found)
                quality.setdefault(row["method"], {}).update(_measured(row["method"], found))
            elif isinstance(row.get("fid"), int | float):
                quality.setdefault(row["method"], {}).update(row)
    return speed, list(quality.values())


def join(speed: Sequence[Row], quality: Sequence[Row]) -> list[Row]:
    """Rows of methods that have both a speed and a quality; of plain decoding, the fastest."""
    fastest = {r["method"]: r for r in sorted(speed, key=lambda r: r["speedup"])}
    return [{**fastest[q["method"]], **q} for q in quality if q["method"] in fastest]


def joined(speed: Sequence[Row], quality: Sequence[Row]) -> list[Row]:
    """As ``join``, fastest last, with ``fid_ratio`` to plain decoding; raises ``ValueError`` where
    nothing meets.
    """
    rows = [r for r in join(speed, quality) if r.get("fid") is not None]
    if not rows:
        names = [
            ", ".join(sorted({r["method"] for r in side})) or "none" for side in (speed, quality)
        ]
        raise ValueError(
            f"no method has both a speed and a FID: speeds of {names[0]}, FIDs of {names[1]}; "
            "give eval the method's name with --name"
        )
    plain = next((r["fid"] for r in rows if r["method"] == PLAIN), None)
    ratios = [{} if plain is None else {"fid_ratio": r["fid"] / plain} for r in rows]
    return sorted(
        ({**r, **extra} for r, extra in zip(rows, ratios, strict=True)), key=lambda r: r["speedup"]
    )


def table(rows: Sequence[Row], columns: dict[str, str] | None = None) -> str:
    """A Markdown table of ``rows``; ``columns`` picks and titles them (default: all, by their
    keys).
    """
    if not rows:
        return ""
    titles = columns or {k: k for k in dict.fromkeys(k for row in rows for k in row)}
    used = {k: t for k, t in titles.items() if any(row.get(k) is not None for row in rows)}
    lines = ["| " + " | ".join(used.values()) + " |", "|---" * len(used) + "|"]
    lines += ["| " + " | ".join(cell(row.get(k)) for k in used) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A value in a Markdown table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return (
            f"{value:.4f}"
            if abs(value) < 0.1
            else f"{value:.3f}"
            if abs(value) < 10
            else f"{value:.1f}"
        )
    return str(value).replace("|", "\\|")


def _read(path: Path) -> Iterable[Row]:
    if path.suffix == ".csv":
        return _csv(path)
    if path.suffix != ".json":
        raise ValueError(
            f"{path} must be .json or .csv, got {path.suffix or 'no suffix'}; give results of bench or eval"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} must be JSON, got something else; write it with --json") from None
    rows = value.get("rows", value) if isinstance(value, dict) else value
    if isinstance(rows, list) and rows and all(isinstance(r, dict) and "method" in r for r in rows):
        return [{**r, "method": r.get("label", r["method"]), "certificate": _kind(r)} for r in rows]
    found = measurements(value, path)
    return [{"method": value.get("name", path.stem), "measurement": m} for m in found]


def _kind(row: Row) -> Any:
    """The certificate's kind: bench holds a whole certificate, the benchmarks' rows its kind alone."""
    found = row.get("certificate")
    return found.get("kind") if isinstance(found, dict) else found


def _csv(path: Path) -> list[Row]:
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("# ")
    ]
    rows = [{k: _value(v) for k, v in row.items() if k} for row in csv.DictReader(lines)]
    if not rows or not {"method"} <= set(rows[0]) or not {"speedup", "fid"} & set(rows[0]):
        raise ValueError(
            f"{path} must have columns 'method' and 'speedup' or 'fid'; give speed.csv or quality.csv"
        )
    return rows


def _value(text: Any) -> Any:
    if not text:
        return None
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def _measured(method: str, found: Measurement) -> Row:
    row = {
        "method": method,
        found.metric: found.value,
        "samples": (found.protocol.get("counts") or [None])[0],
    }
    if found.interval:
        row |= {
            f"{found.metric}_low": found.interval.low,
            f"{found.metric}_high": found.interval.high,
        }
    return row
