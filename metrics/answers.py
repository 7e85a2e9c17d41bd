"""Predicted answers against given ones: ANLS, relaxed accuracy, exact match, BLEU and CIDEr.

Files are VQAv2's JSON, DocVQA's JSON, or JSON lines. An entry is an object with a question
(``question_id``, ``questionId``, ``id``) and an ``answer``, or for given answers also ``answers``
(texts, or VQAv2's objects with an ``answer`` each). A file is a list of them, one a line, or an
object with the list under ``annotations`` (VQAv2) or ``data`` (DocVQA).

BLEU is sacrebleu's and CIDEr pycocoevalcap's (extra ``captions``). The published CIDEr uses
Stanford's tokenizer (Java), ours differs on abbreviations and hyphens, as the protocol says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from specmm.loading.extras import needed
from specmm.loading.files import json_lines, sentence_of, text_lines
from specmm.metrics.features import Protocol
from specmm.metrics.intervals import Bootstrap
from specmm.metrics.measurement import Measurement

Predictions = Mapping[str, str]  # question to answer
Answers = Mapping[str, Sequence[str]]  # question to the right answers, or to the annotators'
Score = Callable[[str, Sequence[str]], float]  # a prediction's on its answers, in [0, 1]
T = TypeVar("T")
QUESTION = ("question_id", "questionId", "id")
LISTS = ("annotations", "data")
ANLS_THRESHOLD = 0.5  # as published
TOLERANCE = 0.05  # ChartQA's


def mean_score(
    metric: str,
    predictions: Predictions,
    answers: Answers,
    score: Score,
    protocol: Protocol,
    draws: Bootstrap | None,
) -> Measurement:
    """The mean of ``score`` over questions, which must be the same in both, with an interval."""
    _check_questions(predictions, answers)
    scores = [score(predictions[q], answers[q]) for q in answers]
    exact = torch.tensor(scores, dtype=torch.float64)
    interval = draws.of_mean(exact, "questions") if draws else None
    facts = {**protocol, "counts": [len(scores)]}
    if empty := sum(not predictions[q].strip() for q in answers):
        facts["note"] = f"{empty} of {len(scores)} predictions are empty"
    return Measurement(metric, sum(scores) / len(scores), facts, interval=interval)


def _check_questions(predictions: Predictions, answers: Answers) -> None:
    """Raise ``ValueError`` unless both have the same questions, and answers to all."""
    if not answers:
        raise ValueError("answers must hold at least one question, got none; check the file")
    unknown = [q for q in predictions if q not in answers]
    missing = [q for q in answers if q not in predictions]
    empty = [q for q, texts in answers.items() if not any(a.strip() for a in texts)]
    for bad, rule, group in (
        (unknown, "prediction must have a question, got {} of {} without", predictions),
        (missing, "question must have a prediction, got none for {} of {}", answers),
        (empty, "question must have an answer, got empty ones for {} of {}", answers),
    ):
        if bad:
            problem = f"{rule.format(len(bad), len(group))} (first: {bad[0]!r})"
            raise ValueError(
                f"every {problem}; use two files of one split, an empty prediction is wrong"
            )


def anls(
    predictions: Predictions, answers: Answers, bootstrap: Bootstrap | None = None
) -> Measurement:
    """Average normalised Levenshtein similarity (Biten et al. 2019, eq. 1)."""
    protocol = {"normalisation": "case and white space", "threshold": ANLS_THRESHOLD}
    return mean_score("anls", predictions, answers, anls_score, protocol, bootstrap)


def anls_score(prediction: str, answers: Sequence[str]) -> float:
    """The best of 1 - edit distance / longer length, 0 below 0.5; case does not count."""
    answer = _plain(prediction)
    best = 0.0
    for truth in map(_plain, answers):
        longest = max(len(answer), len(truth))
        distance = edit_distance(answer, truth) / longest if longest else 0.0
        best = max(best, 1 - distance if distance < ANLS_THRESHOLD else 0.0)
    return best


def edit_distance(first: str, second: str) -> int:
    """The fewest insertions, deletions and substitutions of characters (Levenshtein)."""
    row = list(range(len(second) + 1))  # from a prefix of `first` to each of `second`
    for i, letter in enumerate(first, 1):
        above = row[0]
        row[0] = i
        for j, other in enumerate(second, 1):
            best = min(row[j] + 1, row[j - 1] + 1, above + (letter != other))
            above = row[j]
            row[j] = best
    return row[-1]


def relaxed_accuracy(
    predictions: Predictions, answers: Answers, bootstrap: Bootstrap | None = None
) -> Measurement:
    """Share of answers right within 5% (ChartQA; Masry et al. 2022, sec. 5.1)."""
    protocol = {"normalisation": "case, numbers, percent signs", "tolerance": TOLERANCE}
    return mean_score("relaxed", predictions, answers, relaxed_match, protocol, bootstrap)


def relaxed_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether a number is within 5% of an answer, or a text equals one.

    The text ``5%`` is 0.05. A share of 0 is undefined, so 0 must match as a text.
    """
    answer = prediction.strip()
    number = _number(answer)
    for expected in (a.strip() for a in answers):
        truth = _number(expected)
        if number is None or not truth:  # a truth that is no number, or 0
            right = answer.lower() == expected.lower()
        else:
            right = abs(number - truth) / abs(truth) <= TOLERANCE
        if right:
            return True
    return False


