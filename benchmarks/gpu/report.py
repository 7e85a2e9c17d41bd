"""The page of what was measured: rounds by nodes, speed-up by tau, real speed-ups, in Markdown.

A round that keeps tau tokens takes the place of tau plain steps, so the speed-up is
(F + R·s) / (F + R·r / tau) for R plain steps of s and rounds of r milliseconds, and F of all else
that a picture takes (0 for models of tokens, where R falls out). The plain step is the
fastest of the modes that were measured: eager and captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.common import Row, read_results
from benchmarks.gpu.claims import claims_of
from benchmarks.gpu.kernels import bars, table, times_of
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.rounds import PLAIN, ROUND
from benchmarks.pages import markdown
from benchmarks.plots import new_axes, save_figure

NAME = "report.md"
LISTED = 4  # of the cases that had no time
ROUND_COLUMNS = {
    "mode": "mode",
    "method": "method",
    "nodes": "nodes",
    "round_ms": "round, ms",
    "draft_ms": "draft, ms",
    "verify_ms": "verify, ms",
    "host_share": "host share",
    "even": "τ to be even",
    "seconds": "a picture, s",
    "peak_mib": "peak of the case, MiB",
}
REAL_COLUMNS = {
    "batch": "batch",
    "dtype": "dtype",
    "mode": "mode",
    "method": "method",
    "speedup": "speed-up",
    "speedup_low": "quartile",
    "speedup_high": "quartile ",
    "tau": "τ",
    "host_overhead": "host share",
    "seconds": "seconds",
}


TRAINING_COLUMNS = {
    "model": "model",
    "batch": "rows a step",
    "tokens": "tokens a row",
    "rows_s": "rows a second",
    "target_share": "target's share",
    "peak_gib": "peak, GiB",
    "gib_at_20": "GiB at step 20",
    "gib_at_end": "GiB at the end",
}


def write_report(out: Path) -> Path:
    """Write the page and its pictures of the results in ``out``; returns the page."""
    results = {name: found for name in PARTS if (found := read_results(out, name))}
    matplotlib.use("Agg")
    text = ["# On a GPU", "", *_about(results)]
    for name, found in results.items():
        text += ["", f"## {name}: {PARTS[name].about}", "", *_state(found["environment"])]
        text += _section(name, found["rows"], out)
    page = out / NAME
    out.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(text) + "\n")
    return page


def _about(results: Mapping[str, Any]) -> list[str]:
    """Where the numbers come from, and what is missing."""
    lines = []
    facts = [found["environment"] for found in results.values()]
    for where in sorted({str(f["gpu"] or f["machine"]) for f in facts}):
        commits = sorted({f["git"] for f in facts if str(f["gpu"] or f["machine"]) == where})
        lines.append(f"Measured on {where}, commit {', '.join(commits)}.")
    if any(f["tiny"] for f in facts):
        lines.append("**A rehearsal with small shapes: the times mean nothing.**")
    if missing := [name for name in PARTS if name not in results]:
        lines.append(f"Not there yet: {', '.join(missing)}.")
    return lines


def _state(facts: Mapping[str, Any]) -> list[str]:
    """The part's dtype and versions, and what failed or was left."""
    dtype = facts["dtype"].removeprefix("torch.")
    lines = [f"- {dtype}, torch {facts['torch']}, {facts['date']}."]
    lines += [f"- Failed: {name or 'the part'} ({why})." for name, why in facts["errors"].items()]
    if facts["at"] or not (facts["finished"] or facts["errors"] or facts["left"]):
        lines.append(f"- **Stopped, incomplete**{', at: ' * bool(facts['at'])}{facts['at']}.")
    if left := facts["left"]:
        more = f" and {len(left) - LISTED} more" if len(left) > LISTED else ""
        lines.append(f"- Left for want of time: {', '.join(left[:LISTED])}{more}.")
    return lines


def _section(name: str, rows: Sequence[Row], out: Path) -> list[str]:
    if name == "kernels":
        times = times_of(rows)
        syncs = [r["error"] for r in rows if r.get("check") == "host syncs a round"]
        listed = [f"- {line}" for line in bars(times, *(syncs or [None])).splitlines()]
        return ["", *listed, "", table(times)]
    if name == "training":
        return ["", *_table(TRAINING_COLUMNS, rows)]
    if any("round_ms" in row for row in rows):
        return _rounds(name, rows, out)
    return ["", *_table(REAL_COLUMNS, rows), *_picture(_draw_real(name, rows, out))]


