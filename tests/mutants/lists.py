"""Lists of mutations: what ``run.py`` tries, and whether they fit the tree."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """``before``, which occurs once in ``file``, becomes ``after``.

    ``what`` is then wrong, and ``tests`` must fail.
    """

    file: str
    what: str
    before: str
    after: str
    tests: tuple[str, ...]
    equivalent: str = ""  # the reason why no test can notice

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def read(lists: Iterable[Path]) -> list[Mutation]:
    """The mutations of ``lists``.

    Raises ``ValueError`` for an entry with other fields than :class:`Mutation` has.
    """
    found = []
    names = {f.name for f in fields(Mutation)}
    for file in lists:
        for number, entry in enumerate(tomllib.loads(file.read_text())["mutation"], start=1):
            if not names - {"equivalent"} <= entry.keys() <= names:
                wanted, got = sorted(names), sorted(entry)
                raise ValueError(f"{file.name}: mutation {number} must have {wanted}, got {got}")
            found.append(Mutation(**(entry | {"tests": tuple(entry["tests"])})))
    return found


def pattern(text: str) -> re.Pattern[str]:
    """What finds ``text`` however a formatter has broken it into lines."""
    words = re.findall(r"\w+|[^\w\s]", text.strip())
    joined = re.escape(words[0])
    for before, word in pairwise(words):
        gap = r"\s+" if before[-1].isalnum() and word[0].isalnum() else r"\s*"
        comma = r",?\s*" if word in ")]}" and before not in ",([{" else ""  # a formatter adds it
        joined += gap + comma + re.escape(word)
    lead = text[: len(text) - len(text.lstrip())]
    tail = text[len(text.rstrip()) :]
    return re.compile(re.escape(lead) + joined + re.escape(tail))


def mutated(root: Path, mutation: Mutation) -> str:
    """The text of the mutated file.

    Raises ``ValueError`` where the mutation does not fit or leaves no Python.
    """
    text = (root / mutation.file).read_text()
    places = list(pattern(mutation.before).finditer(text))
    if len(places) != 1:
        found = f"found {len(places)} times: {mutation.before!r}"
        raise ValueError(f"{mutation}: the text before must occur once, {found}")
    if mutation.before == mutation.after:
        raise ValueError(f"{mutation}: the text after is the text before")
    changed = text[: places[0].start()] + mutation.after + text[places[0].end() :]
    try:
        compile(changed, mutation.file, "exec")
    except SyntaxError as error:
        raise ValueError(f"{mutation}: the text after makes no Python ({error})") from error
    return changed


def misfits(root: Path, mutations: Sequence[Mutation]) -> list[str]:
    """What is wrong with ``mutations`` of the tree at ``root``, one line each."""
    found = []
    for mutation in mutations:
        try:
            mutated(root, mutation)
        except (ValueError, OSError) as error:
            found.append(str(error))
        files = sorted({test.partition("::")[0] for test in mutation.tests})
        missing = [file for file in files if not (root / file).is_file()]
        found += [f"{mutation}: there is no {file}" for file in missing]
        if not mutation.tests:
            found.append(f"{mutation}: names no tests")
    return found
