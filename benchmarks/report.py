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
    *("cifar_fid", "mar", "var"),
    *(
        "vlm_speed_llava",
        "vqa_accuracy_llava",
        "verdict",
        "vlm_speed_smollava",
        "vqa_accuracy_smollava",
    ),
    *("text_speed_coder", "text_speed_coder_compiled", "text_speed_smollm2", "jobs", "assisted"),
    *("draft_free_speed", "loading"),
)
COMPILED = (
    " A round is one compiled program here, all of it under verify; host is what is left outside. "
    "The first calls, which compile, are not timed."
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
        ]
    ]
    parts += ["## Bars", table(held)]
    for section in (_speed, _quality, _acceptance, _single, _auto, _metrics, _families, _languages):
        parts += section(rows)
    parts += [f"![{TITLES.get(p, p)}]({p})" for p in plots]
    parts += ["## Where and when", _provenance(results)]
    return "\n\n".join(p for p in parts if p) + "\n"


def _speed(rows: dict[str, list[Row]]) -> list[str]:
    return [
        *_speed_of(rows["speed"], "Speed"),
        *_speed_of(rows["speed_compiled"], "Speed, compiled", COMPILED),
    ]


def _speed_of(rows: list[Row], title: str, note: str = "") -> list[str]:
    if not rows:
        return []
    plain = next(r for r in rows if r["baseline"])
    text = (
        f"Batch 1, medians of {plain['pictures']} pictures a method, the same seeds and classes "
        "for all, methods in turn in one process. The baseline is the fastest plain decoding here: "
        f"{plain['method']} in {plain['dtype']}. Seconds and speed-up are whole calls, pixels "
        "included; host share, ideal (τ · plain step / (draft + verify)), and realised / ideal are "
        f"of the token loop. log p is the target's own, under guidance.{note}"
    )
    return [f"## {title}", text, table(rows, SPEED)]


def _families(rows: dict[str, list[Row]]) -> list[str]:
    """MAR by setting and VAR by N."""
    found = []
    if rows["mar"]:
        text = (
            "Batch 1, whole calls; `release`, `aligned` and `paper` are CSpD's between two models, "
            "whose distribution is not verified."
        )
        found += ["## Continuous tokens: pocket/mar", text, table(rows["mar"], MAR)]
    if rows["var"]:
        text = (
            "Whole calls; ideal: the arithmetic of the large model alone over that of both in turn."
        )
        found += ["## Next scales: pocket/var", text, table(rows["var"], VAR)]
    return found


def _languages(rows: dict[str, list[Row]]) -> list[str]:
    """Answers about pictures and continued text, by method."""
    found = []
    for name in ("llava", "smollava"):
        if rows[f"vlm_speed_{name}"]:
            found += [
                f"## Questions about pictures: pocket/{name}",
                table(rows[f"vlm_speed_{name}"], LANGUAGE),
            ]
        if rows[f"vqa_accuracy_{name}"]:
            found += [
                f"## Answers that are right, pocket/{name}",
                table(rows[f"vqa_accuracy_{name}"]),
            ]
    if rows["verdict"]:
        found += ["## Speculative Verdict, pocket/llava and its experts", table(rows["verdict"])]
    for name, title in (
        ("text_speed_coder", "pocket/coder"),
        ("text_speed_coder_compiled", "pocket/coder, compiled"),
        ("text_speed_smollm2", "SmolLM2-135M"),
    ):
        if rows[name]:
            found += [f"## Continued text: {title}", table(rows[name], TEXT)]
    return found


def _quality(rows: dict[str, list[Row]]) -> list[str]:
    if not rows["quality"]:
        return []
    test = next(
        (r["nearest_train_of_test"] for r in rows["quality"] if "nearest_train_of_test" in r), None
    )
    text = (
        "FID and KID (whole-set unbiased estimate) against the training pictures, Inception in "
        "bfloat16 for all; the ratios to plain decoding are at equal counts. The last row is the "
        "floor: random disjoint halves of the training pictures against one another. Emoji are far "
        "from what Inception knows: compare rows, not papers. Distances to the nearest training "
        "picture are root mean squares of pixel differences in [0, 1]"
    )
    text += f"; the held-out pictures' median is {cell(test)}." if test is not None else "."
    return ["## Quality", text, table(rows["quality"], QUALITY)]


def _acceptance(rows: dict[str, list[Row]]) -> list[str]:
    if not rows["acceptance"]:
        return []
    quality = {r["method"]: r for r in rows["quality"]}
    best = [
        by_nodes[n]
        for by_nodes in best_by_budget(rows["acceptance"]).values()
        for n in sorted(by_nodes)
    ]
    for row in best:
        row["fid"] = quality.get(row.get("method"), {}).get("fid")
    levels = sorted({k for r in best for k in r if k.startswith("level_")})
    columns = {
        k: k for k in ("nodes", "rule", "drafts", "exact", "form", "depth", "tau", "tv", "fid")
    }
    columns |= {"tau": "τ", "tv": "TV / token", "fid": "FID"} | {
        k: k.replace("_", " ") for k in levels
    }
    text = (
        f"Block efficiency at equal node budgets, {best[0]['pictures']} pictures; each rule with "
        "the better of its shapes (all are in acceptance.csv). `level d`: of the rounds that kept "
        "level d - 1, the share that kept one of the next. FID is the quality benchmark's: plain "
        "decoding's for exact rules, which have its distribution, and for relaxed ones that of the "
        "model's own tree."
    )
    return [
        "## Acceptance by rule",
        text,
        table(sorted(best, key=lambda r: (r["nodes"], -r["tau"])), columns),
    ]


def _single(rows: dict[str, list[Row]]) -> list[str]:
    if not rows["single_position"]:
        return []
    text = (
        "The chance that one of k drafts is kept at one position, on distributions recorded from "
        "real generations (first level of the block drafter). The bound is that of optimal "
        "transport for k independent drafts."
    )
    return ["## One position", text, table(rows["single_position"])]


def _auto(rows: dict[str, list[Row]]) -> list[str]:
    if not rows["auto"]:
        return []
    text = (
        "Calls one after another; over the fixed method that is best in the median. `first` is the "
        "first call on a machine over plain decoding's; `later` is of processes after it."
    )
    return ["## Method auto", text, table(rows["auto"], AUTO)]


def _metrics(rows: dict[str, list[Row]]) -> list[str]:
    parts = []
    if rows["cifar_fid"]:
        text = (
            "CIFAR-10's test pictures against training ones, by the offline Inception in float32."
        )
        parts += ["## Real against real", text, table(rows["cifar_fid"])]
    return parts


def _provenance(results: dict[str, dict[str, Any] | None]) -> str:
    wanted = (
        "model",
        "machine",
        "cores",
        "threads",
        "gpu",
        "torch",
        "python",
        "dtype",
        "date",
        "git",
        "load",
    )
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