def _rounds(name: str, rows: Sequence[Row], out: Path) -> list[str]:
    text = []
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        plain = fastest_plain(mine)
        if plain is None:
            continue
        shown = [row | {"even": break_even(row, plain)} for row in mine]
        text += ["", f"### {model}, batch {batch}", "", *_table(ROUND_COLUMNS, shown)]
        text += _too_good(shown)
        text += [
            f"\nPublished: {c.method}: τ {c.tau or 'not stated'}, {c.speedup}× ({c.source})"
            "; such ratios are mostly over eager plain decoding."
            for c in claims_of(model)
        ]
        file = out / f"{name}-{_slug(model)}-{batch}.png"
        text += _picture(_draw_gain(f"{model}, batch {batch}", model, mine, plain, file))
    return text


def _too_good(rows: Iterable[Row]) -> list[str]:
    """A sentence about rounds that take less than a plain step, which does less than they do."""
    found = [r["method"] for r in rows if r["method"] != PLAIN and (r["even"] or 1) < 1]
    if not found:
        return []
    return [f"\n**Faster than a plain step, which must be mismeasured: {', '.join(found)}.**"]


def fastest_plain(rows: Iterable[Row]) -> Row | None:
    """The row of the fastest plain step; None if there is none."""
    return min(
        (row for row in rows if row["method"] == PLAIN), key=lambda r: r["round_ms"], default=None
    )


def gain(row: Row, plain: Row, tau: float) -> float:
    """The speed-up of ``row`` over ``plain`` if its rounds keep ``tau`` tokens."""
    fixed = row.get("fixed_ms", 0.0)
    rounds = plain.get("rounds", 1)
    before = plain.get("fixed_ms", 0.0) + rounds * plain["round_ms"]
    return float(before / (fixed + rounds * row["round_ms"] / tau))


def break_even(row: Row, plain: Row) -> float | None:
    """The tokens a round at which ``row`` is as fast as ``plain``; None if it never is."""
    fixed = row.get("fixed_ms", 0.0)
    rounds = plain.get("rounds", 1)
    left = plain.get("fixed_ms", 0.0) + rounds * plain["round_ms"] - fixed
    return rounds * row["round_ms"] / left if left > 0 else None


def _table(columns: Mapping[str, str], rows: Sequence[Row]) -> list[str]:
    used = {key: head for key, head in columns.items() if any(r.get(key) is not None for r in rows)}
    lines = ([_cell(row.get(key)) for key in used] for row in rows)
    return markdown(used.values(), lines).splitlines()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def _picture(file: Path | None) -> list[str]:
    return [] if file is None else ["", f"![{file.stem}]({file.name})"]


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower())


def _draw_gain(title: str, model: str, rows: Sequence[Row], plain: Row, file: Path) -> Path | None:
    """Lines of the speed-up by tau, up to a round's longest path, of each method in its fastest
    mode; published taus and speed-ups.
    """
    fastest = {
        row["method"]: row for row in sorted(rows, key=lambda r: r["round_ms"], reverse=True)
    }
    lines = [row for row in rows if row["method"] != PLAIN and row is fastest[row["method"]]]
    if not lines:
        return None
    figure, axes = new_axes(title, "τ, tokens a round", "speed-up over the fastest plain step")
    for i, row in enumerate(lines):
        taus = [1 + row["depth"] * step / 40 for step in range(41)]
        whole = f", {ROUND}" if row["mode"] == ROUND else ""
        name = f"{row['method']}{whole}: {row['nodes']} nodes, {row['round_ms']:.2f} ms"
        style = ("-", "--", ":", "-.")[i // 10 % 4]
        axes.plot(taus, [gain(row, plain, tau) for tau in taus], linestyle=style, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    for i, claim in enumerate(claims_of(model)):
        colour = f"C{9 - i}"
        if claim.tau:
            axes.axvline(claim.tau, color=colour, linewidth=1, linestyle=(0, (1, 1)))
        if claim.speedup:
            text = f"published: {claim.method}, {claim.speedup}×"
            marker = dict(marker="*", markersize=14, linestyle="none")
            if claim.tau:
                axes.plot(claim.tau, claim.speedup, color=colour, label=text, **marker)
            else:
                axes.axhline(claim.speedup, color=colour, linestyle=(0, (1, 1)), label=text)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.set_figheight(7.5)
    return save_figure(figure, file)


def _draw_real(name: str, rows: Sequence[Row], out: Path) -> Path:
    """Bars of the real speed-ups, those that lose to plain decoding in grey."""
    figure, axes = new_axes(PARTS[name].about, "speed-up over the fastest plain decoding", "")
    names = [f"{r['method']}, {r['mode']}, batch {r['batch']}" for r in rows]
    heights = [r["speedup"] for r in rows]
    colours = ["tab:blue" if h > 1 else "lightgrey" for h in heights]
    axes.barh(names, heights, color=colours)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    figure.set_figheight(1.5 + 0.35 * len(rows))
    axes.tick_params(axis="y", labelsize=7)
    return save_figure(figure, out / f"{name}.png")
