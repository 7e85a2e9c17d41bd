"""The bars, and whether the measured numbers clear them: functions of result rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.common import Row
from specmm.metrics.report import join

ENOUGH = 2000  # samples below which FID and KID are not held against the bar


@dataclass(frozen=True)
class Bar:
    """One line of the table: the bar, what was found, and whether it is met (None: unknown)."""

    what: str
    wanted: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """One word."""
        return "not measured" if self.met is None else "met" if self.met else "**not met**"


def bars(speed: Sequence[Row], quality: Sequence[Row], auto: Sequence[Row]) -> list[Bar]:
    """All bars of tokens."""
    *found, realised = round_bars(speed, quality)
    return [*found, *auto_bars(auto), realised]


def round_bars(speed: Sequence[Row], quality: Sequence[Row]) -> list[Bar]:
    """The bars of rounds: their speed, and what of it is lost outside the models."""
    chosen = [r for r in (_best_relaxed(speed, quality), _best_exact(speed)) if r is not None]
    return [
        _relaxed(speed, quality),
        _exact(speed),
        _share(chosen, "host_overhead", "host overhead per round", "≤ 15%", lambda x: x <= 0.15),
        _share(chosen, "realised", "realised over ideal", "≥ 0.85", lambda x: x >= 0.85),
    ]


def jacobi_bar(rows: Sequence[Row]) -> Bar:
    """That of exact decoding without a drafter."""
    what, wanted = "sjd as it is by default over plain decoding", "≥ 1.5×, certificate exact"
    row = next((r for r in rows if r["method"] == "sjd"), None)
    if row is None:
        return Bar(what, wanted, "", None)
    low, high = row["speedup_low"], row["speedup_high"]
    found = f"{row['speedup']:.2f}× (quartiles {low:.2f} to {high:.2f})"
    return Bar(what, wanted, found, row["speedup"] >= 1.5 and row["certificate"] == "exact")


def loading_bar(rows: Sequence[Row]) -> Bar:
    """That of published files, opened and converted; of the models that were measured."""
    what, wanted = "peak memory of opening published files over their size", "≤ 1.2"
    if not rows:
        return Bar(what, wanted, "", None)
    worst = max(rows, key=lambda r: r["over file"])
    models = ", ".join(dict.fromkeys(r["model"] for r in rows))
    found = f"{worst['over file']:.2f} at most ({models})"
    return Bar(what, wanted, found, worst["over file"] <= 1.2)


def mar_bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars of continuous tokens."""
    exact = next((r for r in rows if r["method"] == "exact"), None)
    speed = "exact CSpD over plain MAR, batch 1"
    calls = "sequential head calls a token, exact CSpD"
    if exact is None:
        return [Bar(speed, "≥ 1.8×", "", None), Bar(calls, "≤ 35", "", None), _pareto(rows)]
    found = exact["speedup"], exact["head_calls_per_token"]
    return [
        Bar(speed, "≥ 1.8×", f"{found[0]:.2f}×", found[0] >= 1.8),
        Bar(calls, "≤ 35", f"{found[1]:.1f}", found[1] <= 35),
        _pareto(rows),
    ]


def _pareto(rows: Sequence[Row]) -> Bar:
    """Of exact speculation at any number of iterations, on the front of FID against seconds."""
    what = "exact CSpD on the front of FID against time"
    wanted = "one setting of it"
    ours = [r for r in rows if r["method"].startswith("exact") and r.get("fid")]
    held = [r for r in ours if r["front"]]
    found = (
        ", ".join(f"{r['method']} ({r['speedup']:.2f}×, FID {r['fid']:.1f})" for r in held)
        or "none of it"
    )
    return Bar(what, wanted, found if ours else "", bool(held) if ours else None)


def var_bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars of next-scale models: CoDe at the planner's N, its FLOP ideal, the table by N."""
    what = "CoDe at the planner's N, batch 16"
    wanted = "≥ 1.7×, FID ≤ 1.10 of the large model's"
    ours = (
        r
        for r in rows
        if r["batch"] == 16 and r["method"] == "code, planner's N" and r.get("fid_ratio")
    )
    made = next(ours, None)
    found = ""
    held = None
    if made is not None:
        fid = f"FID {made['fid_ratio']:.3f} at {made['samples']} samples"
        found = f"{made['speedup']:.2f}× with N = {made['n']}, {fid}"
        held = made["speedup"] >= 1.7 and made["fid_ratio"] <= 1.1
    special = sorted({r["n"] for r in rows if r["method"].endswith("specialised") and r.get("fid")})
    listed = f"for N = {', '.join(map(str, special))}" if special else ""
    table = Bar("table by N, specialised pairs", "time, memory, FID", listed, bool(special) or None)
    return [Bar(what, wanted, found, held), *ideal_bars(rows), table]


def ideal_bars(rows: Sequence[Row]) -> list[Bar]:
    """How much of CoDe's arithmetic comes out as time, over all its N, for each batch size."""
    bars = []
    for batch in sorted({r["batch"] for r in rows if "realised" in r}):
        rated = sorted(
            (r for r in rows if "realised" in r and r["batch"] == batch),
            key=lambda r: r["realised"],
        )
        found = " to ".join(
            f"{r['realised']:.2f} with {r['method']}" for r in (rated[0], rated[-1])
        )
        held = all(r["realised"] >= 0.9 for r in rated)
        bars.append(Bar(f"CoDe over its FLOP ideal, batch {batch}", "≥ 0.9", found, held))
    return bars


