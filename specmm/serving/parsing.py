"""Chats' answers read into content, reasoning and tool calls, by transformers' parser of responses.

How a model writes them is its tokenizer's ``response_template``, or what ``transformers serve``
takes for models of its type.
"""

from __future__ import annotations

import copy
import json
import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from specmm.chats.forms import REASONING
from specmm.hf.prompts.messages import FAULTS
from specmm.loading.files import sentence_of
from specmm.serving.requests import Piece

LOGGER = logging.getLogger(__name__)
CONTENT, THOUGHT, CALLS = "content", "reasoning_content", "tool_calls"
CUT = "\0"  # goes on with no text that a model says
Parts = dict[str, Any]  # of a message: CONTENT, THOUGHT, CALLS, those that there are


class Plain:
    """Reads an answer as content, all of it."""

    calls = 0

    def add(self, piece: Piece) -> Parts:
        """What a ``piece`` adds to the message."""
        return {CONTENT: piece.text} if piece.text else {}

    def end(self) -> Parts:
        """What the answer's end adds."""
        return {}


class Parsing:
    """How answers of a model are read whose ``tokenizer`` this is, by a ``template``; ``ends`` are
    its end tokens. Raises ``ValueError`` for no template.
    """

    def __init__(self, tokenizer: Any, template: Mapping[str, Any], ends: Collection[int]) -> None:
        load_response_template(dict(template))
        self.tokenizer = tokenizer
        self.template = template
        self.ends = ends

    @classmethod
    def of(cls, pipe: Any, ends: Collection[int]) -> Parsing | None:
        """That of the model of ``pipe``; None where nobody says how it writes."""
        template = get_response_template(pipe.tokenizer, pipe.model)
        if template is None:
            return None
        try:
            return cls(pipe.tokenizer, template, ends)
        except FAULTS as error:
            said = sentence_of(error)
            LOGGER.warning("%s has a response_template that cannot be used: %s", pipe.name, said)
            return None

    def form(self, tools: Collection[Any]) -> dict[str, Any]:
        """The template; without ``tools`` a call is text as any other."""
        fields = {k: v for k, v in self.template["fields"].items() if tools or k != CALLS}
        return {**self.template, "fields": fields}

    def marks(self, tools: Collection[Any]) -> frozenset[int]:
        """The special tokens that the parser must see: those that the template's fields name, but
        for end tokens, which would be text where a region is open.
        """
        named = json.dumps(self.form(tools)["fields"], ensure_ascii=False).replace("\\", "")
        added = self.tokenizer.added_tokens_decoder.items()
        seen = (i for i, one in added if one.special and one.content in named)
        return frozenset(seen).difference(self.ends)

    def parser(self, prompt: Sequence[int], tools: Collection[Any]) -> Parser:
        """Reads one answer to the ids of a ``prompt``, in which ``tools`` were shown."""
        prefix = self.tokenizer.decode(list(prompt))
        return Parser(ResponseParser(self.form(tools), prefix, tools=list(tools)), self.ends)


class Parser:
    """Reads an answer by ``parser``. Blanks around content and around reasoning are left out.

    A call that is no JSON or that the answer's end cuts is content, as is all that follows it. What
    is read does not depend on the pieces that an answer comes in.
    """

    def __init__(self, parser: ResponseParser, ends: Collection[int]) -> None:
        self.parser = parser
        self.ends = ends
        self.calls = 0
        self.body = ""  # of the call that is open
        self.blanks = {CONTENT: "", THOUGHT: ""}  # which are said once more follows
        self.begun: set[str] = set()
        self.broken = False
        self.cut = False  # calls that end now have not ended
        self.last: int | None = None  # token
        self.found: Parts = {}

    def add(self, piece: Piece) -> Parts:
        """What a ``piece`` adds to the message."""
        self.last = piece.tokens[-1] if piece.tokens else self.last
        self._read(piece.text)
        return self._taken()

    def end(self) -> Parts:
        """What the answer's end adds."""
        if self.last not in self.ends:
            self._read(CUT)  # ends what need not go on
            self.cut = True
        if not self.broken:
            try:
                self._tell(self.parser.finalize()[1])
            except FAULTS:
                self._say(CONTENT, self.body)
        return self._taken()

    def _taken(self) -> Parts:
        found, self.found = self.found, {}
        return found

    def _read(self, text: str) -> None:
        if self.broken:
            self._say(CONTENT, text)
            return
        before = copy.copy(self.parser)
        try:
            self._tell(self.parser.feed(text))
            return
        except FAULTS:
            self.parser = before  # without the events before the failure
        for number, letter in enumerate(text, 1):
            try:
                self._tell(self.parser.feed(letter))
            except FAULTS:
                self.broken = True
                self._say(CONTENT, self.body + text[number:])
                return

    def _tell(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_close" and name == CALLS:
                self._call(event["value"])
                self.body = ""
            elif kind == "region_chunk" and name == CALLS:
                self.body += event["text"]
            elif kind == "region_chunk" and name == CONTENT:
                self._say(CONTENT, event["text"])
            elif kind == "region_chunk" and name in REASONING:
                self._say(THOUGHT, event["text"])

    def _say(self, name: str, text: str) -> None:
        text = self.blanks[name] + text.removesuffix(CUT)
        if name not in self.begun:
            text = text.lstrip()
        said = text.rstrip()
        self.blanks[name] = text[len(said) :]
        if said:
            self.begun.add(name)
            self.found[name] = self.found.get(name, "") + said

    def _call(self, value: Any) -> None:
        """Note one call, or a list of them."""
        try:
            made = [_function(one) for one in (value if isinstance(value, list) else [value])]
        except FAULTS:
            made = []
        if self.cut or not made:
            self._say(CONTENT, self.body)
            return
        for one in made:
            name = f"call_{uuid.uuid4().hex}"
            call = {"index": self.calls, "id": name, "type": "function", "function": one}
            self.found.setdefault(CALLS, []).append(call)
            self.calls += 1


def _function(call: Mapping[str, Any]) -> dict[str, str]:
    """The name and the arguments of a ``call``; an error if it has none."""
    name, arguments = call["function"]["name"], call["function"].get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        raise ValueError("a call has a name and arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": arguments}
