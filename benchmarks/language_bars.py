"""The bars of questions about pictures and of continued text, from their speed rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.bars import Bar, at_least, at_most, bar, measured
from benchmarks.common import Row

ALONE = "judge alone"  # who answered, in the rows of ``verdict``
VERDICT = "verdict"
EXPERT = "expert"
DESCRIBE = "describe"  # the questions that the bars are about


def vlm_bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars of MSD, on descriptions."""
    greedy, sampled, together = (part(rows, DESCRIBE, *at) for at in ((0, 1), (1, 1), (0, 8)))
    auto = [
        r for at in ((0, 8), (1, 8)) for r in part(rows, DESCRIBE, *at) if r["method"] == "auto"
    ]
    others = ("text-draft", "prompt-lookup", "transformers assisted")
    return [
        fastest(greedy, ("msd",), "MSD, greedy descriptions", 2.0, equal=True),
        fastest(sampled, ("msd",), "MSD, descriptions at temperature 1", 1.6),
        _ahead(greedy, ("msd",), others, "MSD ahead of the other drafts, greedy"),
        fastest(together, ("msd",), "MSD, ragged batch of 8", 1.2, equal=True),
        _never_below(auto, "auto at batch 8", 0.97),
    ]


def answer_bars(accuracy: Sequence[Row], verdict: Sequence[Row]) -> list[Bar]:
    """The bars of what the pocket model knows, and of Speculative Verdict."""
    shares = {r["kind"]: r["accuracy"] for r in accuracy}
    bars = [
        measured(what, f"≥ {least:.0%}", shares.get(kind), at_least(least), "{:.1%}")
        for what, kind, least in (
            ("pocket/llava on easy-VQA's test questions", "easy all", 0.95),
            ("pocket/llava on short questions about held-out scenes", "scenes all", 0.85),
        )
    ]
    return bars + [_verdict(verdict, about) for about in ("scenes", "easy-VQA")]


def _verdict(rows: Sequence[Row], about: str) -> Bar:
    def told(who: dict[str, Row]) -> tuple[str, bool]:
        judged, alone = who[VERDICT], who[ALONE]["accuracy"]
        expert = max(r["accuracy"] for name, r in who.items() if name.startswith(EXPERT))
        found = f"{judged['accuracy']:.1%} against {expert:.1%} and {alone:.1%}"
        ends = f"{judged['gain_low']:+.1%} to {judged['gain_high']:+.1%}"
        interval = f"over the judge {judged['gain']:+.1%} ({ends})"
        return f"{found}; {interval}", judged["accuracy"] > max(expert, alone)

    what = f"Verdict on {about} over the best expert and the judge alone"
    who = {r["who"]: r for r in rows if r["questions about"] == about}
    return bar(what, "above both", who or None, told)


def text_bars(
    rows: Sequence[Row], name: str, kinds: Sequence[str], greedy: float, sampled: float = 0.0
) -> list[Bar]:
    """The bars of text drafters on ``kinds`` of prompts; without ``sampled`` the greedy one."""
    cold = [r for kind in kinds for r in part(rows, kind, 0, 1)]
    bars = [fastest(cold, ("deer", "block"), f"{name}: DEER or block, greedy", greedy, equal=True)]
    if not sampled:
        return bars
    warm = [r for kind in kinds for r in part(rows, kind, 1, 1)]
    others = ("transformers prompt lookup", "text-draft", "transformers assisted")
    return [
        *bars,
        fastest(warm, ("deer", "block"), f"{name}: DEER or block at temperature 1", sampled),
        _ahead(
            cold,
            ("deer", "block"),
            others,
            f"{name}: ahead of transformers' lookup and of an AR drafter, greedy",
        ),
        _search(cold, name),
    ]


def part(rows: Sequence[Row], kind: str, temperature: float, batch: int) -> list[Row]:
    """The rows of a ``kind`` of questions at a temperature and a batch size."""
    return [
        r
        for r in rows
        if (r["questions"], r["temperature"], r["batch"]) == (kind, temperature, batch)
    ]


def _of(rows: Iterable[Row], names: Sequence[str]) -> list[Row]:
    """The rows of methods of these names, whatever their options."""
    return [r for r in rows if r["method"].split("(")[0] in names]


def fastest(
    rows: Sequence[Row], names: Sequence[str], what: str, least: float, equal: bool = False
) -> Bar:
    """The fastest of these methods against ``least``; with ``equal`` of the token-equal ones."""
    condition = "token-equal" if equal else "certificate exact"

    def told(rows: list[Row]) -> tuple[str, bool]:
        pool = [
            r for r in rows if (r["token_equal"] == 1 if equal else r["certificate"] == "exact")
        ]
        best = max(pool or rows, key=lambda r: r["speedup"])
        found = f"{best['speedup']:.2f}× with {best['method']}"
        found += "" if pool else f", not {condition}"
        found += _equality(best, rows) if equal else ""
        return found, bool(pool) and best["speedup"] >= least

    return bar(what, f"≥ {least:.1f}×, {condition}", _of(rows, names), told)


def _equality(best: Row, rows: Sequence[Row]) -> str:
    """On how many answers ``best`` rests, and how many of the others differed from plain."""
    answers = best.get("answers")
    others = [r["token_equal"] for r in rows if r is not best]
    told = "" if answers is None else f" ({best['token_equal']:.0%} of {answers} answers equal)"
    unequal = [share for share in others if share < 1]
    if not unequal:
        return told
    shares = f"{min(unequal):.0%} to {max(unequal):.0%} of answers equal"
    return (
        f"{told}; {len(unequal)} of the {len(others)} other settings are not token-equal ({shares})"
    )


def _ahead(rows: Sequence[Row], names: Sequence[str], others: Sequence[str], what: str) -> Bar:
    best = max((r["speedup"] for r in _of(rows, names)), default=None)
    theirs = _of(rows, others) if best else []
    against = ", ".join(f"{r['speedup']:.2f}× {r['method']}" for r in theirs)
    most = max((r["speedup"] for r in theirs), default=None)
    form = f"{best or 0:.2f}× against {against}"
    return measured(what, "ahead of each", most, lambda x: (best or 0) > x, form)


def _never_below(rows: Sequence[Row], what: str, least: float) -> Bar:
    found = ", ".join(f"{r['speedup']:.2f}× at temperature {r['temperature']:g}" for r in rows)
    slowest = min((r["speedup"] for r in rows), default=None)
    return measured(what, f"≥ {least:.2f}× of plain", slowest, at_least(least), found)


def _search(rows: Sequence[Row], name: str) -> Bar:
    shares = {r["method"]: r["search_share"] for r in _of(rows, ("diffuspec",))}
    shares = {method: share for method, share in shares.items() if share}
    found = ", ".join(f"{share:.3f} with {method}" for method, share in shares.items())
    most, what = max(shares.values(), default=None), f"{name}: path search's share of a round"
    return measured(what, "≤ 0.03", most, at_most(0.03), found)
