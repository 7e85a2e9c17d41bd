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
from benchmarks.columns import AUTO, LANGUAGE, MAR, QUALITY, SPEED, TEXT, VAR
from benchmarks.common import Row, read_results
from benchmarks.drafter_bars import drafter_bars
from benchmarks.language_bars import answer_bars, text_bars, vlm_bars
from benchmarks.plots import best_by_budget, draw_plots
from specmm.metrics.report import cell, table

NAMES = (
    *("speed", "speed_compiled", "quality", "acceptance", "single_position", "auto"),
    *("cifar_fid", "mar", "var", "vlm_speed_llava", "vqa_accuracy_llava", "verdict"),
    *("vlm_speed_smollava", "vqa_accuracy_smollava", "text_speed_coder"),
    *("text_speed_coder_compiled", "text_speed_smollm2", "jobs", "assisted"),
    *("draft_free_speed", "loading", "serving_coder", "serving_llava"),
)
COMPILED = (
    " A round is one compiled program here, all of it under verify; host is what is left outside. "
    "The first calls, which compile, are not timed."
)
ONE_POSITION = (
    "The chance that one of k drafts is kept at one position, on distributions recorded from "
    "real generations (first level of the block drafter). The bound is that of optimal "
    "transport for k independent drafts."
)
ABOUT_AUTO = (
    "Calls one after another; over the fixed method that is best in the median. `first` is the "
    "first call on a machine over plain decoding's; `later` is of processes after it."
)
REAL = "CIFAR-10's test pictures against training ones, by the offline Inception in float32."
ABOUT_MAR = (
    "Batch 1, whole calls; `release`, `aligned` and `paper` are CSpD's between two models, "
    "whose distribution is not verified."
)
ABOUT_VAR = "Whole calls; ideal: the arithmetic of the large model alone over that of both in turn."
QUALITIES = (
    "FID and KID (whole-set unbiased estimate) against the training pictures, Inception in "
    "bfloat16 for all; the ratios to plain decoding are at equal counts. The last row is the "
    "floor: random disjoint halves of the training pictures against one another. Emoji are far "
    "from what Inception knows: compare rows, not papers. Distances to the nearest training "
    "picture are root mean squares of pixel differences in [0, 1]"
)
LANGUAGES: tuple[tuple[str, str, dict[str, str] | None], ...] = (
    ("vlm_speed_llava", "Questions about pictures: pocket/llava", LANGUAGE),
    ("vqa_accuracy_llava", "Answers that are right, pocket/llava", None),
    ("vlm_speed_smollava", "Questions about pictures: pocket/smollava", LANGUAGE),
    ("vqa_accuracy_smollava", "Answers that are right, pocket/smollava", None),
    ("verdict", "Speculative Verdict, pocket/llava and its experts", None),
    ("text_speed_coder", "Continued text: pocket/coder", TEXT),
    ("text_speed_coder_compiled", "Continued text: pocket/coder, compiled", TEXT),
    ("text_speed_smollm2", "Continued text: SmolLM2-135M", TEXT),
)
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


def _section(
    title: str, text: str, rows: list[Row], columns: dict[str, str] | None = None
) -> list[str]:
    """A heading, what the table shows, and the table, where there are rows."""
    return [f"## {title}", text, table(rows, columns)] if rows else []


def _speed(rows: list[Row], title: str, note: str = "") -> list[str]:
    plain = next((r for r in rows if r["baseline"]), {"pictures": 0, "method": "", "dtype": ""})
    text = (
        f"Batch 1, medians of {plain['pictures']} pictures a method, the same seeds and classes "
        "for all, methods in turn in one process. The baseline is the fastest plain decoding here: "
        f"{plain['method']} in {plain['dtype']}. Seconds and speed-up are whole calls, pixels "
        "included; host share, ideal (τ · plain step / (draft + verify)), and realised / ideal are "
        f"of the token loop. log p is the target's own, under guidance.{note}"
    )
    return _section(title, text, rows, SPEED)


def _sections(rows: dict[str, list[Row]]) -> list[str]:
    """All tables but that of bars."""
    return [
        *_speed(rows["speed"], "Speed"),
        *_speed(rows["speed_compiled"], "Speed, compiled", COMPILED),
        *_quality(rows["quality"]),
        *_acceptance(rows["acceptance"], rows["quality"]),
        *_section("One position", ONE_POSITION, rows["single_position"]),
        *_section("Method auto", ABOUT_AUTO, rows["auto"], AUTO),
        *_section("Real against real", REAL, rows["cifar_fid"]),
        *_section("Continuous tokens: pocket/mar", ABOUT_MAR, rows["mar"], MAR),
        *_section("Next scales: pocket/var", ABOUT_VAR, rows["var"], VAR),
        *(
            part
            for name, title, columns in LANGUAGES
            for part in _section(title, "", rows[name], columns)
        ),
    ]


def _quality(rows: list[Row]) -> list[str]:
    test = next((r["nearest_train_of_test"] for r in rows if "nearest_train_of_test" in r), None)
    text = QUALITIES
    text += f"; the held-out pictures' median is {cell(test)}." if test is not None else "."
    return _section("Quality", text, rows, QUALITY)


def _acceptance(rows: list[Row], quality: list[Row]) -> list[str]:
    if not rows:
        return []
    fids = {r["method"]: r.get("fid") for r in quality}
    by_rule = best_by_budget(rows).values()
    best = [by_nodes[n] for by_nodes in by_rule for n in sorted(by_nodes)]
    for row in best:
        row["fid"] = fids.get(row.get("method"))
    levels = sorted({k for r in best for k in r if k.startswith("level_")})
    columns = {k: k for k in ("nodes", "rule", "drafts", "exact", "form", "depth")}
    columns |= {"tau": "τ", "tv": "TV / token", "fid": "FID"}
    columns |= {k: k.replace("_", " ") for k in levels}
    text = (
        f"Block efficiency at equal node budgets, {best[0]['pictures']} pictures; each rule with "
        "the better of its shapes (all are in acceptance.csv). `level d`: of the rounds that kept "
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
