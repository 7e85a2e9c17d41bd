"""The bars, and whether the measured numbers clear them: functions of result rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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


def bar(what: str, wanted: str, of: Any, told: Callable[[Any], tuple[str, bool | None]]) -> Bar:
    """The bar of a row, or of rows: ``told`` says what they found and whether it is met; None and
    no rows are not measured.
    """
    found, met = ("", None) if of is None or of == [] else told(of)
    return Bar(what, wanted, found, met)


def measured(
    what: str,
    wanted: str,
    found: float | None,
    holds: Callable[[float], bool],
    form: str = "{:.2f}",
) -> Bar:
    """The bar of one number, written in ``form``; None is not measured."""
    return bar(what, wanted, found, lambda x: (form.format(x), holds(x)))


def at_least(least: float) -> Callable[[float], bool]:
    """Whether a number is so large."""
    return partial(operator.le, least)


def at_most(most: float) -> Callable[[float], bool]:
    """Whether a number is so small."""
    return partial(operator.ge, most)


def named(rows: Sequence[Row], method: str) -> Row | None:
    """The row of a ``method``."""
    return next((r for r in rows if r["method"] == method), None)


def bars(speed: Sequence[Row], quality: Sequence[Row], auto: Sequence[Row]) -> list[Bar]:
    """All bars of tokens."""
    *found, realised = round_bars(speed, quality)
    return [*found, *auto_bars(auto), realised]


def round_bars(speed: Sequence[Row], quality: Sequence[Row]) -> list[Bar]:
    """The bars of rounds: their speed, and what of it is lost outside the models."""
    relaxed, exact = _best_relaxed(speed, quality), _best_exact(speed)
    chosen = [r for r in (relaxed, exact) if r is not None]
    wanted = "≥ 2.0×, FID and KID ≤ 1.10 of plain, ≥ 2,000 samples"
    return [
        bar("LANTERN++ over plain decoding", wanted, relaxed, _relaxed),
        bar("exact sampled tree over plain decoding", "≥ 1.5×, certificate exact", exact, _exact),
        _share(chosen, "host_overhead", "host overhead per round", "≤ 15%", at_most(0.15)),
        _share(chosen, "realised", "realised over ideal", "≥ 0.85", at_least(0.85)),
    ]


def jacobi_bar(rows: Sequence[Row]) -> Bar:
    """That of exact decoding without a drafter."""

    def told(row: Row) -> tuple[str, bool]:
        low, high = row["speedup_low"], row["speedup_high"]
        found = f"{row['speedup']:.2f}× (quartiles {low:.2f} to {high:.2f})"
        return found, row["speedup"] >= 1.5 and row["certificate"] == "exact"

    what, wanted = "sjd as it is by default over plain decoding", "≥ 1.5×, certificate exact"
    return bar(what, wanted, named(rows, "sjd"), told)


def loading_bar(rows: Sequence[Row]) -> Bar:
    """That of published files, opened and converted; of the models that were measured."""
    what, wanted = "peak memory of opening published files over their size", "≤ 1.2"
    models = ", ".join(dict.fromkeys(r["model"] for r in rows))
    worst = max((r["over file"] for r in rows), default=None)
    return measured(what, wanted, worst, at_most(1.2), f"{{:.2f}} at most ({models})")


def mar_bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars of continuous tokens: the last is of exact speculation at any number of iterations,
    on the front of FID against seconds.
    """
    exact = named(rows, "exact")
    speed, calls = exact and exact["speedup"], exact and exact["head_calls_per_token"]
    what = "sequential head calls a token, exact CSpD"

    def told(ours: Sequence[Row]) -> tuple[str, bool]:
        held = [r for r in ours if r["front"]]
        each = (f"{r['method']} ({r['speedup']:.2f}×, FID {r['fid']:.1f})" for r in held)
        return ", ".join(each) or "none of it", bool(held)

    ours = [r for r in rows if r["method"].startswith("exact") and r.get("fid")]
    return [
        measured("exact CSpD over plain MAR, batch 1", "≥ 1.8×", speed, at_least(1.8), "{:.2f}×"),
        measured(what, "≤ 35", calls, at_most(35), "{:.1f}"),
        bar("exact CSpD on the front of FID against time", "one setting of it", ours, told),
    ]


def var_bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars of next-scale models: CoDe at the planner's N, its FLOP ideal, the table by N."""

    def told(row: Row) -> tuple[str, bool]:
        fid = f"FID {row['fid_ratio']:.3f} at {row['samples']} samples"
        found = f"{row['speedup']:.2f}× with N = {row['n']}, {fid}"
        return found, row["speedup"] >= 1.7 and row["fid_ratio"] <= 1.1

    planned = [r for r in rows if r["batch"] == 16 and r["method"] == "code, planner's N"]
    made = next((r for r in planned if r.get("fid_ratio")), None)
    wanted = "≥ 1.7×, FID ≤ 1.10 of the large model's"
    special = sorted({r["n"] for r in rows if r["method"].endswith("specialised") and r.get("fid")})
    listed = f"for N = {', '.join(map(str, special))}"
    what = "table by N, specialised pairs"
    return [
        bar("CoDe at the planner's N, batch 16", wanted, made, told),
        *ideal_bars(rows),
        bar(what, "time, memory, FID", special, lambda _: (listed, True)),
    ]


