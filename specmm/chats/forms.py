"""Reads chats in common file formats into one form.

A row is our own (``question``, ``answer``), ShareGPT's (``conversations`` of ``from`` and
``value``) or has ``messages`` as OpenAI and transformers write them. Files hold a JSON array, JSON
lines or parquet; a folder holds such files, or was saved by ``datasets``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from PIL import Image

from specmm.extending.kinds import shown
from specmm.loading.extras import needed
from specmm.loading.files import OF_PICTURES, files_below

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
UNSAID = "\ue001"  # an answer that the target is to give
KINDS = ("image", "video")
TALKS = ("messages", "conversations")
NOTES = ("id", "idx", "index", "source", "dataset", "category", "metadata", "model")  # not said
OWN = ("question", "answer", "history")
READ = ("image", "images", "video", "videos", "system", "tools")
SAID = ("role", "from", "content", "value")
KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
REASONING = KEPT[-3:]
MARKED = re.compile(r"\s*<(image|video)>\s*")
BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
FILES = (".json", ".jsonl", ".ndjson", ".parquet")

Part = dict[str, Any]  # {"type": "text", "text": …}, {"type": "image"} or {"type": "video"}
Message = dict[str, Any]  # role, content (parts) and, where there are any, those KEPT


class Unusable(ValueError):
    """A row from which nothing can be learnt; rows with one ``kind`` of fault are counted."""

    place = ""

    def __init__(self, said: str, kind: str = "") -> None:
        super().__init__(said)
        self.kind = kind or said


@dataclass(frozen=True)
class Chat:
    """``messages``, whose parts stand for the ``images`` and the ``videos`` in order; ``place`` is
    its file and line, ``key`` the digest of its questions, ``sizes`` the sizes of its images if
    known, ``length`` its number of tokens in the template of the model that learns from it.
    """

    messages: Sequence[Message]
    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    tools: Sequence[Any] | None = None
    place: str = ""
    key: str = ""
    sizes: Sequence[tuple[int, int]] | None = None
    length: int = 0

    def keyed(self) -> Chat:
        """This chat with its ``key`` computed."""
        unanswered = [message for message in self.messages if message["role"] != "assistant"]
        text = json.dumps([unanswered, self.tools], sort_keys=True, default=str).encode()
        digest = hashlib.sha256(text)
        for source in (*self.images, *self.videos):
            digest.update(hashlib.sha256(bytes_of(source)).digest())
        return replace(self, key=digest.hexdigest()[:16])

    @property
    def said(self) -> bytes:
        """The key and all messages and tools, as bytes for a digest."""
        text = json.dumps([self.messages, self.tools], sort_keys=True, default=str)
        return f"{self.key} {text}".encode()

    @property
    def visual(self) -> bool:
        """Whether it has pictures or videos."""
        return bool(self.images or self.videos)


def chat_of(row: Any, folder: Path, place: str = "", unanswered: bool = False) -> Chat:
    """The chat of a ``row``, up to its last answer; file names are relative to ``folder``. With
    ``unanswered`` empty answers become :data:`UNSAID`, which the target fills in.

    Raises ``Unusable`` for a row without a chat, and ``ValueError`` for unknown keys.
    """
    row = {"messages": row} if isinstance(row, list) else row
    if not isinstance(row, dict):
        raise Unusable(f"no chat, but {shown(row)}", "no chat")
    row = {key: value for key, value in row.items() if value is not None or key == "answer"}
    talk = next((name for name in TALKS if name in row), None)
    if talk is None and not {"question", "answer"} & row.keys():
        raise ValueError(
            f"{place} must hold messages, conversations, or question and answer, got "
            f"{', '.join(row) or 'nothing'}"
        )
    _check_keys(place, row, (*READ, *NOTES, *((talk,) if talk else OWN)))
    listed = {kind: _listed_media(row, kind) for kind in KINDS}
    sources = {kind: [_source(v, folder) for v in listed[kind]] for kind in KINDS}
    content = _Content(sources, folder, unanswered)
    messages = [content.read(entry, place) for entry in _entries(row, talk)]
    if row.get("system") and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": [_text(row["system"])]})
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not ends:
        raise Unusable("no answer")
    messages = messages[: ends[-1] + 1]
    questions = [message for message in messages if message["role"] == "user"]
    if not questions:
        raise Unusable("no question")
    media = content.placed(questions[0 if talk else -1])
    return Chat(messages, media["image"], media["video"], _tools(row.get("tools")), place)


def bytes_of(source: Any) -> bytes:
    """The bytes of a picture's or video's file, or of a picture in memory as PNG."""
    if isinstance(source, Image.Image):
        stream = io.BytesIO()
        source.save(stream, "png")
        return stream.getvalue()
    if isinstance(source, bytes):
        return source
    return Path(source).read_bytes() if Path(source).is_file() else str(source).encode()


def _check_keys(place: str, row: Mapping[str, Any], readable: Sequence[str]) -> None:
    if unread := [key for key in row if key not in readable]:
        raise ValueError(
            f"{place} has {unread[0]!r}, which is not read; leave it out of the data "
            f"(read are {', '.join(key for key in readable if key not in NOTES)})"
        )


def _entries(row: Mapping[str, Any], talk: str | None) -> list[Any]:
    """The raw messages of a row."""
    if talk is None:
        before = [("user", q, "assistant", a) for q, a in row.get("history", ())]
        turns = [*before, ("user", row.get("question"), "assistant", row.get("answer"))]
        pairs = chain.from_iterable((t[:2], t[2:]) for t in turns)
        return [{"role": role, "content": text} for role, text in pairs]
    entries = row[talk]
    if isinstance(entries, Mapping):  # columns, as datasets keeps a list of records
        entries = [
            dict(zip(entries, values, strict=True))
            for values in zip(*entries.values(), strict=True)
        ]
    if not isinstance(entries, list):
        raise Unusable(f"{talk} is {shown(entries)}, not a list", f"{talk} is no list")
    return entries


@dataclass
class _Content:
    """Reads a row's messages. Placeholders show its ``listed`` pictures and videos, by kind."""

    listed: dict[str, list[Any]]
    folder: Path
    unanswered: bool = False

    def __post_init__(self) -> None:
        self.shown: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        self.waiting = {kind: list(media) for kind, media in self.listed.items()}

    def read(self, entry: Any, place: str) -> Message:
        """The message of an ``entry``; raises ``Unusable`` if it cannot be used."""
        if not isinstance(entry, Mapping):
            raise Unusable(f"a message is {shown(entry)}", "a message is no object")
        entry = {key: value for key, value in entry.items() if value is not None}
        _check_keys(place, entry, (*SAID, *KEPT))
        named = entry.get("role", entry.get("from"))
        role = ROLES.get(str(named).lower())
        if role is None:
            raise Unusable(f"no role {shown(named)}")
        content = entry.get("content", entry.get("value", "" if "tool_calls" in entry else None))
        message = {key: entry[key] for key in KEPT if key in entry}
        if "tool_calls" in message:
            message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        if role == "assistant" and self.unanswered and content in (None, ""):
            content = UNSAID
        parts = self._parts(content, role)
        if role == "assistant":
            text = "".join(part.get("text", "") for part in parts)
            if any(part["type"] != "text" for part in parts) or MARKED.search(text):
                raise Unusable("a picture in an answer")
            if not text.strip() and "tool_calls" not in message:
                raise Unusable("an empty answer")
        return {"role": role, "content": parts, **message}

    def _parts(self, content: Any, role: str) -> list[Part]:
        """The parts of a message's ``content``, a text or a list."""
        if isinstance(content, str):
            return [_text(content)] if role == "assistant" else self._marked(content)
        if not isinstance(content, list):
            kind = "an answer" if role == "assistant" else f"a {role} message"
            raise Unusable(f"{kind} that is no text, but {shown(content)}", f"{kind} is no text")
        return list(chain.from_iterable(map(self._part, content)))

    def _marked(self, text: str) -> list[Part]:
        """``text`` split into parts at its placeholders of listed pictures and videos."""
        if not any(self.listed.values()):
            return [_text(text)]
        pieces = MARKED.split(text)
        for kind in pieces[1::2]:
            self._show(kind, None)
        pairs = zip([*pieces[1::2], ""], pieces[::2], strict=True)
        parts = [part for kind, said in pairs for part in (_text(said), {"type": kind})][:-1]
        return [part for part in parts if part.get("text") != ""] or [_text("")]

    def _part(self, part: Any) -> list[Part]:
        """One part of a message; notes the picture or video that it shows."""
        if isinstance(part, str):
            return [_text(part)]
        if not isinstance(part, Mapping):
            raise Unusable(f"a part is {shown(part)}", "a part is no object")
        fields = {key: value for key, value in part.items() if value is not None}
        kind = fields.pop("type", next((key for key in ("text", *KINDS) if key in fields), None))
        if kind == "text":
            return [_text(fields.get("text"))]
        kind = str(kind).removeprefix("input_").removesuffix("_url")
        if kind not in KINDS:
            raise Unusable(f"no part of type {shown(kind)}")
        named = next((value for key, value in fields.items() if key != "detail"), None)
        self._show(kind, named)
        return [{"type": kind}]

    def _show(self, kind: str, named: Any) -> None:
        """Record the source of the next ``kind`` placeholder: ``named`` there, or listed next."""
        if named is not None:
            self.shown[kind].append(_source(named, self.folder))
        elif self.waiting[kind]:
            self.shown[kind].append(self.waiting[kind].pop(0))
        else:
            raise Unusable(f"more <{kind}> than there are {kind}s")

    def placed(self, question: Message) -> dict[str, list[Any]]:
        """All pictures and videos; files without a placeholder go before ``question``."""
        for kind in reversed(KINDS):
            if not self.waiting[kind]:
                continue
            if self.shown[kind]:
                raise Unusable(f"fewer <{kind}> than there are {kind}s")
            question["content"][:0] = [{"type": kind} for _ in self.waiting[kind]]
            self.shown[kind] = self.waiting[kind]
        return self.shown


