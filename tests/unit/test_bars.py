"""The bars of the issues: what counts as met, as missed and as not measured."""

import numpy as np
import pytest

from benchmarks.bars import bars, job_bars
from benchmarks.drafter_bars import assisted_bars
from benchmarks.language_bars import ALONE, VERDICT, answer_bars, text_bars, vlm_bars
from benchmarks.report import render
from benchmarks.verdict import Scores, majority
from benchmarks.vqa_accuracy import Question


def test_bars():
    speed = [
        {"method": "ar", "speedup": 1.0, "certificate": "exact", "baseline": True},
        *(
            {"method": m, "speedup": x, "certificate": c, "host_overhead": h, "realised": 1 - h}
            for m, x, c, h in (
                ("lantern++(a)", 2.5, "bounded", 0.1),
                ("lantern++(b)", 2.1, "bounded", 0.1),
                ("speculative", 1.6, "exact", 0.2),
            )
        ),
    ]
    good = {"fid_ratio": 1.05, "kid_ratio": 1.0, "compared_at": 2048}
    qualities = [
        {"method": "lantern++(a)", **good, "kid_ratio": 1.3},
        {"method": "lantern++(b)", **good},
    ]
    best = dict(median=1.0, worst=1.0, first=1.0, later_worst=1.0)
    auto = [dict(best, model="a", worst=0.8), dict(best, model="b")]
    found = bars(speed, qualities, auto)
    assert [b.met for b in found] == [True, True, False, True, False, True, True, False]
    assert found[4].found == "0.80 (a)"
    few = [{**q, "compared_at": 640} for q in qualities]
    unmet = [False, True, False, None, None, None, None, False]
    assert [b.met for b in bars(speed, few, [])] == unmet
    assert {b.verdict for b in bars([], [], [])} == {"not measured"}
    assert "not measured" in render({})


def language_row(kind, temperature, batch, method, speedup, **more):
    equal = None if temperature else 1.0
    facts = dict(questions=kind, temperature=temperature, batch=batch, method=method)
    facts |= dict(speedup=speedup, tau=2.0, token_equal=equal, certificate="exact")
    return facts | more


def test_bars_of_questions():
    greedy = (("msd(total=8)", 2.1), ("text-draft", 1.5))
    rows = [language_row("describe", 0.0, 1, m, s) for m, s in greedy]
    rows += [language_row("describe", 1.0, 1, "msd", 1.5), language_row("text", 1.0, 1, "msd", 3.0)]
    rows += [language_row("describe", 0.0, 8, m, s) for m, s in (("msd", 1.3), ("auto", 0.9))]
    assert [b.met for b in vlm_bars(rows)] == [True, False, True, True, False]
    unequal = [{**r, "token_equal": 0.9} if r["temperature"] == 0 else r for r in rows]
    assert [b.met for b in vlm_bars(unequal)] == [False, False, True, False, False]
    assert {b.met for b in vlm_bars([])} == {None}


def test_bars_of_text():
    cold = (("deer(length=3)", 2.6), ("transformers prompt lookup", 1.2), ("diffuspec", 1.4))
    rows = [language_row("code", 0.0, 1, m, s, search_share=0.02) for m, s in cold]
    rows.append(language_row("code", 1.0, 1, "block", 1.6))
    assert [b.met for b in text_bars(rows, "it", ("code",), 2.5, 1.7)] == [True, False, True, True]
    rows[1]["speedup"], rows[2]["search_share"] = 2.7, 0.04
    wanted = [True, False, False, False]
    assert [b.met for b in text_bars(rows, "it", ("code",), 2.5, 1.7)] == wanted
    assert [b.met for b in text_bars(rows, "it", ("prose",), 2.0)] == [None]


