"""The pictures of the report: tau against node budget, acceptance against drafts, FID against speed-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import Row, read_results

NOT_RULES = ("drafts", "contexts", "overlap")


def draw_plots(out: Path) -> list[Path]:
    """Draw what the results in ``out`` allow; the files written."""
    import matplotlib

    matplotlib.use("Agg")
    found = {n: read_results(out, n) for n in ("acceptance", "single_position", "speed", "quality")}
    rows = {n: f["rows"] if f else [] for n, f in found.items()}
    drawn = []
    if rows["acceptance"]:
        drawn.append(_tau(rows["acceptance"], out / "tau.png"))
    if rows["single_position"]:
        drawn.append(_single(rows["single_position"], out / "single_position.png"))
    if joined := join(rows["speed"], rows["quality"]):
        floor = next((r["fid"] for r in rows["quality"] if r["method"] == "real against real"), None)
        drawn.append(_trade(joined, floor, out / "fid_speed.png"))
    return drawn


def join(speed: list[Row], quality: list[Row]) -> list[Row]:
    """Rows of methods that have both a speed and a quality; of plain decoding, the baseline."""
    fastest = {r["method"]: r for r in sorted(speed, key=lambda r: r["speedup"])}
    return [{**fastest[q["method"]], **q} for q in quality if q["method"] in fastest]


def best_by_budget(rows: list[Row]) -> dict[str, dict[int, Row]]:
    """For each rule (with its drafts) and budget the row of the shape with the largest tau."""
    best: dict[str, dict[int, Row]] = {}
    for row in sorted(rows, key=lambda r: r["tau"]):
        best.setdefault(f"{row['rule']} ({row['drafts']})", {})[row["nodes"]] = row
    return best


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), constrained_layout=True)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _tau(rows: list[Row], path: Path) -> Path:
    figure, axes = _axes("Block efficiency by rule, best shape of each budget", "drafts a round", "τ, tokens a round")
    series = best_by_budget(rows).items()
    for i, (name, points) in enumerate(sorted(series, key=lambda s: -max(r["tau"] for r in s[1].values()))):
        nodes = sorted(points)
        exact = points[nodes[0]]["exact"]
        marker, line = "osD^vPX*"[i % 8], "-" if exact else "--"
        axes.plot(nodes, [points[n]["tau"] for n in nodes], marker=marker, linestyle=line, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.legend(title="solid: exact, dashed: relaxed", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(figure, path)


def _single(rows: list[Row], path: Path) -> Path:
    title = f"One position, {rows[0]['contexts']} recorded contexts, overlap Σ min(p, q) = {rows[0]['overlap']:.2f}"
    figure, axes = _axes(title, "drafts k", "chance that one is kept")
    for i, name in enumerate(n for n in rows[-1] if n not in NOT_RULES):
        points = [(r["drafts"], r[name]) for r in rows if r.get(name) is not None]
        style = {"color": "black", "linewidth": 2} if name.startswith("bound") else {"marker": "osD^vPX*"[i % 8]}
        dashed = "--" if "lantern" in name else "-"
        axes.plot(*zip(*points, strict=True), linestyle=dashed, label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks([r["drafts"] for r in rows], [str(r["drafts"]) for r in rows])
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(figure, path)


def _trade(rows: list[Row], floor: float | None, path: Path) -> Path:
    figure, axes = _axes("Quality against speed", "speed-up over plain decoding, batch 1", "FID (lower is better)")
    plain = next((r["fid"] for r in rows if r["method"] == "ar"), None)
    for row in rows:
        exact = row["certificate"] == "exact"
        axes.scatter(row["speedup"], row["fid"], marker="o" if exact else "^", color="C0" if exact else "C1")
        name = f"{row['method']} (n = {row['samples']})"
        axes.annotate(name, (row["speedup"], row["fid"]), xytext=(6, 4), textcoords="offset points", fontsize=8)
    if plain is not None:
        axes.axhline(plain, color="C0", linewidth=0.8, label="plain decoding")
        axes.axhline(1.1 * plain, color="C3", linestyle="--", linewidth=0.8, label="plain decoding + 10%")
    if floor is not None:
        axes.axhline(floor, color="gray", linestyle=":", label="real against real (halves)")
    axes.margins(x=0.25, y=0.15)
    axes.legend(fontsize=8, title="circles: exact, triangles: relaxed")
    return _save(figure, path)
