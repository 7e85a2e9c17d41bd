"""Chats as training data: all are checked first, unusable chats are set aside, some are held out,
and the others are stored on disk.

Shape letters: B chats of a batch, L tokens.
"""

from __future__ import annotations

import json
import sys
import tempfile
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from tqdm import tqdm

from specmm.chats.forms import Chat, Unusable, bytes_of, chat_of, rows_of
from specmm.chats.tokens import ChatReader
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.loading.files import OF_PICTURES
from specmm.recipes.loop import rank
from specmm.recipes.training.seen import Read
from specmm.vlm.pictures import fetched, open_image
from specmm.vlm.videos import open_video

TOGETHER = 64  # rows looked at by several threads
FIRST = 8  # rows of which the tokens that are learnt are compared with their answers
LONGEST = 80  # tokens of an answer that acceptance is measured on
SHOWN = 4000  # characters of the chat that is shown before a training


@dataclass(frozen=True)
class Opening:
    """Context for opening data: the ``reader`` of a model's chats, the ``target`` itself (loaded
    when needed), and a recipe's settings.
    """

    reader: ChatReader
    target: Callable[[], VLMTarget]
    out: Path
    held_out: float
    seed: int
    unanswered: bool = False  # empty answers are the target's to give


@dataclass(frozen=True)
class Conversations:
    """Functions of opened chats. ``rows(count)``: chats to learn from (None: all); ``draw(number,
    visual)``: one chat of those with or without pictures, and ``sorts`` says which of the two
    exist; ``read``: a batch of chats by ``reader``; ``prompts(count)``: held-out questions, perhaps
    edited and read by another reader.
    """

    rows: Callable[[int | None], Sequence[Any]]
    draw: Callable[[int, bool], Any]
    prompts: Callable[..., VLMPrompt]
    reader: ChatReader
    read: Read
    sorts: Sequence[bool] = (False, True)


class Spool(Sequence[Chat]):
    """Chats in a temporary file in ``folder``, with pictures that are not files."""

    def __init__(self, folder: Path) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.ends = array("q", [0])

    def add(self, chat: Chat) -> None:
        """Write ``chat``."""
        images = [
            s if isinstance(s, str) else [b64encode(bytes_of(s)).decode()] for s in chat.images
        ]
        self.file.seek(self.ends[-1])
        self.file.write(json.dumps({**vars(chat), "images": images}, default=str).encode())
        self.ends.append(self.file.tell())

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> Any:
        begin = self.ends[index]
        self.file.seek(begin)
        facts = json.loads(self.file.read(self.ends[index + 1] - begin))
        facts["images"] = [s if isinstance(s, str) else b64decode(s[0]) for s in facts["images"]]
        return Chat(**facts)


