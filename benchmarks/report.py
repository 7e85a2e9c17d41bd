"""benchmarks/results/README.md from the result files: bars, tables, plots, machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.bars import (
    bars,
    cifar_bar,
    jacobi_bar,
    job_bars,
    loading_bar,
    mar_bars,
    round_bars,
    server_bars,
    var_bars,
)
from benchmarks.common import Row, columns_of, read_results
from benchmarks.drafter_bars import drafter_bars
from benchmarks.language_bars import answer_bars, text_bars, vlm_bars
from benchmarks.plots import best_by_budget, draw_plots
from specmm.metrics.report import table

NAMES = (
    *("speed", "speed_compiled", "quality", "acceptance", "single_position", "auto"),
    *("cifar_fid", "mar", "var", "vlm_speed_llava", "vqa_accuracy_llava", "verdict"),
    *("vlm_speed_smollava", "vqa_accuracy_smollava", "text_speed_coder"),
    *("text_speed_coder_compiled", "text_speed_smollm2", "jobs", "assisted"),
    *("draft_free_speed", "loading", "serving_coder", "serving_llava"),
)
SPEED = (
    "Batch 1, medians; the same seeds and classes for all, methods in turn in one process. The "
    "baseline is the fastest plain decoding here. Seconds and speed-up are whole calls, pixels "
    "included; host overhead, ideal (τ · plain step / (draft + verify)), and what is realised of "
    "it are of the token loop. The log likelihood is the target's own, under guidance."
)
COMPILED = (
    "As above. A round is one compiled program here, all of it under verify; host is what is left "
    "outside. The first calls, which compile, are not timed."
)
ONE_POSITION = (
    "The chance that one of k drafts is kept at one position, on distributions recorded from "
    "real generations (first level of the block drafter). The bound is that of optimal "
    "transport for k independent drafts."
)
AUTO = (
    "Calls one after another; over the fixed method that is best in the median. `first` is the "
    "first call on a machine over plain decoding's; `later` is of processes after it."
)
REAL = "CIFAR-10's test pictures against training ones, by the offline Inception in float32."
MAR = (
    "Batch 1, whole calls; `release` is CSpD's between two models, whose distribution is not "
    "verified."
)
VAR = "Whole calls; ideal: the arithmetic of the large model alone over that of both in turn."
QUALITY = (
    "FID and KID (whole-set unbiased estimate) against the training pictures, Inception in "
    "bfloat16 for all; the ratios to plain decoding are at equal counts. The last row is the "
    "floor: random disjoint halves of the training pictures against one another. Emoji are far "
    "from what Inception knows: compare rows, not papers. Distances to the nearest training "
    "picture are root mean squares of pixel differences in [0, 1]."
)
SECTIONS = {  # after that of acceptance: titles, and what their tables show
    "single_position": ("One position", ONE_POSITION),
    "auto": ("Method auto", AUTO),
    "cifar_fid": ("Real against real", REAL),
    "mar": ("Continuous tokens: pocket/mar", MAR),
    "var": ("Next scales: pocket/var", VAR),
    "vlm_speed_llava": ("Questions about pictures: pocket/llava", ""),
    "vqa_accuracy_llava": ("Answers that are right, pocket/llava", ""),
    "vlm_speed_smollava": ("Questions about pictures: pocket/smollava", ""),
    "vqa_accuracy_smollava": ("Answers that are right, pocket/smollava", ""),
    "verdict": ("Speculative Verdict, pocket/llava and its experts", ""),
    "text_speed_coder": ("Continued text: pocket/coder", ""),
    "text_speed_coder_compiled": ("Continued text: pocket/coder, compiled", ""),
    "text_speed_smollm2": ("Continued text: SmolLM2-135M", ""),
}
KINDS = ("prose", "tasks")  # of prompts of SmolLM2
TITLES = {
    "mar.png": "MAR: FID against speed-up",
    "var.png": "VAR and CoDe: FID against speed-up",
    "tau.png": "Block efficiency by rule",
    "single_position.png": "Acceptance of one position",
    "fid_speed.png": "FID against speed-up",
}


def write_report(out: Path) -> Path:
    """Draw the plots and write ``README.md`` from whatever results are in ``out``."""
    plots = [p.name for p in draw_plots(out)] + [
        n for n in ("mar.png", "var.png") if (out / n).exists()
    ]
    path = out / "README.md"
    path.write_text(render({name: read_results(out, name) for name in NAMES}, plots))
    return path


def render(results: dict[str, dict[str, Any] | None], plots: Sequence[str] = ()) -> str:
    """The report as Markdown."""
    rows = {n: (found or {}).get("rows", []) for n, found in results.items()}
    rows = {n: rows.get(n, []) for n in NAMES}
    measured = (results.get("text_speed_smollm2") or {}).get("environment", {})
    smol = f" in {measured['dtype']}" if "dtype" in measured else ""
    parts = [
        "# Measured results",
        "Written by `python -m benchmarks.run report` from the files beside it.",
    ]
    held = [
        {"what": b.what, "bar": b.wanted, "found": b.found, "": b.verdict}
        for b in [
            *bars(rows["speed"], rows["quality"], rows["auto"]),
            *(
                replace(b, what=f"{b.what}, compiled")
                for b in round_bars(rows["speed_compiled"], rows["quality"])
            ),
            jacobi_bar(rows["draft_free_speed"]),
            cifar_bar(rows["cifar_fid"]),
            *mar_bars(rows["mar"]),
            *var_bars(rows["var"]),
            *vlm_bars(rows["vlm_speed_llava"]),
            *answer_bars(rows["vqa_accuracy_llava"], rows["verdict"]),
            *text_bars(rows["text_speed_coder"], "pocket/coder", ("code",), 2.5, 1.7),
            *text_bars(
                rows["text_speed_coder_compiled"], "pocket/coder, compiled", ("code",), 2.5, 1.7
            )[:2],
            *(
                bar
                for kind in KINDS
                for bar in text_bars(
                    rows["text_speed_smollm2"], f"SmolLM2-135M{smol}, {kind}", (kind,), 2.0
                )
            ),
            *drafter_bars(rows),
            *job_bars(rows["jobs"]),
            loading_bar(rows["loading"]),
            *server_bars(rows["serving_coder"], "pocket/coder"),
            *server_bars(rows["serving_llava"], "pocket/llava"),
        ]
    ]
    parts += ["## Bars", table(held)]
    parts += _sections(rows)
    parts += [f"![{TITLES.get(p, p)}]({p})" for p in plots]
    parts += ["## Where and when", _provenance(results)]
    return "\n\n".join(p for p in parts if p) + "\n"


def _section(title: str, text: str, rows: list[Row], columns: Sequence[str] = ()) -> list[str]:
    """A heading, what the table shows, and the table, where there are rows."""
    shown = columns or columns_of(rows)
    return [f"## {title}", text, table(rows, {k: k for k in shown})] if rows else []


def _sections(rows: dict[str, list[Row]]) -> list[str]:
    """All tables but that of bars."""
    return [
        *_section("Speed", SPEED, rows["speed"]),
        *_section("Speed, compiled", COMPILED, rows["speed_compiled"]),
        *_section("Quality", QUALITY, rows["quality"]),
        *_acceptance(rows["acceptance"], rows["quality"]),
        *(part for name, about in SECTIONS.items() for part in _section(*about, rows[name])),
    ]


def _acceptance(rows: list[Row], quality: list[Row]) -> list[str]:
    if not rows:
        return []
    fids = {r["method"]: r.get("fid") for r in quality}
    by_rule = best_by_budget(rows).values()
    best = [by_nodes[n] for by_nodes in by_rule for n in sorted(by_nodes)]
    for row in best:
        row["fid"] = fids.get(row.get("method"))
    levels = sorted({k for r in best for k in r if k.startswith("level_")})
    columns = ("nodes", "rule", "drafts", "exact", "form", "depth", "tau", "tv", "fid", *levels)
    text = (
        f"Block efficiency at equal node budgets, {best[0]['pictures']} pictures; each rule with "
        "the better of its shapes (all are in acceptance.csv). `level_d`: of the rounds that kept "
        "level d - 1, the share that kept one of the next. FID is the quality benchmark's: plain "
        "decoding's for exact rules, which have its distribution, and for relaxed ones that of the "
        "model's own tree."
    )
    best.sort(key=lambda r: (r["nodes"], -r["tau"]))
    return _section("Acceptance by rule", text, best, columns)


def _provenance(results: dict[str, dict[str, Any] | None]) -> str:
    wanted = ("model", "machine", "cores", "threads", "gpu", "torch", "python")
    wanted += ("dtype", "date", "git", "load")
    found = [
        {"benchmark": name} | {k: result["environment"].get(k) for k in wanted}
        for name, result in results.items()
        if result is not None
    ]
    note = (
        "A `+` after the commit: library code differed from it. `load`: the machine's load at the "
        "start."
    )
    return table(found) + f"\n\n{note}" if found else "Nothing was measured."
