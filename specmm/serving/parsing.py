"""Chats' answers read into content, reasoning and tool calls, by transformers' parser of responses.

Their format is the tokenizer's ``response_template``, or the one that ``transformers serve`` uses
for the model's type.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from specmm.chats.forms import REASONING
from specmm.hf.prompts.messages import FAULTS
from specmm.loading.files import sentence_of
from specmm.serving.requests import Piece
from specmm.structured import Grammar

LOGGER = logging.getLogger(__name__)
CONTENT, THOUGHT, CALLS = "content", "reasoning_content", "tool_calls"
JSON_CALLS = {  # a field of a template, but for what is before and after a call
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
Parts = dict[str, Any]  # a message's parts: CONTENT, THOUGHT, CALLS, where present


class Plain:
    """Reads the whole answer as content."""

    def add(self, piece: Piece) -> Parts:
        """What a ``piece`` adds to the message."""
        return {CONTENT: piece.text} if piece.text else {}

    def end(self) -> Parts:
        """What the answer's end adds."""
        return {}


@dataclass(frozen=True)
class Parsing:
    """The format of a model's answers: its ``tokenizer``, the ``template`` that parses them, and
    its end tokens, ``ends``.
    """

    tokenizer: Any
    template: Mapping[str, Any]
    ends: Collection[int]

    @classmethod
    def of(cls, pipe: Any, ends: Collection[int]) -> Parsing | None:
        """The format of ``pipe``'s model; None if neither tokenizer nor transformers has one."""
        # transformers' module imports its whole server
        from transformers.cli.serving.utils import get_response_template

        template = get_response_template(pipe.tokenizer, pipe.model)
        if template is None:
            return None
        try:
            ResponseParser(template, prefix="")
        except FAULTS as error:
            said = sentence_of(error)
            LOGGER.warning("%s has a response_template that cannot be used: %s", pipe.name, said)
            return None
        return cls(pipe.tokenizer, template, ends)

    def form(self, tools: Collection[Any]) -> dict[str, Any]:
        """The template; without ``tools`` calls are plain text. Its patterns take a bounded number
        of blanks, since an unbounded search takes quadratic time.
        """
        kept = {k: v for k, v in self.template["fields"].items() if tools or k != CALLS}
        fields = {k: {**v, "optional": True} for k, v in kept.items()}
        text = json.dumps(fields).replace(r"\\s*", r"\\s{0,99}")
        return {**self.template, "fields": json.loads(text)}

    @cached_property
    def specials(self) -> dict[int, str]:
        """The texts of special tokens, but for end tokens, which end what is open by themselves."""
        added = self.tokenizer.added_tokens_decoder.items()
        return {i: one.content for i, one in added if one.special and i not in self.ends}

    def marks(self, tools: Collection[Any]) -> frozenset[int]:
        """The special tokens that the parser must see: those that the template's fields name."""
        named = json.dumps(self.form(tools)["fields"], ensure_ascii=False).replace("\\", "")
        return frozenset(i for i, text in self.specials.items() if text in named)

    def forced(self, functions: Sequence[Mapping[str, Any]]) -> Grammar | None:
        """The grammar of a call of one of the ``functions``. None if the template does not define
        it: if a call is not JSON of name and arguments between two texts without special tokens.
        """
        field = dict(self.template["fields"].get(CALLS, {}))
        begin = field.pop("open", field.pop("open_pattern", "").removeprefix(r"\s*"))
        end = field.pop("close", None)
        for text in (begin, end):
            if not text or not isinstance(text, str) or re.escape(text) != text:
                return None
        if field != JSON_CALLS or any(text in begin + end for text in self.specials.values()):
            return None
        tags = [
            {
                "type": "tag",
                "begin": f'{begin}\n{{"name": {json.dumps(function["name"])}, "arguments": ',
                "content": {
                    "type": "json_schema",
                    "json_schema": function.get("parameters") or {"type": "object"},
                    "max_whitespace_cnt": 1,
                },
                "end": f"}}\n{end}",
            }
            for function in functions
        ]
        form = {"type": "structural_tag", "format": {"type": "or", "elements": tags}}
        return Grammar("structural_tag", json.dumps(form))

    def parser(self, prompt: Sequence[int], tools: Collection[Any]) -> Parser:
        """Reads one answer to the ids of a ``prompt``, in which ``tools`` were shown."""
        prefix = self.tokenizer.decode(list(prompt))
        return Parser(_Lenient(self.form(tools), prefix, tools=list(tools)), self.ends)


class Parser:
    """Reads an answer by ``parser``. Blanks around content and around reasoning are left out.

    A call that the template cannot parse is content, and so is a call cut off by the answer's end
    without a token of ``ends``.
    """

    def __init__(self, parser: ResponseParser, ends: Collection[int]) -> None:
        self.parser = parser
        self.ends = ends
        self.calls = 0
        self.body = ""  # the open call's
        self.blanks = dict.fromkeys((CONTENT, THOUGHT), "")  # held back until more text follows
        self.begun: set[str] = set()
        self.last: int | None = None  # token

    def add(self, piece: Piece) -> Parts:
        """What a ``piece`` adds to the message."""
        self.last = piece.tokens[-1] if piece.tokens else self.last
        return self._parts(self.parser.feed(piece.text), True)

    def end(self) -> Parts:
        """What the answer's end adds."""
        return self._parts(self.parser.finalize()[1], self.last in self.ends)

    def _parts(self, events: Sequence[Mapping[str, Any]], whole: bool) -> Parts:
        """What ``events`` add; calls that end in them are ``whole`` or cut."""
        found: Parts = {}
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_chunk" and name == CALLS:
                self.body += event["text"]
            elif kind == "region_chunk" and (name == CONTENT or name in REASONING):
                self._say(found, CONTENT if name == CONTENT else THOUGHT, event["text"])
            elif kind == "region_close" and name == CALLS:
                calls = _functions(event["value"]) if whole else []
                if calls:
                    found.setdefault(CALLS, []).extend(map(self._numbered, calls))
                else:
                    self._say(found, CONTENT, self.body)
                self.body = ""
        return found

    def _say(self, found: Parts, name: str, text: str) -> None:
        """Add ``text`` to the parts ``found``, without blanks that may be trailing."""
        text = self.blanks[name] + text
        if name not in self.begun:
            text = text.lstrip()
        said = text.rstrip()
        self.blanks[name] = text[len(said) :]
        if said:
            self.begun.add(name)
            found[name] = found.get(name, "") + said

    def _numbered(self, function: Parts) -> Parts:
        """A call of a ``function`` in OpenAI's form."""
        self.calls += 1
        name = f"call_{uuid.uuid4().hex}"
        return {"index": self.calls - 1, "id": name, "type": "function", "function": function}


class _Lenient(ResponseParser):
    """Goes on after a region that the template cannot parse; its value is None."""

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        try:
            super()._close_current(events)
        except FAULTS:
            events.append({"type": "region_close", "field": self._current, "value": None})
            self._reset_to_implicit()


def _functions(value: Any) -> list[Parts]:
    """The name and the arguments of each call in what was parsed, one or a list; none of all if one
    is no call.
    """
    found = []
    for call in value if isinstance(value, list) else [value]:
        try:
            name, given = call["function"]["name"], call["function"].get("arguments") or {}
        except FAULTS:
            return []
        if not isinstance(name, str) or not isinstance(given, str | dict):
            return []
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        found.append({"name": name, "arguments": arguments})
    return found
