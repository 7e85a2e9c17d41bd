"""VQAv2's soft accuracy on the cases that visualqa.org/evaluation.html and the release work out."""

import pytest
import torch

from specmm.metrics.intervals import Bootstrap
from specmm.metrics.vqa import normalise, soft_accuracy, strip_punctuation, vqa_accuracy


@pytest.mark.parametrize(
    ("matches", "accuracy"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)]
)  # the page's min(#/3, 1), averaged over all sets of nine annotators
def test_accuracy_by_matching_annotators(matches: int, accuracy: float) -> None:
    annotators = ["red"] * matches + [f"other{i}" for i in range(10 - matches)]
    assert soft_accuracy("red", annotators) == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("Yes", "yes"),  # the page's steps, in its order: lower case
        ("Yes.", "yes"),  # no periods
        ("2.5", "2.5"),  # but decimals
        ("two", "2"),  # number words
        ("none", "0"),
        ("Ten dogs", "10 dogs"),
        ("the man in a hat", "man in hat"),  # no articles
        ("dont", "don't"),  # apostrophes
        ("couldnt've", "couldn't've"),
        ("girl's", "girl's"),  # possessives stay
        ("2:50 pm", "2:50 pm"),  # and times
        ("100,978", "100978"),  # no space where a comma parts digits
        ("black-white", "black white"),  # a space for other punctuation
        ("red, white", "red white"),
        ("red,white", "red white"),
        (" on\tthe\ntable ", "on table"),
        ("somebody'd", "somebodyd"),  # the release's table, as it is
        ("im", "im"),  # its capital I'm never meets a lower-cased word
        ("", ""),
    ],
)
def test_normalisation(text: str, normal: str) -> None:
    assert normalise(text) == normal


def test_punctuation_goes_or_becomes_a_space_by_its_neighbours() -> None:
    assert strip_punctuation("what?!") == "what  "
    assert strip_punctuation("a - b") == "a  b"  # beside a space it goes
    # the comma of a number takes all marks along
    assert strip_punctuation("1,000/day") == "1000day"
    assert strip_punctuation("U.S. 3.14 .5") == "US 3.14 .5"


@pytest.mark.parametrize(
    ("prediction", "annotators", "protocol", "official"),
    [  # the numbers of the authors' release, run on these
        ("2", ["two"] * 5 + ["the two"] * 5, 1, 1),  # its older one kept the annotators' words: 0
        ("on table", ["on table."] * 10, 1, 0),  # all agree: left as they are
        ("Yes", ["yes"] * 10, 1, 0),
        (" yes\n", ["yes"] * 10, 1, 1),
        ("On the table!", ["on table"] * 9 + ["floor"], 1, 1),
        ("two", ["2"] * 2 + ["Two."] * 1 + ["3"] * 7, 0.9, 0.9),
        ("dont", ["don't"] * 2 + ["no"] * 8, 0.6, 0.6),
    ],
)
def test_the_two_readings_differ_as_the_module_says(
    prediction: str, annotators: list[str], protocol: float, official: float
) -> None:
    assert soft_accuracy(prediction, annotators) == pytest.approx(protocol)
    assert soft_accuracy(prediction, annotators, "official-code") == pytest.approx(official)


def test_the_mean_over_questions_and_its_protocol() -> None:
    answers = {"1": ["yes"] * 10, "2": ["red"] * 2 + ["blue"] * 8, "3": ["4"] * 10}
    found = vqa_accuracy(
        {"1": "Yes.", "2": "red", "3": ""},
        answers,
        bootstrap=Bootstrap(torch.Generator().manual_seed(0)),
    )
    assert found.metric == "vqa" and found.value == pytest.approx((1 + 0.6 + 0) / 3)
    assert found.protocol["counts"] == [3]
    assert found.protocol["note"] == "1 of 3 predictions are empty"
    assert found.interval is not None and found.interval.low <= found.value <= found.interval.high


def test_what_is_refused() -> None:
    answers = {"1": ["yes"] * 10, "2": ["no"] * 10}
    with pytest.raises(ValueError, match=r"must have a question, got 1 of 3 without .first: '9'"):
        vqa_accuracy({"1": "yes", "2": "no", "9": "maybe"}, answers)
    said = r"must have a prediction, got none for 1 of 2 .first: '2'"
    with pytest.raises(ValueError, match=said):
        vqa_accuracy({"1": "yes"}, answers)
    said = r"must have an answer, got empty ones for 1 of 2 .first: '2'"
    with pytest.raises(ValueError, match=said):
        vqa_accuracy({"1": "yes", "2": "no"}, {"1": ["yes"] * 10, "2": ["", " "]})
    with pytest.raises(ValueError, match="at least one question"):
        vqa_accuracy({}, {})
    with pytest.raises(ValueError, match="use exact match"):
        soft_accuracy("yes", ["yes"])
    with pytest.raises(ValueError, match="did you mean 'protocol'"):
        soft_accuracy("yes", ["yes", "no"], "protocoll")  # type: ignore[arg-type]
