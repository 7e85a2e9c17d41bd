"""The bars of questions about pictures and of continued text, from their speed rows."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import partial

from benchmarks.bars import Bar, measured
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
        measured(what, f"≥ {least:.0%}", shares.get(kind), partial(operator.le, least), ".1%")
        for what, kind, least in (
            ("pocket/llava on easy-VQA's test questions", "easy all", 0.95),
            ("pocket/llava on short questions about held-out scenes", "scenes all", 0.85),
        )
    ]
    return bars + [_verdict(verdict, about) for about in ("scenes", "easy-VQA")]


def _verdict(rows: Sequence[Row], about: str) -> Bar:
    what = f"Verdict on {about} over the best expert and the judge alone"
    wanted = "above both"
    who = {r["who"]: r for r in rows if r["questions about"] == about}
    if not who:
        return Bar(what, wanted, "", None)
    judged = who[VERDICT]
    alone = who[ALONE]
    expert = max(
        (r for name, r in who.items() if name.startswith(EXPERT)), key=lambda r: r["accuracy"]
    )
    found = f"{judged['accuracy']:.1%} against {expert['accuracy']:.1%} and {alone['accuracy']:.1%}"
    ends = f"{judged['gain_low']:+.1%} to {judged['gain_high']:+.1%}"
    interval = f"over the judge {judged['gain']:+.1%} ({ends})"
    held = judged["accuracy"] > max(expert["accuracy"], alone["accuracy"])
    return Bar(what, wanted, f"{found}; {interval}", held)


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
    wanted = f"≥ {least:.1f}×" + (", token-equal" if equal else ", certificate exact")
    all_of_them = _of(rows, names)
    pool = [
        r for r in all_of_them if (r["token_equal"] == 1 if equal else r["certificate"] == "exact")
    ]
    if not all_of_them:
        return Bar(what, wanted, "", None)
    best = max(pool or all_of_them, key=lambda r: r["speedup"])
    found = f"{best['speedup']:.2f}× with {best['method']}" + (
        "" if pool else f", not{wanted.split(',')[1]}"
    )
    found += _equality(best, all_of_them) if equal else ""
    return Bar(what, wanted, found, bool(pool) and best["speedup"] >= least)


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
    wanted = "ahead of each"
    ours = _of(rows, names)
    theirs = _of(rows, others)
    if not ours or not theirs:
        return Bar(what, wanted, "", None)
    best = max(r["speedup"] for r in ours)
    found = ", ".join(f"{r['speedup']:.2f}× {r['method']}" for r in theirs)
    return Bar(
        what, wanted, f"{best:.2f}× against {found}", all(best > r["speedup"] for r in theirs)
    )


def _never_below(rows: Sequence[Row], what: str, least: float) -> Bar:
    wanted = f"≥ {least:.2f}× of plain"
    found = ", ".join(f"{r['speedup']:.2f}× at temperature {r['temperature']:g}" for r in rows)
    return Bar(what, wanted, found, all(r["speedup"] >= least for r in rows) if rows else None)


def _search(rows: Sequence[Row], name: str) -> Bar:
    searched = [r for r in _of(rows, ("diffuspec",)) if r.get("search_share")]
    found = ", ".join(f"{r['search_share']:.3f} with {r['method']}" for r in searched)
    held = all(r["search_share"] <= 0.03 for r in searched) if searched else None
    return Bar(f"{name}: path search's share of a round", "≤ 0.03", found, held)