def exact_match(
    predictions: Predictions, answers: Answers, bootstrap: Bootstrap | None = None
) -> Measurement:
    """Share of predictions that equal a given answer, ignoring case and white space."""
    protocol = {"normalisation": "case and white space"}

    def score(prediction: str, truths: Sequence[str]) -> bool:
        return _plain(prediction) in map(_plain, truths)

    return mean_score("exact", predictions, answers, score, protocol, bootstrap)


def bleu(predictions: Predictions, answers: Answers) -> Measurement:
    """Corpus BLEU-4 in [0, 100] (Papineni et al. 2002), with sacrebleu's tokenizer and parts."""
    _check_questions(predictions, answers)
    with needed("BLEU", "captions"):
        from sacrebleu.metrics.bleu import BLEU
    metric = BLEU()
    longest = max(len(texts) for texts in answers.values())
    padded = [[*texts, *[None] * (longest - len(texts))] for texts in answers.values()]
    references: Any = list(map(list, zip(*padded, strict=True)))  # None: fewer references
    score = metric.corpus_score([predictions[q] for q in answers], references)
    parts = {f"precision_{n}": p for n, p in enumerate(score.precisions, 1)}
    parts["brevity_penalty"] = score.bp
    protocol = {"signature": str(metric.get_signature()), "references": longest}
    return Measurement("bleu", score.score, {**protocol, "counts": [len(answers)]}, parts)


def cider(predictions: Predictions, answers: Answers) -> Measurement:
    """CIDEr-D (Vedantam et al. 2015, sec. 6), at most 10; words are weighted by the answers."""
    _check_questions(predictions, answers)
    if len(answers) < 2:
        raise ValueError(f"CIDEr needs at least 2 captions to weight words, got {len(answers)}")
    with needed("CIDEr", "captions"):
        from pycocoevalcap.cider.cider import Cider
    references = {q: [tokenised(a) for a in texts] for q, texts in answers.items()}
    value, _ = Cider().compute_score(references, {q: [tokenised(predictions[q])] for q in answers})
    tokens = "lower case, words and numbers, no punctuation"
    protocol = {"library": "pycocoevalcap", "tokens": tokens, "counts": [len(answers)]}
    return Measurement("cider", float(value), protocol)


def tokenised(text: str) -> str:
    """Words and numbers of ``text`` in lower case, a space between them."""
    return " ".join(re.findall(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:'[^\W\d_]+)?", text.lower()))


def read_predictions(path: Path) -> Predictions:
    """One answer a question; raises ``ValueError`` naming the line or entry for anything else."""
    predictions: dict[str, str] = {}
    for where, entry in _entries(path):
        if "answer" not in entry:
            raise ValueError(f"{where} must hold 'answer', got {_keys(entry)}; add it")
        _add(predictions, where, entry, _text(where, entry["answer"]))
    return predictions


def read_answers(path: Path) -> Answers:
    """All given answers of every question; raises ``ValueError`` naming the line or entry."""
    answers: dict[str, list[str]] = {}
    for where, entry in _entries(path):
        field = entry.get("answers", entry.get("answer"))
        if field is None:
            raise ValueError(f"{where} must hold 'answers' or 'answer', got {_keys(entry)}; add it")
        listed = field if isinstance(field, list) else [field]
        texts = [_text(where, a.get("answer") if isinstance(a, dict) else a) for a in listed]
        _add(answers, where, entry, texts)
    return answers


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of the file ``path``, each after its place; ``ValueError`` for others."""
    listed = _values(path)
    if not listed:
        raise ValueError(f"{path} must hold at least one entry, got none; is it the right file?")
    for where, entry in listed:
        if not isinstance(entry, dict):
            got = _short(entry)
            raise ValueError(f"{where} must be an object with a question and an answer, got {got}")
        yield where, entry


def _values(path: Path) -> list[tuple[str, Any]]:
    """The entries of one JSON value, or of JSON lines."""
    text = "".join(text_lines(path))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):
            line = f"{path} line {getattr(error, 'lineno', 1)}"
            got = f"an error: {sentence_of(error)}"
            raise ValueError(f"{line} must be JSON, got {got}; repair it") from None
        return list(json_lines(path))
    if isinstance(value, dict) and not set(QUESTION) & set(value):
        value = next((value[k] for k in LISTS if isinstance(value.get(k), list)), value)
    entries = value if isinstance(value, list) else [value]
    return [(f"{path} entry {i}", entry) for i, entry in enumerate(entries, 1)]


def _add(entries: dict[str, T], where: str, entry: dict[str, Any], value: T) -> None:
    """Add ``value`` under the question that ``entry`` names; ``ValueError`` for a second one."""
    name = next((entry[k] for k in QUESTION if k in entry), None)
    if name is None or isinstance(name, bool | list | dict):
        names = ", ".join(QUESTION)
        raise ValueError(f"{where} must name its question ({names}), got {_keys(entry)}")
    if str(name) in entries:
        twice = f"got {str(name)!r} for the second time"
        raise ValueError(f"{where} must name another question, {twice}; keep one of them")
    entries[str(name)] = value


def _keys(entry: dict[str, Any]) -> str:
    return ", ".join(entry) or "nothing"


def _text(where: str, value: object) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, str) and not number:
        got = _short(value)
        raise ValueError(f"{where} must hold its answer as text or a finite number, got {got}")
    return str(value)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:40] + "…"


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _number(text: str) -> float | None:
    try:
        value = float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
