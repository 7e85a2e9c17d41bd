"""ANLS, relaxed accuracy and exact match on published cases; reading of answer files, and what they
refuse.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from specmm.metrics.answers import (
    anls,
    anls_score,
    edit_distance,
    exact_match,
    read_answers,
    read_predictions,
    relaxed_accuracy,
    relaxed_match,
)
from tests import odd_files


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        ("kitten", "sitting", 3),
        ("saturday", "sunday", 3),
        ("", "abc", 3),
        ("abc", "abc", 0),
        ("flaw", "lawn", 2),
    ],
)  # Levenshtein's textbook cases
def test_edit_distance(first: str, second: str, distance: int) -> None:
    assert edit_distance(first, second) == edit_distance(second, first) == distance


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        # case does not count (Biten et al. 2019, sec. 3.3)
        ("Coca Cola", ["coca cola", "coca cola company"], 1.0),
        ("coca  cola ", ["coca cola"], 1.0),
        # a slip of the reader costs a little: 1 of 10
        ("coca colla", ["coca cola", "coca cola company"], 0.9),
        # NL = 0.5 is not below the threshold: another answer, not a misread one
        ("abcd", ["abxx"], 0.0),
        ("abcde", ["abcxx"], 0.6),  # NL = 0.4 is
        ("cola", ["coca cola company"], 0.0),
        ("", ["coca cola"], 0.0),
    ],
)
def test_anls_of_one_question(prediction: str, answers: list[str], score: float) -> None:
    assert anls_score(prediction, answers) == pytest.approx(score)


def test_anls_is_the_mean_and_says_its_threshold() -> None:
    found = anls({"a": "abcde", "b": "x"}, {"a": ["abcxx"], "b": ["X"]})
    assert found.value == pytest.approx(0.8) and found.protocol["threshold"] == 0.5


@pytest.mark.parametrize(
    ("prediction", "answer", "right"),
    [
        # within 5% of the gold answer (Masry et al. 2022, sec. 5.1), the edge included
        ("105", "100", True),
        ("105.1", "100", False),
        ("95", "100", True),
        ("-95", "-100", True),
        ("95", "-100", False),
        ("52%", "50%", True),  # percent against percent
        ("0.5", "50%", True),  # as hundredths
        ("50", "50%", False),
        ("0", "0", True),  # around 0 as it is written
        ("0.0", "0", False),
        ("Yes", "yes", True),  # words must be the same
        ("yess", "yes", False),
        ("100 dollars", "100", False),
        ("nan", "100", False),
        ("", "100", False),
    ],
)
def test_relaxed_accuracy_of_one_question(prediction: str, answer: str, right: bool) -> None:
    assert relaxed_match(prediction, [answer]) is right


def test_relaxed_accuracy_and_exact_match_take_the_best_answer() -> None:
    predictions = {"1": "104", "2": "The  Cat"}
    answers = {"1": ["7", "100"], "2": ["the cat", "dog"]}
    assert relaxed_accuracy(predictions, answers).value == 0.5  # the two spaces
    assert exact_match(predictions, answers).value == 0.5


# ---- files


def written(path: Path, value: Any, lines: bool = False) -> Path:
    path.write_text("\n".join(map(json.dumps, value)) if lines else json.dumps(value))
    return path


def test_formats_are_read_alike(tmp_path: Path) -> None:
    entries = [{"question_id": 1, "answer": "yes"}, {"question_id": 2, "answer": 3}]
    wanted = {"1": "yes", "2": "3"}
    assert read_predictions(written(tmp_path / "vqav2.json", entries)) == wanted
    assert read_predictions(written(tmp_path / "lines.jsonl", entries, lines=True)) == wanted
    assert read_predictions(written(tmp_path / "one.jsonl", entries[:1], lines=True)) == {
        "1": "yes"
    }
    annotated = {
        "question_id": 1,
        "answers": [{"answer": "yes", "answer_id": 1}, {"answer": "no", "answer_id": 2}],
    }
    for name, value in (
        ("annotations.json", {"info": {}, "annotations": [annotated]}),
        (
            "docvqa.json",
            {"dataset_name": "x", "data": [{"questionId": 1, "answers": ["yes", "no"]}]},
        ),
    ):
        assert read_answers(written(tmp_path / name, value)) == {"1": ["yes", "no"]}
    assert read_answers(written(tmp_path / "chart.json", [{"id": "q", "answer": 3.5}])) == {
        "q": ["3.5"]
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1, "answer": "a"}\nid: 2', "line 2 must be JSON, got 'id: 2'"),
        ('[{"id": 1, "answer": "a"},\n{"id": 2 "answer"}]', "line 2 must be JSON"),
        (
            '{"id": 1, "answer": "a"}\n{"id": 1, "answer": "b"}',
            "line 2 must name another question, got '1'",
        ),
        (
            '[{"id": 1, "answer": NaN}]',
            "entry 1 must hold its answer as text or a finite number, got NaN",
        ),
        ('[{"id": 1, "answer": null}]', "got null"),
        ('[{"id": 1, "answer": true}]', "got true"),
        ('[{"id": 1}]', "entry 1 must hold 'answer', got id"),
        ('[{"answer": "a"}]', "entry 1 must name its question"),
        ('{"id": 1, "answer": "a"}\n[1]', "line 2 must be an object"),
        ("7", "entry 1 must be an object with a question and an answer, got 7"),
        ("[]", "must hold at least one entry"),
        ("", "must hold at least one entry"),
    ],
)
def test_bad_files_name_the_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"p\.jsonl") as caught:
        read_predictions(file)
    assert message in str(caught.value)


def test_odd_characters_end_no_line(tmp_path: Path) -> None:
    """Of what Python's splitlines takes for an end of a line, three are one in a file."""
    answers = dict(enumerate(odd_files.ODD_TEXTS))
    rows = [{"id": number, "answer": text} for number, text in answers.items()]
    (tmp_path / "p.jsonl").write_bytes(odd_files.lines_of(rows))
    assert read_predictions(tmp_path / "p.jsonl") == {str(n): a for n, a in answers.items()}
    (tmp_path / "p.jsonl").write_bytes(odd_files.lines_of(rows) + b"nonsense\r\n")
    with pytest.raises(ValueError, match=r"line 8 must be JSON, got 'nonsense' .*; repair it"):
        read_predictions(tmp_path / "p.jsonl")
    for nested in ("[" * 100_000, '{"id": ' + "1" * 5000 + "}"):
        (tmp_path / "p.json").write_text(nested)
        with pytest.raises(ValueError, match="line 1 must be JSON, got"):
            read_predictions(tmp_path / "p.json")


def test_answers_without_answers_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must hold 'answers' or 'answer', got id"):
        read_answers(written(tmp_path / "a.json", [{"id": 1}]))
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="must be UTF-8 text, got byte 0xff"):
        read_answers(tmp_path / "b.json")
