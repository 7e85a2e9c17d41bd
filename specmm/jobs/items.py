"""The items of a job: read from JSON lines, CSV, Parquet or a list of classes.

An item's random seed comes from its id, so its result depends on no other item, on no order and on
no batch.
"""

from __future__ import annotations

import csv
import hashlib
import json
import marshal
import os
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specmm.extending.kinds import shown
from specmm.extending.registry import unknown
from specmm.loading.extras import needed
from specmm.loading.files import (
    ADDRESS,
    JSON_LINES,
    OF_PICTURES,
    json_value,
    numbered_lines,
    sentence_of,
    text_lines,
)
from specmm.zoo.model_files import digest

KINDS = ("class", "prompt", "question")
OPTIONS = (  # options of a call; each model takes some of them
    *("cfg", "guidance_scale", "cfg_interval", "cfg_schedule", "negative_prompt"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("num_iter", "head_steps", "solver", "more_smooth", "num_inference_steps"),
    *("height", "width", "max_new_tokens", "stop"),
)
WORDS = ("cfg_schedule", "negative_prompt", "solver", "stop")  # the options that are texts
OF_CALLS = frozenset(OPTIONS)
MOST_OF_ONE = 100_000  # pictures of a line
MOST_ID = 512  # characters
TOGETHER = 4096  # rows read at a time
Kind = Literal["class", "prompt", "question"]
Fields = dict[str, Any]
Row = tuple[str, Fields]  # its place in the file, for messages, and its fields


class Item(NamedTuple):
    """One thing to make: ``text`` is the class, prompt or question, ``options`` are options of its
    call, which override the job's.

    ``images`` and ``videos`` are the question's as the job file in ``folder`` names them. ``draw``
    says whether its answer may hold pictures, None as the job says.
    """

    id: str
    kind: Kind
    text: str
    seed: int
    images: tuple[str, ...] = ()
    method: str | None = None
    folder: str = ""
    videos: tuple[str, ...] = ()
    draw: bool | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def digest(self) -> str:
        """Hash of the item's content, wherever the job file is: differs for a changed item."""
        fields = self.id, self.kind, self.text, self.seed, self.images, self.method, self.videos
        content = repr((*fields, self.draw, self.options)).encode()
        return hashlib.blake2b(content, digest_size=8).hexdigest()

    @property
    def alike(self) -> Hashable:
        """A key that items of one batch share."""
        shown = len(self.images), len(self.videos)
        # 2 and 2.0 are two records
        return self.kind, self.method, *shown, self.draw, repr(self.options)

    @property
    def pictures(self) -> list[str]:
        """Paths of ``images``; addresses unchanged."""
        own = Path(self.folder)
        return [name if OF_PICTURES.match(name) else str(own / name) for name in self.images]

    @property
    def films(self) -> list[str]:
        """Paths of ``videos``."""
        return [str(Path(self.folder) / name) for name in self.videos]


def digests_of(item: Item) -> list[str]:
    """Digests of the files that ``item`` shows; "" for an address and for a file that is gone."""
    files = [Path(name) for name in (*item.pictures, *item.films)]
    return [digest(file) if file.is_file() else "" for file in files]


def seed_of(identity: str, base: int) -> int:
    """The seed in [0, 2**62) of the item called ``identity`` in a job of seed ``base``."""
    return int.from_bytes(hashlib.sha256(f"{base}\0{identity}".encode()).digest()[:8], "big") >> 2


class Items(Sequence[Item]):
    """The items of rows that were added, made whenever they are asked for, with seeds of ``base``
    and paths from ``folder``.

    Rows lie in a file without a name, which is gone with them: as objects, a million items would be
    a quarter of a gigabyte.
    """

    def __init__(self, base: int, folder: Path) -> None:
        self.base = base
        self.folder = folder
        self.kinds: set[str] = set()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._ends = array("Q", [0])  # where rows end in the file
        self._counts = array("Q", [0])  # items before each row, and of all rows

    def add(self, kind: Kind, fields: Fields) -> None:
        """Add the items of a row of this ``kind`` with these ``fields``."""
        self.kinds.add(kind)
        self._counts.append(self._counts[-1] + fields.get("n", 1))
        # read again in a fifth of the time of JSON
        self._ends.append(self._ends[-1] + self._file.write(marshal.dumps((kind, fields))))

    def __len__(self) -> int:
        return self._counts[-1]

    def __getitem__(self, at: Any) -> Any:
        numbers = range(len(self))[at]
        if isinstance(numbers, range):
            return Some(self, numbers)
        row = bisect_right(self._counts, numbers) - 1
        ((kind, fields),) = self._read(row, 1)
        return _item(kind, fields, numbers - self._counts[row], self.base, self.folder)

    def __iter__(self) -> Iterator[Item]:
        for row in range(0, len(self._ends) - 1, TOGETHER):
            for kind, fields in self._read(row, TOGETHER):
                for turn in range(fields.get("n", 1)):
                    yield _item(kind, fields, turn, self.base, self.folder)

    def _read(self, row: int, count: int) -> Iterator[tuple[Kind, Fields]]:
        """The kinds and fields of ``count`` rows from ``row`` on, or of as many as there are."""
        ends = self._ends[row : row + count + 1]
        self._file.flush()
        data = os.pread(self._file.fileno(), ends[-1] - ends[0], ends[0])
        for first, end in pairwise(ends):
            yield marshal.loads(data[first - ends[0] : end - ends[0]])


@dataclass(frozen=True)
class Some(Sequence[Item]):
    """The ``items`` with these ``numbers``."""

    items: Sequence[Item]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: Any) -> Any:
        found: Any = self.numbers[at]
        return self.items[found] if isinstance(found, int) else Some(self.items, found)


