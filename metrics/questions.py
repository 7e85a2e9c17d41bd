"""Predicted answers against given ones: the checks and the mean that all answer metrics share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from specmm.metrics.features import Protocol
from specmm.metrics.intervals import Bootstrap
from specmm.metrics.measurement import Measurement

Predictions = Mapping[str, str]  # question to answer
Answers = Mapping[
    str, Sequence[str]
]  # question to the answers that count as right, or to the annotators' answers
Score = Callable[
    [str, Sequence[str]], float
]  # of one prediction on the answers of its question, in [0, 1]


def check_questions(predictions: Predictions, answers: Answers) -> None:
    """Raise ``ValueError`` unless both name the same questions, and every question has an answer."""
    if not answers:
        raise ValueError(
            "answers must hold at least one question, got none; check the answers file"
        )
    strangers = [q for q in predictions if q not in answers]
    if strangers:
        raise ValueError(
            f"every prediction must have a question, got {len(strangers)} of {len(predictions)} without "
            f"(first: {strangers[0]!r}); give the answers of the same split"
        )
    silent = [q for q in answers if q not in predictions]
    if silent:
        raise ValueError(
            f"every question must have a prediction, got none for {len(silent)} of {len(answers)} "
            f"(first: {silent[0]!r}); predict them too (an empty answer counts as wrong), or cut the answers"
        )
    bare = [q for q, given in answers.items() if not any(a.strip() for a in given)]
    if bare:
        raise ValueError(
            f"every question must have an answer, got empty ones for {len(bare)} of {len(answers)} "
            f"(first: {bare[0]!r}); remove these questions from both files"
        )


def mean_score(
    metric: str,
    predictions: Predictions,
    answers: Answers,
    score: Score,
    protocol: Protocol,
    draws: Bootstrap | None,
) -> Measurement:
    """The mean of ``score`` over questions, as ``metric``, with an interval where ``draws`` are
    given.

    Raises ``ValueError`` as ``check_questions`` does.
    """
    check_questions(predictions, answers)
    scores = [score(predictions[q], answers[q]) for q in answers]
    interval = (
        draws.of_mean(torch.tensor(scores, dtype=torch.float64), "questions") if draws else None
    )
    found = {**protocol, "counts": [len(scores)]}
    if empty := sum(not predictions[q].strip() for q in answers):
        found["note"] = f"{empty} of {len(scores)} predictions are empty"
    return Measurement(metric, sum(scores) / len(scores), found, interval=interval)
