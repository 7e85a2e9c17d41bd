"""BLEU and CIDEr through their libraries."""

import pytest

from specmm.metrics.answers import bleu, cider, tokenised

pytest.importorskip("sacrebleu")
pytest.importorskip("pycocoevalcap")

ANSWERS = {
    "1": ["a cat sits on the red mat", "the cat is on a mat"],
    "2": ["two dogs run over the green field"],
    "3": ["a man rides a blue bicycle down the street"],
}
RIGHT = {q: a[0] for q, a in ANSWERS.items()}


def test_bleu_is_sacrebleus_and_carries_its_signature() -> None:
    assert bleu(RIGHT, ANSWERS).value == pytest.approx(100)
    found = bleu(RIGHT | {"2": "two dogs run"}, ANSWERS)
    assert 50 < found.value < 100 and found.parts["brevity_penalty"] < 1
    assert "tok:13a" in found.protocol["signature"] and found.protocol["references"] == 2


def test_cider_rewards_the_words_that_tell_captions_apart() -> None:
    # 10 is the most there is
    assert cider(RIGHT, {q: a[:1] for q, a in ANSWERS.items()}).value == pytest.approx(10)
    assert cider(dict.fromkeys(ANSWERS, "the a"), ANSWERS).value < 0.5
    found = cider(RIGHT | {"2": "Two dogs run, over the green field."}, ANSWERS).value
    assert found == cider(RIGHT, ANSWERS).value


def test_tokens() -> None:
    assert tokenised("It's 3,000.5 km (two-way)!") == "it's 3,000.5 km two way"


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 captions"):
        cider({"1": "a"}, {"1": ["a"]})
    for metric in (bleu, cider):
        with pytest.raises(ValueError, match="must have a prediction"):
            metric({}, ANSWERS)
