"""The target's own answers to the questions of chats, from which its drafter learns best: generated
by the fastest method, in batches, and stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specmm.chats.forms import UNSAID, Chat
from specmm.chats.tokens import ChatReader
from specmm.loading.checkpoints import read_json
from specmm.loading.files import writable, write_whole
from specmm.recipes.training.drawn_rows import made_by

TEMPERATURES = (0.0, 1.0)  # by question, in turn
AT_ONCE = 32  # questions answered together


def answered(
    pipe: Any, reader: ChatReader, chats: Sequence[Chat], share: float, longest: int, out: Path
) -> Iterator[Chat]:
    """A ``share`` of ``chats``, chosen by their questions, with all answers replaced by answers of
    ``pipe`` of at most ``longest`` tokens.

    Answers are stored in ``out`` batch by batch, under a key of everything they depend on, so that
    an interrupted run continues.
    """
    facts = (longest, TEMPERATURES, *reader.facts())
    folder = writable(out / "answers" / made_by(pipe.model, *facts))
    answers: dict[str, list[str]] = {}
    for file in folder.glob("*.json"):
        answers |= read_json(file)
    keyed = [chat.key or chat.keyed().key for chat in chats]
    places = {key: i for i, key in enumerate(keyed) if int(key, 16) / 16**16 < share}
    with tqdm(total=len(places), desc="answer") as bar:
        for which, temperature in enumerate(TEMPERATURES):
            keys = [key for key in places if int(key, 16) % len(TEMPERATURES) == which]
            new = [key for key in keys if key not in answers]
            bar.update(len(keys) - len(new))
            for start in range(0, len(new), AT_ONCE):
                part = {key: chats[places[key]] for key in new[start : start + AT_ONCE]}
                fitting = {k: chat for k, chat in part.items() if reader.has_room(chat, longest)}
                if fitting:
                    texts = _answers(pipe, reader, fitting, temperature, longest)
                    write_whole(folder / f"{new[start]}.json", json.dumps(texts).encode())
                    answers |= texts
                bar.update(len(part))
    for key, chat in zip(keyed, chats, strict=True):
        ready = _learnable(reader, chat, answers.get(key, ()))
        if not any(part.get("text") == UNSAID for m in ready.messages for part in m["content"]):
            yield ready


def _turns(chat: Chat) -> list[int]:
    """The assistant's messages to replace: messages that no tool's message follows."""
    roles = [message["role"] for message in chat.messages]
    pairs = zip(roles, [*roles[1:], ""], strict=True)
    return [i for i, pair in enumerate(pairs) if pair[0] == "assistant" and pair[1] != "tool"]


def _learnable(reader: ChatReader, chat: Chat, texts: Sequence[str]) -> Chat:
    """``chat`` with ``texts`` as its answers, or unchanged if nothing can be learnt from them."""
    learnable = _answered(chat, texts)
    try:
        return replace(learnable, length=reader.check(learnable))
    except ValueError:
        return chat


def _answered(chat: Chat, texts: Sequence[str]) -> Chat:
    """``chat`` with its first answers replaced by ``texts``."""
    messages = list(chat.messages)
    for i, text in zip(_turns(chat), texts, strict=False):
        messages[i] = {"role": "assistant", "content": [{"type": "text", "text": text}]}
    return replace(chat, messages=messages)


def _answers(
    pipe: Any, reader: ChatReader, chats: dict[str, Chat], temperature: float, longest: int
) -> dict[str, list[str]]:
    """The answers to ``chats``, turn by turn."""
    texts: dict[str, list[str]] = {key: [] for key in chats}
    for turn in range(max(len(_turns(chat)) for chat in chats.values())):
        keys = [key for key, chat in chats.items() if turn < len(_turns(chat))]
        prompts = [_answered(chats[key], texts[key]) for key in keys]
        answers = reader.answers(
            pipe,
            prompts,
            [_turns(chat)[turn] for chat in prompts],
            temperature=temperature,
            max_new_tokens=longest,
            seed=[int(key, 16) % 2**31 for key in keys] if temperature else None,
        )
        for key, text in zip(keys, answers, strict=True):
            texts[key].append(text)
    return texts