def _text(text: Any) -> Part:
    if not isinstance(text, str):
        raise Unusable(f"a text is {shown(text)}", "a text is no text")
    return {"type": "text", "text": text}


def _call(call: Any) -> Any:
    """A tool call, whose arguments OpenAI writes as JSON text."""
    function = dict(call.get("function", call))
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except json.JSONDecodeError as error:
            raise Unusable("arguments of a tool that are no JSON") from error
    return {**call, "function": function} if "function" in call else function


def _tools(value: Any) -> list[Any] | None:
    """The tools of a row, which some data store as JSON text."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value else value
    except json.JSONDecodeError as error:
        raise Unusable("tools that are no JSON") from error
    return list(tools) if tools else None


def _listed_media(row: Mapping[str, Any], kind: str) -> list[Any]:
    """The pictures or videos that a row lists beside its messages."""
    values = [row[name] for name in (kind, f"{kind}s") if name in row]
    flat = chain.from_iterable(v if isinstance(v, list | tuple) else [v] for v in values)
    return [value for value in flat if value is not None and value != ""]


def _source(value: Any, folder: Path) -> Any:
    """A picture or video as :func:`specmm.vlm.pictures.open_image` takes it."""
    if isinstance(value, Mapping):
        keys = ("bytes", "base64", "path", "url", "image", "video")
        value = next((value[name] for name in keys if value.get(name) is not None), None)
    if isinstance(value, Path):
        return str(folder / value)
    if isinstance(value, bytes | Image.Image):
        return value
    if not isinstance(value, str):
        raise Unusable(f"a picture is {shown(value)}", "a picture is no picture")
    if OF_PICTURES.match(value):
        return value
    if value.startswith("file:"):
        value = unquote(urlparse(value).path)
    if len(value) > 64 and BASE64.fullmatch(value) and not (folder / value[:255]).exists():
        try:
            return base64.b64decode(value)
        except binascii.Error:
            pass
    return str(folder / value)


def rows_of(places: Sequence[str]) -> Iterator[tuple[Any, Path, str]]:
    """The rows of all files at ``places``, each with the folder of its file names and its place.

    Raises ``ValueError`` at once for a place without chats, and if the package that reads them is
    not installed.
    """
    paths = [Path(place).expanduser() for place in places]
    if missing := [path for path in paths if not path.exists()]:
        raise ValueError(f"data must be files or folders of chats, got nothing at {missing[0]}")
    files = list(chain.from_iterable(map(_files, paths)))
    tables = (".parquet", ".arrow")
    return chain.from_iterable(_arrow(f) if f.suffix.lower() in tables else _json(f) for f in files)


def _files(path: Path) -> list[Path]:
    """The files of chats at ``path``."""
    if path.is_file():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if len(splits) > 1:
            folders = ", ".join(str(path / split) for split in splits)
            raise ValueError(f"data must be one split of {path}, give one of {folders}")
        path = path / splits[0]
    if (path / "state.json").is_file():
        files = json.loads((path / "state.json").read_text())["_data_files"]
        return [path / file["filename"] for file in files]
    below = [Path(name) for name, reason in files_below(str(path)) if not reason]
    readable = [file for file in below if file.suffix.lower() in FILES]
    if not readable:
        endings = sorted({file.suffix for file in below if file.suffix})
        raise ValueError(
            f"data must be files of chats ({', '.join(FILES)}), got a folder of "
            f"{', '.join(endings[:3]) or 'nothing'} at {path}; write questions and answers about "
            "them into a file"
        )
    return readable


def _json(file: Path) -> Iterator[tuple[Any, Path, str]]:
    """The rows of a JSON array or of JSON lines; a line that is not JSON counts as a text."""
    with file.open("rb") as stream:
        begin = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if begin.startswith(b"[") and (rows := _array(stream.read())) is not None:
            yield from ((row, file.parent, f"{file.name}[{i}]") for i, row in enumerate(rows))
            return
        stream.seek(0)
        for number, line in enumerate(stream, 1):
            if line := line.removeprefix(b"\xef\xbb\xbf").strip():
                yield _parsed(line), file.parent, f"{file.name}:{number}"


def _array(text: bytes) -> list[Any] | None:
    """The rows of a JSON array; None if ``text`` is JSON lines or a single chat."""
    try:
        rows = json.loads(text.removeprefix(b"\xef\xbb\xbf"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    single = bool(rows) and all(isinstance(row, dict) and {"role", "from"} & {*row} for row in rows)
    return [rows] if single else rows


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return line.decode(errors="replace")


def _arrow(file: Path) -> Iterator[tuple[Any, Path, str]]:
    """The rows of a parquet file, or of a file that ``datasets`` saved."""
    with needed(f"reading {file}", "batch"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        if file.suffix.lower() == ".parquet":
            batches = pq.ParquetFile(file).iter_batches(256)
        else:
            batches = pa.ipc.open_stream(pa.memory_map(str(file)))
        rows = map(_without_nulls, chain.from_iterable(batch.to_pylist() for batch in batches))
        yield from ((row, file.parent, f"{file.name}[{i}]") for i, row in enumerate(rows))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} must be a table of chats ({error})") from error


def _without_nulls(value: Any) -> Any:
    """``value`` without null entries: a table gives all records the same keys, null if absent."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
