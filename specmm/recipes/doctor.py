"""Diagnoses low acceptance: measures a drafter on its target's own answers, unchanged and under
each common misreading of its interface, and with prompts in other forms than the chat template's.

A change is worth its gain in acceptance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from specmm import __version__
from specmm.chats.forms import Chat
from specmm.chats.tokens import ChatReader
from specmm.choose.traces import Trace
from specmm.core.derived import digest
from specmm.hf.drafters.drafter_formats import ModelFolder, mtp_layers
from specmm.hf.drafters.drafting import KINDS, load_drafter, method_of
from specmm.hf.loading.pretrained import find, find_target, load_tokenizer, weights_folder
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.loading.checkpoints import embeddings_of, fingerprint
from specmm.recipes.conversations import LONGEST, Conversations, conversations
from specmm.recipes.following import (
    DEPTH,
    Evidence,
    Followed,
    Reading,
    evidence,
    followed,
    reading_of,
    trace,
)
from specmm.recipes.misreadings import Change, changes
from specmm.recipes.recipe import Places
from specmm.recipes.settings import load_frozen, sees
from specmm.recipes.source import PROMPT, Data
from specmm.recipes.training.texts import text_stream, windows
from specmm.text.pipeline import TextPipeline

T = TypeVar("T")
WORTH = 1.02  # times as many tokens a round: less is no reason to change anything
METHODS = ("eagle3", "msd", "block", "mtp")  # methods whose drafters read the target's states
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class Diagnosis:
    """Acceptance under the drafter's ``own`` reading and under ``changes``, sorted by tokens a
    round at temperature 1, which a few answers estimate better than greedy chains. ``asked`` holds
    the results for other forms of the prompts, by form.
    """

    own: Followed
    changes: Sequence[tuple[Change, Followed]]
    asked: Sequence[tuple[str, Followed]] = ()

    @property
    def best(self) -> tuple[Change, Followed] | None:
        """The best change if its gain is worth it, else None."""
        return self._worth(self.changes)

    @property
    def better_asked(self) -> tuple[str, Followed] | None:
        """The form of prompts with the highest acceptance, if its gain is worth it, else None."""
        return self._worth(self.asked)

    def _worth(self, tried: Sequence[tuple[T, Followed]]) -> tuple[T, Followed] | None:
        enough = [pair for pair in tried if pair[1].sampled > WORTH * self.own.sampled]
        return max(enough, key=lambda pair: pair[1].sampled, default=None)


def diagnose(seen: Evidence, reading: Reading, depth: int = DEPTH) -> Diagnosis:
    """The acceptance of a drafter under ``reading``, and under each change of it."""
    usual = followed(seen, reading, depth)
    tried = [(change, followed(seen, change.reading, depth)) for change in changes(reading, seen)]
    return Diagnosis(usual, sorted(tried, key=lambda pair: -pair[1].sampled))


@dataclass(frozen=True)
class Examined:
    """A drafter in ``place``, of method ``kind``, with its ``target`` and its ``questions``."""

    place: Path
    kind: str
    target: VLMTarget
    network: Any
    questions: Questions

    def diagnosis(self) -> Diagnosis:
        """The diagnosis of low acceptance."""
        seen = self._seen(self.questions.prompt)
        reading = reading_of(self.network, seen.target)
        others = [
            (way, followed(self._seen(prompt), reading)) for way, prompt in self.questions.others()
        ]
        return replace(diagnose(seen, reading), asked=others)

    def trace(self, temperature: float) -> Trace:
        """The acceptance of its drafts at a ``temperature``, as a trace."""
        seen = self._seen(self.questions.prompt, temperature)
        facts = {
            "specmm": __version__,
            "method": self.kind,
            "temperature": temperature,
            "rule": "recursive",
            "target": fingerprint(embeddings_of(self.target.model)),
            "drafter": digest(getattr(self.network, "model", self.network)),
        }
        return trace(seen, reading_of(self.network, seen.target), facts)

    def _seen(self, prompt: VLMPrompt, temperature: float = 0.0) -> Evidence:
        return evidence(self.target.model, prompt, self.questions.ends, temperature)


@dataclass(frozen=True)
class Questions:
    """Held-out questions as one ``prompt``, and the tokens that end answers, ``ends``; ``others``
    are the same questions in other forms, by form.
    """

    prompt: VLMPrompt
    ends: Sequence[int]
    others: Callable[[], Iterator[tuple[str, VLMPrompt]]]


def examined(
    model: str, drafter: str | None, data: Sequence[str] = (), questions: int = 16, seed: int = 0
) -> Examined:
    """The ``drafter`` (a folder; None: the only drafter beside the ``model``), with held-out
    ``questions`` from the chats in ``data`` or, for a text model without data, Python code.

    Raises ``ValueError`` for drafters that do not read the target's states.
    """
    folder = find_target(model)
    drafter_folder = find(drafter) if drafter else _drafter_beside(folder)
    kind = "mtp" if drafter_folder == folder and _own_layers(folder) else method_of(drafter_folder)
    if kind not in METHODS:
        raise ValueError(
            f"doctor follows drafters that read the target's states ({', '.join(METHODS)}), got "
            f"{drafter_folder} of method {kind or 'none'}"
        )
    if sees(folder) and not data:
        raise ValueError("data must be chats that show pictures, got none; give --data FILE")
    target = load_frozen(folder, "cpu", "float32")
    network = load_drafter(kind, drafter_folder, target.model)
    with TemporaryDirectory() as out:
        asked_ways = asked(folder, target, data, questions, Path(out), seed)
    return Examined(drafter_folder, kind, target, network, asked_ways)


def _drafter_beside(folder: Path) -> Path:
    """The drafter that lies beside the model in ``folder``."""
    paths = [folder / "drafters" / KINDS[kind].place for kind in METHODS]
    folders = [path for path in paths if (path / "config.json").is_file()]
    if _own_layers(folder) and paths[METHODS.index("mtp")] not in folders:
        folders.append(folder)
    if len(folders) != 1:
        raise ValueError(
            f"{folder} must have one drafter of {', '.join(METHODS)} beside it, got "
            f"{', '.join(path.name for path in folders) or 'none'}; name it"
        )
    return folders[0]


def _own_layers(folder: Path) -> int:
    """The MTP layers in the checkpoint of the model in ``folder``."""
    return mtp_layers(ModelFolder(weights_folder(folder)))


def asked(
    folder: Path, target: VLMTarget, data: Sequence[str], count: int, out: Path, seed: int
) -> Questions:
    """``count`` questions outside the training data, for the ``target`` in ``folder``."""
    if data:
        source = Data(Places(list(data), conversations), 0.5, None, "skip", None)
        opened = source.opened(folder, lambda: target, out, seed, unanswered=True)
        others = partial(_otherwise, opened, count)
        return Questions(opened.prompts(count), opened.reader.stops, others)
    words = load_tokenizer(weights_folder(folder))
    held_out = windows(text_stream(words, out, held_out=True), 0, count, PROMPT, seed)
    prompt = VLMPrompt(padded(held_out.tolist()), LONGEST)
    return Questions(prompt, TextPipeline(target.model, words).ends(), lambda: iter(()))


def _otherwise(opened: Conversations, count: int) -> Iterator[tuple[str, VLMPrompt]]:
    """The first ``count`` held-out questions in other forms than the chats' and the template's."""
    reader = opened.reader
    ways: list[tuple[str, ChatReader, Callable[[Chat], Chat]]] = [
        ("without a system prompt", reader, lambda chat: with_system(chat, "")),
        (f"with the system prompt {SYSTEM!r}", reader, lambda chat: with_system(chat, SYSTEM)),
    ]
    for thinking in (True, False):
        if reader.thinking_known:
            variant = copy.copy(reader)
            variant.tell(thinking)
            ways.append((f"with{'' if thinking else 'out'} thinking", variant, lambda chat: chat))
    prompts = opened.prompts(count).rows()
    for way, variant, edit in ways:
        prompt = opened.prompts(count, variant, edit)
        if prompt.rows() != prompts:
            yield way, prompt


def with_system(chat: Chat, text: str) -> Chat:
    """``chat`` with its system prompt replaced by ``text``, or removed if that is empty."""
    others = [message for message in chat.messages if message["role"] != "system"]
    system = {"role": "system", "content": [{"type": "text", "text": text}]}
    return replace(chat, messages=[*([system] if text else []), *others])