def read_items(path: Path, base: int = 0) -> Items:
    """The items of a ``.jsonl``, ``.csv`` or ``.parquet`` file, or of a ``.txt`` of classes.

    Paths of pictures and videos are relative to the file. Raises ``ValueError`` naming the line of
    an invalid item or a repeated id, and for a file without items.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise unknown("kind of job file", path.suffix or path.name, READERS)
    try:
        path.stat()  # at an address is_file would be False without credentials, too
    except FileNotFoundError:
        raise ValueError(f"JOBS must be a file, got {path}, which is not there") from None
    items = Items(base, path.parent.absolute())  # workers may be in another folder
    seen: set[int] = set()
    for number, (where, row) in enumerate(reader(path)):
        kind, fields = _read(where, row, f"{number:06d}")
        for turn in range(fields.get("n", 1)):
            mark = hash(name := _id(fields, turn))  # two have the same almost never
            if mark in seen and any(item.id == name for item in items):
                raise ValueError(f"{where}: ids must differ, got {name!r} twice; rename one")
            seen.add(mark)
        items.add(kind, fields)
    if not items:
        raise ValueError(f"{path} must hold at least one item, got none")
    return items


def parse(where: str, row: Fields, base: int, folder: Path, name: str = "") -> list[Item]:
    """The item of a ``row``, called ``name`` without an id, or the ``n`` of it, whose ids end in
    /0, /1 and so on; raises ``ValueError`` beginning with ``where``.
    """
    kind, fields = _read(where, row, name)
    turns = range(fields.get("n", 1))
    return [_item(kind, fields, turn, base, folder) for turn in turns]


def _item(kind: Kind, fields: Fields, turn: int, base: int, folder: Path) -> Item:
    """The item number ``turn`` of a row with these ``fields``."""
    images, videos = fields.get("image", ()), fields.get("video", ())
    none = OF_CALLS.isdisjoint(fields)
    options = () if none else tuple((one, fields[one]) for one in OPTIONS if one in fields)
    place = str(folder) if images or videos else ""
    rest = images, fields.get("method"), place, videos, fields.get("draw"), options
    name = _id(fields, turn)
    seed = fields["seed"] + turn if "seed" in fields else seed_of(name, base)
    return Item(name, kind, fields[kind], seed, *rest)


def _read(where: str, row: Fields, name: str) -> tuple[Kind, Fields]:
    """The kind and the values of a ``row``; see :func:`parse`."""
    found: Fields = {"id": name}
    for field, value in row.items():
        if value is None or value == "":
            continue
        if field not in FIELDS:
            raise ValueError(f"{where}: {unknown('field', field, FIELDS)}")
        try:
            found[field] = FIELDS[field][0](value)
        except ValueError:
            message = f"{where}: {field} must be {FIELDS[field][1]}, got {shown(value)}"
            raise ValueError(message) from None
    if not found["id"]:
        raise ValueError(f"{where}: id must be text that is not empty, got none")
    try:
        return _kind(tuple(found)), found
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@cache  # a million lines have the same few fields
def _kind(fields: tuple[str, ...]) -> Kind:
    """The kind of an item with ``fields``; raises ``ValueError`` where they do not go together."""
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none of them"
        raise ValueError(f"an item must hold one of class, prompt or question, got {got}")
    kind: Any = kinds[0]
    for field in ("image", "video", "draw") if kind != "question" else ():
        if field in fields:
            raise ValueError(f"{field} must come with a question, got a {kind}")
    return kind


def _id(fields: Fields, turn: int) -> str:
    """The id of a row's item number ``turn``."""
    return f"{fields['id']}/{turn}" if fields.get("n", 1) > 1 else str(fields["id"])