def ideal_bars(rows: Sequence[Row]) -> list[Bar]:
    """How much of CoDe's arithmetic comes out as time, over all its N, for each batch size."""
    bars = []
    for batch in sorted({r["batch"] for r in rows if "realised" in r}):
        of_batch = (r for r in rows if "realised" in r and r["batch"] == batch)
        rated = sorted(of_batch, key=lambda r: r["realised"])
        ends = (f"{r['realised']:.2f} with {r['method']}" for r in (rated[0], rated[-1]))
        held = rated[0]["realised"] >= 0.9
        bars.append(
            Bar(f"CoDe over its FLOP ideal, batch {batch}", "≥ 0.9", " to ".join(ends), held)
        )
    return bars


def job_bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars of batch jobs."""
    ways = {r["way"]: r for r in rows}
    batched = max((r["over_loop"] for w, r in ways.items() if w.startswith("local")), default=None)
    rank = ways.get("accelerate, one rank")
    actor = ways.get("ray, one actor")
    local = ways.get("local, batch 16")
    bits = [r["bit_equal"] for r in rows if "bit_equal" in r]
    over = rank and local and local["items_a_second"] / rank["items_a_second"]
    ray = actor and actor["over_local"]
    equal = f"{sum(bits)} of {len(bits)}"
    return [
        measured("a job over a loop of pipe()", "≥ 2×", batched, at_least(2)),
        measured("accelerate over local, one rank", "≤ 1.05", over, at_most(1.05)),
        measured("Ray over local, one actor", "≤ 1.15", ray, at_most(1.15)),
        bar("results bit-equal at batch 1, 4, 16", "100%", bits, lambda x: (equal, all(x))),
    ]


SERVERS = {  # clients, and times the tokens a second of transformers' server
    "pocket/coder": {1: 1.8, 8: 4.5, 16: 6.0},
    "pocket/llava": {1: 1.8, 8: 3.0, 16: 4.0},
}
OVER_PLAIN = {1: 1.7, 2: 1.4, 4: 1.2, 8: 1.05, 16: 1.0}  # of our own engine, by clients


def server_bars(rows: Sequence[Row], model: str) -> list[Bar]:
    """The bars of ``specmm serve``; transformers' server counts as it is faster."""
    own = {r["clients"]: r for r in rows if r["server"] == "specmm serve"}
    found = []
    for clients, least in SERVERS[model].items():
        row = own.get(clients, {})
        beside = [row[key] for key in ("over_theirs", "over_batched") if key in row]
        what = f"tokens/s of specmm serve over transformers serve, {model}, {clients} clients"
        value = min(beside, default=None)
        found.append(measured(what, f"≥ {least}×", value, at_least(least), "{:.2f}×"))
    for clients, least in OVER_PLAIN.items():
        what = f"the same over --method ar, {model}, {clients} clients"
        value = own.get(clients, {}).get("over_plain")
        found.append(measured(what, f"≥ {least}×", value, at_least(least), "{:.2f}×"))
    ours = [r for r in rows if r["server"].startswith("specmm") and "equal" in r]
    equal = f"{sum(r['equal'] for r in ours)} of {sum(r['answers'] for r in ours)}"
    what = f"answers of specmm serve that are the pipeline's, {model}"
    held = all(r["equal"] == r["answers"] for r in ours)
    found.append(bar(what, "100%", ours, lambda _: (equal, held)))
    if model == "pocket/coder":
        return [*found, *_long_bars(own.get("8, long prompts"))]
    what = "first token of a chat's second turn over the first's, a picture and 850 tokens"
    value = own.get("1, second turn", {}).get("second_over_first")
    return [*found, measured(what, "≤ 0.25", value, at_most(0.25), "{:.3f}")]


def _long_bars(row: Row | None) -> list[Bar]:
    """Those of eight clients beside whom long prompts arrive."""
    what = "time to first token over transformers serve, 8 clients, long prompts arriving"
    pause = row and row["longest_pause_rounds"]

    def told(row: Row) -> tuple[str, bool]:
        short, long = row["first_token_p50_over_batched"], row["long_first_token_over_batched"]
        return f"{short:.2f}, long prompts {long:.2f}", max(short, long) <= 0.5

    return [
        bar(what, "≤ 0.5", row, told),
        measured("longest pause of a stream beside them, in rounds", "≤ 3", pause, at_most(3)),
    ]


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


def _relaxed(row: Row) -> tuple[str, bool | None]:
    found, fast = f"{row['speedup']:.2f}× with {row['method']}", row["speedup"] >= 2
    if "fid_ratio" not in row:
        return f"{found}, quality not measured", None if fast else False
    found += f", FID {row['fid_ratio']:.3f} and KID {row['kid_ratio']:.3f} of plain"
    return f"{found} at {row['compared_at']} samples", fast and good_enough(row)


def _exact(row: Row) -> tuple[str, bool]:
    return f"{row['speedup']:.2f}× with {row['method']}", row["speedup"] >= 1.5


def _share(
    chosen: Sequence[Row], key: str, what: str, wanted: str, holds: Callable[[float], bool]
) -> Bar:
    """A bar that every chosen row must clear."""
    found = ", ".join(f"{r[key]:.3f} ({r['method']})" for r in chosen)
    return bar(what, wanted, chosen, lambda rows: (found, all(holds(r[key]) for r in rows)))


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
        form = f"{{:.2f}} ({lowest and lowest['model']})"
        value = lowest and lowest[key]
        found.append(measured(f"auto {what}", f"≥ {least}", value, at_least(least), form))
    return found


def cifar_bar(rows: Sequence[Row]) -> Bar:
    """FID of real pictures against real ones, as published."""
    what = "FID of CIFAR-10, test against train, 10,000 each"
    fid = next((r["fid"] for r in rows if min(r["test"], r["train"]) == 10_000), None)
    return measured(what, "5.2 ± 0.15", fid, lambda x: abs(x - 5.2) <= 0.15, "{:.3f}")
