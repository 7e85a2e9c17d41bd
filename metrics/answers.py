"""Answers compared with given ones: ANLS for read text, relaxed accuracy for charts, exact match.

Each takes the best of the answers that count as right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specmm.metrics.intervals import Bootstrap
from specmm.metrics.measurement import Measurement
from specmm.metrics.questions import Answers, Predictions, mean_score


def edit_distance(first: str, second: str) -> int:
    """The fewest insertions, deletions and substitutions of a character between two texts
    (Levenshtein).
    """
    row = list(
        range(len(second) + 1)
    )  # distances of the prefix of `first` so far to every prefix of `second`
    for i, letter in enumerate(first, 1):
        above, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (letter != other))
    return row[-1]


def anls_score(prediction: str, answers: Sequence[str], threshold: float = 0.5) -> float:
    """The best of 1 - NL over ``answers``, 0 where NL >= ``threshold``; NL is the edit distance
    over the longer length.

    Case does not count, nor does how much white space stands between words.
    """
    found = _plain(prediction)
    return max((_similarity(found, _plain(a), threshold) for a in answers), default=0.0)


def anls(
    predictions: Predictions,
    answers: Answers,
    threshold: float = 0.5,
    bootstrap: Bootstrap | None = None,
) -> Measurement:
    """Average normalised Levenshtein similarity (Biten et al. 2019, eq. 1), in [0, 1].

    Raises ``ValueError`` unless ``predictions`` and ``answers`` name the same questions and 0 <
    threshold <= 1.
    """
    if not 0 < threshold <= 1:
        raise ValueError(
            f"the threshold of ANLS must be in (0, 1], got {threshold}; the published one is 0.5"
        )
    protocol = {"normalisation": "case and white space", "threshold": threshold}
    return mean_score(
        "anls", predictions, answers, lambda p, a: anls_score(p, a, threshold), protocol, bootstrap
    )


def relaxed_match(prediction: str, answers: Sequence[str], tolerance: float = 0.05) -> bool:
    """Whether a number is within ``tolerance`` of one of ``answers``, relative to it, or another
    text equals one.

    ``5%`` is the number 0.05. Around 0 no tolerance is defined: 0 must be given as it is written.
    Case does not count.
    """
    return any(_relaxed(prediction.strip(), a.strip(), tolerance) for a in answers)


def relaxed_accuracy(
    predictions: Predictions,
    answers: Answers,
    tolerance: float = 0.05,
    bootstrap: Bootstrap | None = None,
) -> Measurement:
    """Share of answers that are right within 5% (ChartQA; Masry et al. 2022, sec. 5.1, after
    Methani et al. 2020).

    Raises ``ValueError`` unless ``predictions`` and ``answers`` name the same questions and the
    tolerance is >= 0.
    """
    if not 0 <= tolerance < 1:
        raise ValueError(
            f"the tolerance must be in [0, 1), got {tolerance}; the published one is 0.05"
        )
    protocol = {"normalisation": "case, numbers, percent signs", "tolerance": tolerance}

    def score(prediction: str, given: Sequence[str]) -> float:
        return float(relaxed_match(prediction, given, tolerance))

    return mean_score("relaxed", predictions, answers, score, protocol, bootstrap)


def exact_match(
    predictions: Predictions, answers: Answers, bootstrap: Bootstrap | None = None
) -> Measurement:
    """Share of answers that equal one of the given ones but for case and white space.

    Raises ``ValueError`` unless ``predictions`` and ``answers`` name the same questions.
    """
    protocol = {"normalisation": "case and white space"}

    def score(prediction: str, given: Sequence[str]) -> float:
        return float(_plain(prediction) in map(_plain, given))

    return mean_score("exact", predictions, answers, score, protocol, bootstrap)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _similarity(found: str, wanted: str, threshold: float) -> float:
    longest = max(len(found), len(wanted))
    distance = edit_distance(found, wanted) / longest if longest else 0.0
    return 1 - distance if distance < threshold else 0.0


def _relaxed(found: str, wanted: str, tolerance: float) -> bool:
    number, truth = _number(found), _number(wanted)
    if number is None or not truth:  # a truth that is no number, or 0
        return found.lower() == wanted.lower()
    return abs(number - truth) / abs(truth) <= tolerance


def _number(text: str) -> float | None:
    """``text`` as a finite number, percent as hundredths; None if it is none."""
    try:
        value = float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
