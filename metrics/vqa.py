"""VQA soft accuracy: an answer counts by how many of ten annotators gave it (Goyal et al. 2017).

The published normalisation (visualqa.org/evaluation.html) lowers the case, strips punctuation,
turns number words into digits, drops articles and mends contractions. Two readings of it are in
use, and they do not agree:

- ``"protocol"``: the page's own words, and the challenge server's: both sides are normalised alike.
- ``"official-code"``: the authors' Python release since March 2021 (GT-Vision-Lab/VQA, a013f00):
  both sides are normalised alike where the annotators disagree, and neither where they all agree:
  "Yes" is wrong for ten times "yes". Copies of the older release give other numbers: they normalise
  the prediction in full, and of the annotators' answers the punctuation alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

from specmm.extending.registry import unknown
from specmm.metrics.answers import Answers, Predictions, mean_score
from specmm.metrics.intervals import Bootstrap
from specmm.metrics.measurement import Measurement

Variant = Literal["protocol", "official-code"]
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {"none": "0", **{word: str(n) for n, word in enumerate(NUMBERS)}}
ARTICLES = frozenset({"a", "an", "the"})
PUNCTUATION = r';/[]"{}()=+\_-><@`,?!'  # neither apostrophes (girl's) nor colons (2:50 pm)
ENDINGS = {  # the contractions that are mended, by ending
    "n't": "ai are ca could did does do had has have is might must need ought sha should was were "
    "wo would",
    "n't've": "could had might should would",
    "'ve": "could might must not should they we what where who would you",
    "'d": "he how it someone something there they where who you",
    "'d've": "he it she somebody someone something there they we who you",
    "'s": "he how somebody someone that there what when where who why",
    "'ll": "how it somebody someone something they what who why you",
    "'re": "there they what why you",
}
IRREGULAR = ("ma'am", "o'clock", "'ow's'at", "'twas", "y'all", "y'all'll", "y'all'd've")
WHOLE = [stem + ending for ending, stems in ENDINGS.items() for stem in stems.split()]
CONTRACTIONS = {  # by the spellings that lack one apostrophe
    form[:i] + form[i + 1 :]: form
    for form in (*WHOLE, *IRREGULAR)
    for i in range(len(form))
    if form[i] == "'"
}
CONTRACTIONS["somebody'd"] = "somebodyd"  # which the release's table has the wrong way


def strip_punctuation(text: str) -> str:
    """``text`` without punctuation.

    A mark with a space beside it goes, one between letters becomes a space, and where a comma
    is between digits (100,978) every mark goes. Periods stay before a digit only.
    """
    joined = re.search(r"\d,\d", text) is not None
    gone = {m for m in PUNCTUATION if joined or m + " " in text or " " + m in text}
    spaced = text.translate({ord(m): None if m in gone else " " for m in PUNCTUATION})
    return re.sub(r"\.(?!\d)", "", spaced)


def normalise(text: str) -> str:
    """An answer as the protocol compares it: without punctuation and articles, in lower case.

    Number words become digits, and contractions get their apostrophes.
    """
    words = strip_punctuation(_one_line(text)).lower().split()
    digits = (DIGITS.get(w, w) for w in words)
    return " ".join(CONTRACTIONS.get(w, w) for w in digits if w not in ARTICLES)


def soft_accuracy(
    prediction: str, annotators: Sequence[str], variant: Variant = "protocol"
) -> float:
    """The mean over annotators left out of min(1, matches among the others / 3): in [0, 1].

    Raises ``ValueError`` for fewer than two annotators or an unknown ``variant``.
    """
    if variant not in get_args(Variant):
        raise unknown("variant", variant, get_args(Variant))
    if len(annotators) < 2:
        got = f"{len(annotators)} answer"
        raise ValueError(f"VQA accuracy leaves an annotator out, got {got}; use exact match")
    answer, *other_answers = map(_one_line, (prediction, *annotators))
    if variant == "protocol" or len(set(other_answers)) > 1:
        answer, *other_answers = map(normalise, (answer, *other_answers))
    same = other_answers.count(answer)
    if not same:
        return 0.0
    others = len(other_answers) - same
    return (same * min(1.0, (same - 1) / 3) + others * min(1.0, same / 3)) / len(other_answers)


def vqa_accuracy(
    predictions: Predictions,
    answers: Answers,
    variant: Variant = "protocol",
    bootstrap: Bootstrap | None = None,
) -> Measurement:
    """Mean soft accuracy, in [0, 1], of ``predictions`` on answers of two or more annotators."""
    score = partial(soft_accuracy, variant=variant)
    annotators = "one left out in turn, min(1, matches / 3)"
    protocol = {"normalisation": f"VQAv2, {variant}", "annotators": annotators}
    return mean_score("vqa", predictions, answers, score, protocol, bootstrap)


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()