def conversations(places: Sequence[str], opening: Opening) -> Conversations:
    """The chats in files and folders ``places``; each epoch has another order.

    Chats with the same question are either all learnt from or all held out. Raises ``ValueError``
    without two different usable chats.
    """
    chats, keys, shows = _spooled(places, opening)
    different = sorted(set(keys))
    if len(different) < 2:
        raise ValueError(
            "data must hold two different questions that can be used, one to measure on, got "
            f"{len(different)} in {', '.join(places)}"
        )
    count = round(opening.held_out * len(different))
    held_out = set(different[: min(max(count, 1), len(different) - 1)])
    learnt = [i for i, key in enumerate(keys) if key not in held_out]
    by_sort = {sort: [i for i in learnt if bool(shows[i]) == sort] for sort in (False, True)}
    questions = [i for i in range(len(keys)) if keys[i] in held_out]
    questions.sort(key=lambda i: (not shows[i], keys[i]))
    reader = opening.reader
    data: Any = chats
    sample = reader.coloured(chats[learnt[0]], sys.stderr.isatty())
    _tell(f"{chats[learnt[0]].place}, of which the answers are learnt:\n{sample[:SHOWN]}")
    _tell(f"{len(learnt)} chats to learn from, {len(questions)} held out")

    @lru_cache(4)
    def order(count: int, epoch: int) -> list[int]:
        mixed = torch.Generator().manual_seed(opening.seed * 1000 + epoch)
        return torch.randperm(count, generator=mixed).tolist()

    def draw(number: int, visual: bool) -> Chat:
        pool = by_sort[visual]
        return chats[pool[order(len(pool), number // len(pool))[number % len(pool)]]]

    def rows(count: int | None) -> Sequence[Chat]:
        chosen = order(len(learnt), 0)[: count or len(learnt)]
        subset: Any = Subset(data, [learnt[i] for i in sorted(chosen)])  # not typed as a Sequence
        return subset

    def prompts(
        count: int, other: ChatReader = reader, edit: Callable[[Chat], Chat] = lambda chat: chat
    ) -> VLMPrompt:
        fitting = (chat for i in questions if reader.has_room(chat := chats[i], LONGEST))
        if not (batch := list(islice(fitting, count))):
            raise ValueError(
                f"data must hold questions that leave room for answers of {LONGEST} tokens, got "
                f"none among the {len(questions)} that were held out"
            )
        return other.prompts([edit(chat) for chat in batch], LONGEST)

    sorts = [sort for sort, numbers in by_sort.items() if numbers]
    return Conversations(rows, draw, prompts, reader, reader.read, sorts)


def _tell(text: str) -> None:
    if not rank()[0]:  # only the first of several processes prints it
        tqdm.write(text, file=sys.stderr)


def _spooled(places: Sequence[str], opening: Opening) -> tuple[Spool, array[int], bytearray]:
    """The usable chats, each with its key and whether it has pictures or videos."""
    chats, keys, shows = Spool(opening.out), array("Q"), bytearray()
    aside: dict[str, list[Any]] = {}
    rows = rows_of(places)
    opening.reader.begin()
    for chat in tqdm(_looked_through(rows, opening.unanswered), desc="look", unit=" chats"):
        try:
            if isinstance(chat, Unusable):
                raise chat
            chat = replace(chat, length=opening.reader.check(chat))
        except (ValueError, OSError) as error:
            kind = getattr(error, "kind", "not what the model's processor takes")
            aside.setdefault(kind, [f"{chat.place}: {error}", 0])[1] += 1
            continue
        if len(chats) < FIRST and not opening.unanswered:
            opening.reader.verify(chat)
        chats.add(chat)
        keys.append(int(chat.key, 16))
        shows.append(chat.visual)
    for problem, count in aside.values():
        _tell(problem if count == 1 else f"{problem} ({count} such)")
    return chats, keys, shows


def _looked_through(rows: Iterator[Any], unanswered: bool) -> Iterator[Chat | Unusable]:
    """Every row's chat, after its pictures and videos were checked, or the error."""
    look = partial(_opened_chat, unanswered=unanswered)
    with ThreadPoolExecutor() as pool:
        while part := list(islice(rows, TOGETHER)):
            yield from pool.map(look, part)


def _opened_chat(row: tuple[Any, Path, str], unanswered: bool) -> Chat | Unusable:
    """The chat of a ``row`` with its pictures opened, or the error that makes it unusable."""
    content, folder, place = row
    try:
        chat = chat_of(content, folder, place, unanswered)
        opened = [_seen(source) for source in chat.images]
        videos = [_played(source) for source in chat.videos]
        images, sizes = [source for source, _ in opened], [size for _, size in opened]
        return replace(chat, images=images, videos=videos, sizes=sizes).keyed()
    except Unusable as error:
        error.place = place
        return error


def _played(source: Any) -> Any:
    """The video ``source``, after checking that it can be opened."""
    if not isinstance(source, str) or not Path(source).exists():
        raise Unusable(f"no video at {source if isinstance(source, str) else 'bytes'}", "no video")
    try:
        open_video(source)
    except (ValueError, OSError) as error:
        raise Unusable(f"{error}", "a video that cannot be read") from error
    return source


def _seen(source: Any) -> tuple[Any, tuple[int, int]]:
    """The picture ``source`` (a remote picture as bytes) and its size, after opening it."""
    far = isinstance(source, str) and OF_PICTURES.match(source)
    try:
        image = fetched(source) if far else source
        return image, open_image(image).size
    except FileNotFoundError as error:
        raise Unusable(f"no picture at {source}", "no picture") from error
    except (ValueError, OSError) as error:
        raise Unusable(f"{error}", "a picture that cannot be read") from error
