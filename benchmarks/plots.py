"""The plots of the report: tau by node budget, acceptance by drafts, FID by speed-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import Row, read_results
from specmm.metrics.report import draw_trade, join

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
    if both := join(rows["speed"], rows["quality"]):
        floor = next(
            (r["fid"] for r in rows["quality"] if r["method"] == "real against real"), None
        )
        drawn.append(draw_trade(both, out / "fid_speed.png", floor))
    return drawn


def best_by_budget(rows: list[Row]) -> dict[str, dict[int, Row]]:
    """For each rule (with its drafts) and budget the row of the shape with the largest tau."""
    best: dict[str, dict[int, Row]] = {}
    for row in sorted(rows, key=lambda r: r["tau"]):
        best.setdefault(f"{row['rule']} ({row['drafts']})", {})[row["nodes"]] = row
    return best


def new_axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    """A figure and its axes, with a grid."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), constrained_layout=True)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def save_figure(figure: Any, path: Path) -> Path:
    """Write ``figure`` to ``path``, which is returned."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _tau(rows: list[Row], path: Path) -> Path:
    figure, axes = new_axes(
        "Block efficiency by rule, best shape of each budget", "drafts a round", "τ, tokens a round"
    )
    series = best_by_budget(rows).items()
    for i, (name, points) in enumerate(
        sorted(series, key=lambda s: -max(r["tau"] for r in s[1].values()))
    ):
        nodes = sorted(points)
        exact = points[nodes[0]]["exact"]
        marker = "osD^vPX*"[i % 8]
        line = "-" if exact else "--"
        axes.plot(
            nodes, [points[n]["tau"] for n in nodes], marker=marker, linestyle=line, label=name
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.legend(
        title="solid: exact, dashed: relaxed",
        fontsize=8,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    return save_figure(figure, path)


def _single(rows: list[Row], path: Path) -> Path:
    overlap = f"overlap Σ min(p, q) = {rows[0]['overlap']:.2f}"
    title = f"One position, {rows[0]['contexts']} recorded contexts, {overlap}"
    figure, axes = new_axes(title, "drafts k", "chance that one is kept")
    for i, name in enumerate(n for n in rows[-1] if n not in NOT_RULES):
        points = [(r["drafts"], r[name]) for r in rows if r.get(name) is not None]
        style = (
            {"color": "black", "linewidth": 2}
            if name.startswith("bound")
            else {"marker": "osD^vPX*"[i % 8]}
        )
        dashed = "--" if "lantern" in name else "-"
        axes.plot(*zip(*points, strict=True), linestyle=dashed, label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks([r["drafts"] for r in rows], [str(r["drafts"]) for r in rows])
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return save_figure(figure, path)
