"""Chats in the format of OpenAI and transformers: messages of a role and a content, a text or
parts.

A part is ``{"type": "text", "text": …}``, or of type ``image`` or ``video``, with the picture or
video under that name, ``url``, ``path``, ``base64``, or OpenAI's ``image_url``. Frames of a video
may have their ``fps``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from specmm.extending.kinds import shown

KINDS = ("image", "video")
# what templates and processors raise
FAULTS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Chat:
    """``messages``, whose parts stand for the ``images`` and the ``videos`` in order; ``rates`` are
    the videos' frames a second, if given; ``more`` goes to the chat template, such as ``tools``.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    rates: list[Any] = field(default_factory=list)
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: Any) -> Chat:
        """The chat of ``messages``; raises ``ValueError`` for anything else."""
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(
                "messages must be a list of {'role': …, 'content': …}, or a list of such lists, "
                f"got {shown(messages) if messages else 'nothing'}"
            )
        chat = cls()
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f"each of messages must have a role and a content, got {shown(message)}"
                )
            chat.messages.append({**message, "content": chat._content(message)})
        return chat

    @property
    def texts(self) -> list[str]:
        """Texts of the messages without reasoning, which templates may leave out."""
        contents = [one["content"] for one in self.messages]
        texts = (p["text"] for one in contents for p in as_parts(one) if p["type"] == "text")
        return [text.rpartition("</think>")[2] for text in texts]

    def _content(self, message: Mapping[str, Any]) -> Any:
        """A message's content: a text, or parts with their pictures and videos taken out."""
        content = message.get("content", "" if "tool_calls" in message else None)
        if content is None and "tool_calls" in message:
            return ""
        if isinstance(content, str):
            return content
        if not isinstance(content, list | tuple):
            raise ValueError(
                f"the content of a message must be a text or a list of parts, got {shown(content)}"
            )
        return [self._part(part) for part in content]

    def _part(self, part: Any) -> dict[str, Any]:
        """One part of a message; its picture or video goes to ``images`` or ``videos``."""
        if isinstance(part, str):
            return as_text(part)
        if not isinstance(part, Mapping):
            raise ValueError(f"a part of a message must have a type, got {shown(part)}")
        kind = str(part.get("type")).removeprefix("input_").removesuffix("_url")
        if kind == "text" and isinstance(part.get("text"), str):
            return as_text(part["text"])
        if kind not in KINDS:
            raise ValueError(
                "a part of a message must be of type text, image or video, and hold it, got "
                f"{shown(part.get('type'))}"
            )
        names = (kind, f"{kind}_url", "url", "path", "base64")
        name = next((name for name in names if part.get(name) is not None), None)
        if name is None:
            raise ValueError(
                f"a part of type {kind} must hold {', '.join(names[:-1])} or base64, got "
                f"{', '.join(map(str, part))}"
            )
        source = part[name]
        if isinstance(source, Mapping):  # OpenAI's, with its "detail"
            source = source.get("url")
        (self.images if kind == "image" else self.videos).append(
            _decoded(source) if name == "base64" else source
        )
        if kind == "video":
            self.rates.append(part.get("fps"))
        return {"type": kind}


def as_text(text: str) -> dict[str, Any]:
    """A part with a ``text``."""
    return {"type": "text", "text": text}


def as_parts(content: Any) -> list[dict[str, Any]]:
    """A ``content`` as parts."""
    return [as_text(content)] if isinstance(content, str) else list(content)


def joined(content: Any) -> str:
    """The text of a ``content``."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def chats_of(value: Any) -> list[Chat]:
    """The chats in ``value``, one list of messages or several; ``ValueError`` for anything else."""
    several = isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple)
    return [Chat.of(messages) for messages in (value if several else [value])]


def written(
    chat: Chat,
    write: Callable[..., Any],
    forms: Sequence[Callable[[Any], Any]],
    tokens: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """The text of ``chat`` in the chat template that ``write`` applies. Contents are written in the
    first of the ``forms`` in which all texts appear, and each of the ``tokens`` as often as it
    should.

    Raises ``ValueError`` if no form fits; in chats of text alone a template may leave some out.
    """
    usual = None
    reason = "others"
    for form in forms:
        try:
            messages = [{**one, "content": form(one["content"])} for one in chat.messages]
            text = str(write(messages, **chat.more))
            if fits(text, chat.texts, tokens):
                return text
            usual = text if usual is None else usual
        except (TemplateError, *FAULTS) as error:
            reason = " ".join(str(error).split())
    if usual is not None and not tokens:
        return usual
    raise ValueError(
        "the chat template must show all texts and a placeholder for each picture and video, got "
        f"{reason}; without a template give chat=False and a raw prompt"
    )


def fits(found: str, texts: Sequence[str], tokens: Mapping[str, int]) -> bool:
    """Whether the prompt ``found`` holds all ``texts``, and each of ``tokens`` that many times."""
    flat = "".join(found.split())  # templates trim
    all_tokens = all(found.count(token) == count for token, count in tokens.items())
    return all_tokens and all("".join(text.split()) in flat for text in texts)


def _decoded(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"base64 of a part must be decodable, got {error}") from error