def test_equal_tokens_are_told_with_the_answers_they_rest_on():
    shares = [("block(tree=8)", 2.0, 1.0), ("block(length=2)", 1.7, 0.75)]
    shares.append(("block(tree=16)", 2.1, 0.5))
    rows = [language_row("tasks", 0.0, 1, m, s, token_equal=e, answers=4) for m, s, e in shares]
    [bar] = text_bars(rows, "it", ("tasks",), 2.0)
    assert bar.met and bar.found == (
        "2.00× with block(tree=8) (100% of 4 answers equal); "
        "2 of the 2 other settings are not token-equal (50% to 75% of answers equal)"
    )
    [bar] = text_bars(rows[1:], "it", ("tasks",), 2.0)
    assert not bar.met
    assert bar.found.startswith("2.10× with block(tree=16), not token-equal (50% of 4 answers")
    [bar] = text_bars(rows[:1], "it", ("tasks",), 2.0)
    assert bar.found == "2.00× with block(tree=8) (100% of 4 answers equal)"


def test_bars_of_assisted_generation():
    def at(method, batch, temperature=0.0, **more):
        row = language_row("mtp", temperature, batch, method, 1.0, **more)
        return row | {"drafter": "mtp", "model": "tiny"}

    rows = [
        at("ar", 1, over_theirs=9.0),
        at("transformers assisted (default)", 1, over_theirs=1.0),
        at("mtp", 1, over_theirs=1.2),
        at("mtp(depth=1)", 1, over_theirs=1.9, token_equal=0.5),
        at("mtp", 1, 1.0, over_theirs=1.1),
        at("auto", 1, 1.0, over_theirs=1.5),  # may have taken plain decoding
        at("mtp(depth=2)", 1, 1.0, over_theirs=1.5, tau=1.0),  # drafts nothing
        at("auto", 4, over_plain=0.98),
        at("auto", 8, over_plain=0.96),
    ]
    assert [b.met for b in assisted_bars(rows)] == [True, False, False]
    assert [b.met for b in assisted_bars(rows[:-1])] == [True, False, True]
    assert assisted_bars(rows)[0].found == "1.20× with mtp"


def test_bars_of_jobs():
    rows = [
        {"way": "local, batch 1", "over_loop": 0.6, "items_a_second": 1.0, "bit_equal": True},
        {"way": "local, batch 16", "over_loop": 2.5, "items_a_second": 4.0, "bit_equal": True},
        {"way": "accelerate, one rank", "items_a_second": 3.7, "bit_equal": True},
        {"way": "ray, one actor", "over_local": 1.1},
    ]
    assert [b.met for b in job_bars(rows)] == [True, False, True, True]
    rows[0]["bit_equal"] = False
    assert [b.met for b in job_bars([rows[0], rows[3]])] == [False, None, True, False]
    assert [b.met for b in job_bars([])] == [None] * 4


def test_accuracy_and_verdict():
    scores = Scores()
    asked = Question(np.zeros((2, 2, 3), np.uint8), "?", {"a cat"}, "what")
    for judge, judged, expert in [("a cat", "a cat", "a cat")] * 6 + [
        ("a dog", " a cat", "a cat"),
        ("a cat", "", "x"),
    ]:
        scores.add(ALONE, asked, judge, 1.0)
        scores.add(VERDICT, asked, judged, 2.0)
        scores.add("expert 1", asked, expert)
    rows = {r["who"]: r for r in scores.rows("scenes")}
    assert [rows[who]["right"] for who in (ALONE, VERDICT, "expert 1")] == [7, 7, 7]
    assert rows[VERDICT]["gain"] == 0
    assert rows[VERDICT]["gain_high"] == pytest.approx(1.96 * 2**0.5 / 8)
    assert rows[VERDICT]["seconds"] == 2 and "seconds" not in rows["expert 1"]
    accuracy = [{"kind": "easy all", "accuracy": 0.96}, {"kind": "scenes all", "accuracy": 0.8}]
    assert [b.met for b in answer_bars(accuracy, list(rows.values()))] == [True, False, False, None]
    rows[VERDICT]["accuracy"] = 0.99
    assert [b.met for b in answer_bars([], list(rows.values()))] == [None, None, True, None]
    assert majority(["a", "b", "b"]) == "b" and majority(["b", "a"]) == "b"