def job_bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars of batch jobs."""
    ways = {r["way"]: r for r in rows}
    batched = max(
        (r for w, r in ways.items() if w.startswith("local")),
        key=lambda r: r["over_loop"],
        default=None,
    )
    rank = ways.get("accelerate, one rank")
    actor = ways.get("ray, one actor")
    local = ways.get("local, batch 16")
    bits = [r["bit_equal"] for r in rows if "bit_equal" in r]
    over = rank and local and local["items_a_second"] / rank["items_a_second"]
    return [
        measured(
            "a job over a loop of pipe()",
            "≥ 2×",
            batched and batched["over_loop"],
            lambda x: x >= 2,
        ),
        measured("accelerate over local, one rank", "≤ 1.05", over, lambda x: x <= 1.05),
        measured(
            "Ray over local, one actor",
            "≤ 1.15",
            actor and actor["over_local"],
            lambda x: x <= 1.15,
        ),
        Bar(
            "results bit-equal at batch 1, 4, 16",
            "100%",
            f"{sum(bits)} of {len(bits)}" if bits else "",
            all(bits) if bits else None,
        ),
    ]


def measured(
    what: str, wanted: str, found: float | None, holds: Callable[[float], bool], form: str = ".2f"
) -> Bar:
    """The bar of one number, written in ``form``; None is not measured."""
    return Bar(
        what,
        wanted,
        "" if found is None else format(found, form),
        None if found is None else holds(found),
    )


def good_enough(row: Row) -> bool:
    """Whether FID and KID are at most a tenth above plain decoding, on enough samples of both."""
    ratios = row.get("fid_ratio"), row.get("kid_ratio")
    return None not in ratios and max(ratios) <= 1.1 and row["compared_at"] >= ENOUGH  # type: ignore[type-var]


def _best_relaxed(speed: Sequence[Row], quality: Sequence[Row]) -> Row | None:
    """The fastest LANTERN++ whose quality holds; else with a known quality; else of all."""
    both = [r for r in join(list(speed), list(quality)) if r["method"].startswith("lantern++")]
    alone = [r for r in speed if r["method"].startswith("lantern++")]
    pool = [r for r in both if good_enough(r)] or both or alone
    return max(pool, key=lambda r: r["speedup"], default=None)


def _best_exact(speed: Sequence[Row]) -> Row | None:
    """The fastest exact sampled tree."""
    pool = [
        r for r in speed if r["method"].startswith("speculative") and r["certificate"] == "exact"
    ]
    return max(pool, key=lambda r: r["speedup"], default=None)


def _relaxed(speed: Sequence[Row], quality: Sequence[Row]) -> Bar:
    what = "LANTERN++ over plain decoding"
    wanted = "≥ 2.0×, FID and KID ≤ 1.10 of plain, ≥ 2,000 samples"
    row = _best_relaxed(speed, quality)
    if row is None:
        return Bar(what, wanted, "", None)
    found = f"{row['speedup']:.2f}× with {row['method']}"
    if "fid_ratio" not in row:
        return Bar(
            what, wanted, found + ", quality not measured", None if row["speedup"] >= 2 else False
        )
    found += f", FID {row['fid_ratio']:.3f} and KID {row['kid_ratio']:.3f} of plain"
    found += f" at {row['compared_at']} samples"
    return Bar(what, wanted, found, row["speedup"] >= 2 and good_enough(row))


def _exact(speed: Sequence[Row]) -> Bar:
    what = "exact sampled tree over plain decoding"
    wanted = "≥ 1.5×, certificate exact"
    row = _best_exact(speed)
    if row is None:
        return Bar(what, wanted, "", None)
    return Bar(what, wanted, f"{row['speedup']:.2f}× with {row['method']}", row["speedup"] >= 1.5)


def _share(chosen: Sequence[Row], key: str, what: str, wanted: str, holds) -> Bar:  # type: ignore[no-untyped-def]
    """A bar that every chosen row must clear."""
    if not chosen:
        return Bar(what, wanted, "", None)
    found = ", ".join(f"{r[key]:.3f} ({r['method']})" for r in chosen)
    return Bar(what, wanted, found, all(holds(r[key]) for r in chosen))


def auto_bars(rows: Sequence[Row]) -> list[Bar]:
    """Those of method ``auto``, in the model and batch where it does worst."""
    wanted = {
        "median": ("in the median of calls, over the best fixed method", 0.97),
        "worst": ("in the worst call but the first, over the best fixed method", 0.9),
        "first": ("in the first call on a machine, over plain decoding's", 0.95),
        "later_worst": ("in the worst call of a later process, over the best fixed method", 0.9),
    }
    found = []
    for key, (what, least) in wanted.items():
        lowest = min(rows, key=lambda row: row[key], default=None)
        said = "" if lowest is None else f"{lowest[key]:.2f} ({lowest['model']})"
        held = None if lowest is None else lowest[key] >= least
        found.append(Bar(f"auto {what}", f"≥ {least}", said, held))
    return found


def cifar_bar(rows: Sequence[Row]) -> Bar:
    """FID of real pictures against real ones, as published."""
    what = "FID of CIFAR-10, test against train, 10,000 each"
    wanted = "5.2 ± 0.15"
    row = next((r for r in rows if min(r["test"], r["train"]) == 10_000), None)
    if row is None:
        return Bar(what, wanted, "", None)
    return Bar(what, wanted, f"{row['fid']:.3f}", abs(row["fid"] - 5.2) <= 0.15)