# ---- how fields are read: each raises ValueError for what it does not take


def _whole(least: int, most: int) -> Callable[[Any], int]:
    """A whole number, which in a CSV is text."""

    def read(value: Any) -> int:
        text = str(value).strip()
        if type(value) in (int, str) and text.isdecimal() and least <= int(text[:20]) <= most:
            return int(text)
        raise ValueError

    return read


def _option(value: Any, word: bool = False) -> Any:
    """An option; a CSV's number or truth value is read as JSON's, unless it is a ``word``."""
    if isinstance(value, list):
        return tuple(_option(one, word) for one in value)
    if not isinstance(value, str) or word:
        return value
    try:
        number = json.loads(value)
    except ValueError:
        return value
    return number if isinstance(number, int | float) else value


def _text(value: Any) -> str:
    """A text; a whole number becomes one, since a class may be an id."""
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not text.strip():
        raise ValueError
    text.encode()  # not half a surrogate pair
    return text


def _name(value: Any) -> str:
    text = _text(value)
    if len(text) > MOST_ID or not text.isprintable():
        raise ValueError
    return text


def _flag(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _paths(value: Any) -> tuple[str, ...]:
    paths = value if isinstance(value, list) else [value]
    fine = all(isinstance(v, str) and v and "\0" not in v for v in paths)
    if not fine or any(ADDRESS.match(v) and not OF_PICTURES.match(v) for v in paths):
        raise ValueError
    return tuple(paths)


FIELDS: dict[str, tuple[Callable[[Any], Any], str]] = {  # and what each must be
    "id": (_name, f"text of at most {MOST_ID} printable characters"),
    **dict.fromkeys((*KINDS, "method"), (_text, "text that is not empty")),
    **dict.fromkeys(("image", "video"), (_paths, "a path or a list of paths, here or at https://")),
    "seed": (_whole(0, 2**63 - 1), "a whole number from 0 to 2**63 - 1"),
    "draw": (_flag, "true or false"),
    "n": (_whole(1, MOST_OF_ONE), f"from 1 to {MOST_OF_ONE}"),
    **dict.fromkeys(OPTIONS, (_option, "")),
    **dict.fromkeys(WORDS, (partial(_option, word=True), "")),
}


# ---- rows of files


def _jsonl(path: Path) -> Iterator[Row]:
    for where, line in numbered_lines(path):
        row = json_value(where, line)
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must be a JSON object, got a {type(row).__name__}")
        yield where, row


def _csv(path: Path) -> Iterator[Row]:
    try:
        # blank lines are not dropped: some are inside quotes
        reader = csv.DictReader(text_lines(path), restkey="", strict=True)
        names = reader.fieldnames or ()
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{path} must have columns of different names, got {twice[0]!r} twice")
        for number, row in enumerate(reader, start=1):
            where = f"{path} row {number}"
            if row.pop("", None) is not None:
                raise ValueError(f"{where}: must have {len(names)} fields, got more")
            yield where, row
    except csv.Error as error:
        raise ValueError(f"{path} must be CSV with a header, got: {error}") from None


def _parquet(path: Path) -> Iterator[Row]:
    with needed("reading Parquet", "batch"):
        from pyarrow import ArrowException, parquet
    with path.open("rb") as stream:
        try:
            batches = parquet.ParquetFile(stream).iter_batches()
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                # a decimal number or a date is read like a CSV's
                yield f"{path} row {number}", json.loads(json.dumps(row, default=str))
        except (ArrowException, OSError, ValueError) as error:
            raise ValueError(
                f"{path} must be a Parquet file, got: {sentence_of(error)[:200]}"
            ) from None


def _classes(path: Path) -> Iterator[Row]:
    return ((where, {"class": line.strip()}) for where, line in numbered_lines(path))


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    **dict.fromkeys(JSON_LINES, _jsonl),
    ".csv": _csv,
    ".parquet": _parquet,
    ".txt": _classes,
}
