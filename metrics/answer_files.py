"""Reading predictions and given answers: VQAv2's JSON, DocVQA's JSON, or JSON lines.

An entry is an object with a question (``question_id``, ``questionId``, ``id``) and an ``answer``,
or for given answers also ``answers`` (texts, or VQAv2's objects with an ``answer`` each). A file is
a list of them, one a line, or an object that holds the list under ``annotations`` (VQAv2) or
``data`` (DocVQA).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specmm.metrics.questions import Answers, Predictions

QUESTION = ("question_id", "questionId", "id")
LISTS = ("annotations", "data")


def read_predictions(path: Path) -> Predictions:
    """One answer a question; raises ``ValueError`` naming the line or entry for anything else."""
    found: dict[str, str] = {}
    for where, entry in _entries(path):
        if "answer" not in entry:
            raise ValueError(
                f"{where} must hold 'answer', got {', '.join(entry) or 'nothing'}; add it"
            )
        _add(found, _question(where, entry), _text(where, entry["answer"]), where)
    return found


def read_answers(path: Path) -> Answers:
    """All given answers of every question; raises ``ValueError`` naming the line or entry for
    anything else.
    """
    found: dict[str, list[str]] = {}
    for where, entry in _entries(path):
        given = entry.get("answers", entry.get("answer"))
        if given is None:
            raise ValueError(
                f"{where} must hold 'answers' or 'answer', got {', '.join(entry) or 'nothing'}; add it"
            )
        listed = given if isinstance(given, list) else [given]
        texts = [_text(where, a.get("answer") if isinstance(a, dict) else a) for a in listed]
        _add(found, _question(where, entry), texts, where)
    return found


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each entry with the words that say where it stands."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8 text, got byte {error.object[error.start]:#x}; convert it"
        ) from None
    whole = _whole(path, text)
    listed = list(_lines(path, text)) if whole is None else whole
    if not listed:
        raise ValueError(f"{path} must hold at least one entry, got none; is it the right file?")
    for where, entry in listed:
        if not isinstance(entry, dict):
            raise ValueError(
                f"{where} must be an object with a question and an answer, got {_short(entry)}"
            )
        yield where, entry


def _whole(path: Path, text: str) -> list[tuple[str, Any]] | None:
    """The entries of a file that is one JSON value; None where it is JSON lines."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("["):
            raise ValueError(
                f"{path} line {error.lineno} must be JSON, got an error: {error.msg}; repair it"
            ) from None
        return None
    if isinstance(value, dict) and not set(QUESTION) & set(value):
        value = next((value[k] for k in LISTS if isinstance(value.get(k), list)), value)
    if isinstance(value, list):
        return [(f"{path} entry {i}", entry) for i, entry in enumerate(value, 1)]
    return [(f"{path} entry 1", value)]


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"{path} line {number}", json.loads(line)
            except json.JSONDecodeError:
                raise ValueError(
                    f"{path} line {number} must be JSON, got {line[:40]!r}; repair it"
                ) from None


def _question(where: str, entry: dict[str, Any]) -> str:
    key = next((k for k in QUESTION if k in entry), None)
    if key is None or entry[key] is None or isinstance(entry[key], bool | list | dict):
        raise ValueError(
            f"{where} must name its question ({', '.join(QUESTION)}), got {', '.join(entry) or 'nothing'}"
        )
    return str(entry[key])


def _text(where: str, value: Any) -> str:
    """An answer as text: numbers as JSON writes them."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, str) and not number:
        raise ValueError(
            f"{where} must hold its answer as text or a finite number, got {_short(value)}; write it out"
        )
    return str(value)


def _add(found: dict[str, Any], question: str, value: Any, where: str) -> None:
    if question in found:
        raise ValueError(
            f"{where} must name another question, got {question!r} for the second time; keep one of them"
        )
    found[question] = value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:40] + "…"
