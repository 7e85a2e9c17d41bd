"""Chats as a model reads them: the tokens of its chat template, and which tokens are answers.

If a template marks answers (``{% generation %}``), its mark counts. Otherwise the answer's span is
found by replacing the answer: it is the text that changes, after the generation prompt.

Shape letters: B chats of a batch, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from specmm.chats.forms import KINDS, REASONING, Chat, Message, Unusable
from specmm.hf.prompts.messages import FAULTS
from specmm.hf.prompts.prompt import PER_TOKEN, VLMPrompt, padded
from specmm.vlm import wording
from specmm.vlm.asking import Questions

MARK = "\ue000"  # an answer that no other begins or ends with
THINKING = ("enable_thinking", "thinking")  # templates' names of the setting
THOUGHT = "</think>"
Span = tuple[int, int]


@dataclass(frozen=True)
class Written:
    """A chat's ``text`` in the template, its ``ids`` and which are ``learnt``; all pictures and
    videos come before ``head`` (in characters; ``begin``, in tokens).
    """

    text: str
    ids: list[int]
    learnt: list[bool]
    spans: list[Span]
    head: int
    begin: int

    @property
    def said(self) -> list[int]:
        """The ids that are learnt."""
        return [token for token, learnt in zip(self.ids, self.learnt, strict=True) if learnt]


class ChatReader:
    """Reads chats for a model of ``reader``, a processor or a tokenizer.

    ``ends`` are its end tokens, ``room`` its positions. Chats longer than ``max_length`` are left
    out, or shortened with ``cut``. ``thinking`` is passed to the template; with False reasoning is
    left out.
    """

    def __init__(
        self,
        reader: Any,
        ends: Sequence[int],
        room: int,
        max_length: int | None = None,
        cut: bool = False,
        thinking: bool | None = None,
    ) -> None:
        self.reader = reader
        self.sees = hasattr(reader, "tokenizer")
        self.words = reader.tokenizer if self.sees else reader
        self.stops = list(ends)
        self.ends = set(ends) | {self.words.eos_token_id}
        self.room = room
        self.limit = min(room - 1, max_length or room)
        self.cut = cut
        self.widths: dict[Any, int] = {}  # tokens that pictures of such sizes add
        self.template = wording.template_of(reader) if self.sees else reader.chat_template
        self.tell(thinking)

    def tell(self, thinking: bool | None) -> None:
        """Set whether the template writes with ``thinking``, without, or by its default (None)."""
        self.thinking = thinking
        vars(self).pop("_opening", None)
        self.given = {} if thinking is None else dict.fromkeys(self.thinking_known, thinking)

    @property
    def thinking_known(self) -> list[str]:
        """The template's names for the thinking setting; empty if it has none."""
        return [name for name in THINKING if name in str(self.template)]

    def begin(self) -> None:
        """Raise ``ValueError`` for a tokenizer or template that cannot read chats."""
        if not self.words.is_fast:
            raise ValueError(
                "chats need a fast tokenizer, which knows where its tokens stand in the text, got "
                f"a {type(self.words).__name__}; convert it to tokenizer.json"
            )
        if self.thinking is not None and not self.given:
            raise ValueError("thinking is for chat templates that know it, leave it out here")
        if self.template is None:
            if not self.sees:
                raise ValueError(
                    "chats need a chat template, which this tokenizer lacks: put a "
                    "chat_template.jinja into the model's folder, or give text=FILE, not data"
                )
            return
        try:
            user, answer = (self._render([_message(role, MARK)]) for role in ("user", "assistant"))
        except (TemplateError, *FAULTS):
            return  # the template takes whole chats only
        if user == answer:
            raise ValueError(
                f"the chat template must tell questions from answers, got one that writes both as "
                f"{user.replace(MARK, '…')!r}"
            )

    @cached_property
    def _opening(self) -> str:
        """The template's generation prompt: the text between a question and its answer."""
        question = [_message("user", MARK)]
        with_it, without = self._render(question, begin=True), self._render(question)
        return with_it[_alike(with_it, without) :]

    def _render(self, messages: Sequence[Message], tools: Any = None, begin: bool = False) -> str:
        """``messages`` in the chat template; with ``begin`` followed by the generation prompt."""
        template = getattr(self.reader, "chat_template", None)
        arguments = {**self.given, **({"tools": list(tools)} if tools else {})}
        arguments |= {} if template else {"chat_template": self.template}
        contents = [{**m, "content": self._content(m["content"])} for m in messages]
        return str(
            self.reader.apply_chat_template(
                contents, add_generation_prompt=begin, tokenize=False, **arguments
            )
        )

    def _content(self, parts: Sequence[Mapping[str, Any]]) -> Any:
        if self.sees:
            return wording.content(self.reader, parts)
        return "".join(part["text"] for part in parts)

    def written(self, chat: Chat) -> Written:
        """``chat`` in the template.

        Raises ``Unusable`` if the template drops an answer or does not take such chats.
        """
        if chat.visual and not self.sees:
            raise Unusable("a picture, and the model reads text alone")
        messages = [self._thought(message) for message in chat.messages]
        try:
            text, spans = self._spans(messages, chat)
        except (TemplateError, *FAULTS) as error:
            if isinstance(error, Unusable):
                raise
            reason = " ".join(str(error).split())
            raise Unusable(f"not as the chat template takes it ({reason})") from error
        if not spans:
            raise Unusable("an answer that the chat template does not show")
        last = 0
        for kind, shown in zip(KINDS, (chat.images, chat.videos), strict=True):
            mark = wording.placeholder(self.reader, kind) if self.sees else None
            if mark and text.count(mark) != len(shown):
                raise Unusable(
                    f"{text.count(mark)} of the placeholder {mark} for {len(shown)} {kind}s",
                    f"other numbers of {mark}",
                )
            last = max(last, text.rfind(mark) if mark and shown else 0)
        head = next((begin for begin, _ in spans if begin > last), len(text))
        encoded = self.words(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        begin = next((i for i, (_, end) in enumerate(places) if end > head), len(ids))
        return Written(text, *self._learnt(text, ids, places, spans), head, begin)

    def _thought(self, message: Message) -> Message:
        """``message`` without its reasoning, if thinking is left out."""
        if self.thinking is not False or message["role"] != "assistant":
            return message
        visible = {key: value for key, value in message.items() if key not in REASONING}
        text = "".join(part["text"] for part in message["content"]).rpartition(THOUGHT)[2]
        return {**visible, "content": [{"type": "text", "text": text.lstrip()}]}

    def _spans(self, messages: list[Message], chat: Chat) -> tuple[str, list[Span]]:
        """The text of ``messages`` and the spans (in characters) of the model's answers."""
        if self.template is None:
            return self._untemplated(messages, chat)
        if "endgeneration" in str(self.template):
            contents = [{**m, "content": self._content(m["content"])} for m in messages]
            rendered: Any = render_jinja_template(
                [contents],
                tools=list(chat.tools) if chat.tools else None,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **{**self.words.special_tokens_map, **self.given},
            )
            [marked], [places] = rendered
            return marked, [(begin, end) for begin, end in places if end > begin]
        text = self._render(messages, chat.tools)
        spans: list[Span] = []
        after = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            others = [*messages[:i], _message("assistant", MARK), *messages[i + 1 :]]
            other = self._render(others, chat.tools)
            begin = _alike(text, other)
            end = len(text) - _alike(text[begin:][::-1], other[begin:][::-1])
            if MARK not in other or end <= begin:
                continue
            begin = self._opened(
                text, after, begin, partial(self._render, messages[:i], chat.tools)
            )
            spans.append((begin, end))
            after = end
        return text, spans

    def _opened(self, text: str, after: int, begin: int, asked: Callable[..., str]) -> int:
        """Where the model begins to write the answer at ``begin``: right after the prompt
        ``asked``, because the model also writes the text that the template puts in between.
        """
        opening, before = self._opening, ""
        with suppress(TemplateError, *FAULTS):
            before = asked(begin=True)
        near = text.startswith(before) and after <= len(before) <= begin
        if near and (opening or not text[len(before) : begin].strip()):
            return len(before)
        found = text.rfind(opening, after, begin) if opening else -1
        return begin if found < 0 else found + len(opening)

    def _untemplated(self, messages: list[Message], chat: Chat) -> tuple[str, list[Span]]:
        """The text and answer spans for a model without a chat template."""
        if [message["role"] for message in messages] != ["user", "assistant"]:
            raise Unusable("more than a question and its answer, and no chat template")
        texts, said = ("".join(p.get("text", "") for p in m["content"]) for m in messages)
        counts = {"image": len(chat.images), "video": len(chat.videos)}
        before = wording.prompt(self.reader, texts, counts, True)
        return before + said, [(len(before), len(before) + len(said))]

    def _learnt(
        self, text: str, ids: list[int], places: list[Span], spans: Sequence[Span]
    ) -> tuple[list[int], list[bool], list[Span]]:
        """The ids up to the end of the last answer; which of them are learnt (answers and the end
        tokens after them); and the spans of these in the text.
        """
        learnt = [any(a < end and b > begin for begin, end in spans) for a, b in places]
        after, said = 0, []
        for begin, end in spans:
            after = next((i for i, (a, _) in enumerate(places) if a >= end), len(ids))
            near = range(after - 1, min(after + 2, len(ids)))  # where templates end an answer
            last = next((i for i in near if ids[i] in self.ends), after - 1)
            if not text[end : places[last][0]].strip():
                learnt[after : last + 1] = [True] * (last + 1 - after)
                after = last + 1
            said.append((begin, max(end, places[after - 1][1])))
        ids, learnt = ids[:after], learnt[:after]
        if ids[-1] not in self.ends and self.words.eos_token_id is not None:
            ids, learnt = [*ids, self.words.eos_token_id], [*learnt, True]
        return ids, learnt, said

    def check(self, chat: Chat) -> int:
        """The number of tokens of ``chat``; ``ValueError`` if nothing can be learnt from it."""
        row = self.written(chat)
        before = self._width(chat, row) if self.sees else row.begin
        length = before + len(row.ids) - row.begin
        if length > self.limit and (not self.cut or before >= self.limit):
            raise Unusable(f"{length} tokens, of which {self.limit} fit", "too long")
        if not any(row.learnt[: len(row.ids) - max(length - self.limit, 0)]):
            raise Unusable("no answer before it is cut", "too long")
        return min(length, self.limit)

    def has_room(self, chat: Chat, longest: int) -> bool:
        """Whether an answer of ``longest`` tokens fits after the whole ``chat``."""
        return self.check(chat) + longest <= self.room

    def _width(self, chat: Chat, row: Written) -> int:
        """The number of tokens of ``row`` up to its head, cached by its pictures' sizes."""
        sized = not chat.videos and len(chat.sizes or ()) == len(chat.images)
        sizes = tuple(map(tuple, chat.sizes or ()))
        if sized and sizes in self.widths:
            return row.begin + self.widths[sizes]
        added = len(self._before(chat, row.text[: row.head])) - row.begin
        if sized:
            self.widths[sizes] = added
        return row.begin + added

    def verify(self, chat: Chat) -> None:
        """Raise ``ValueError`` if the tokens learnt from ``chat`` do not spell its answers."""
        row = self.written(chat)
        decoded = "".join(self.words.decode(row.said).split())
        for message in chat.messages:
            text = "".join(part.get("text", "") for part in message["content"])
            text = text.rpartition(THOUGHT)[2]
            answer = self.words.decode(self.words(text, add_special_tokens=False)["input_ids"])
            if message["role"] == "assistant" and "".join(answer.split()) not in decoded:
                raise ValueError(
                    f"{chat.place}: the answer {answer[:60]!r} is not in what the chat template "
                    f"marks as answers, {self.words.decode(row.said)[:60]!r}; mend the template's "
                    "{% generation %}, or its turns"
                )

    def read(self, chats: Sequence[Chat]) -> tuple[VLMPrompt, Tensor]:
        """``chats`` as one batch, and a mask [B, L] of the tokens that are learnt."""
        rows = [self.written(chat) for chat in chats]
        if not self.sees:
            ids = padded([row.ids[: self.limit] for row in rows])
            masks = padded([list(map(int, row.learnt[: self.limit])) for row in rows])
            return VLMPrompt({**ids}, 1), masks["input_ids"].bool()
        prompt = VLMPrompt(self._heads(chats, [row.text[: row.head] for row in rows]), 1)
        rooms = (self.limit - prompt.lengths).clamp(min=0).tolist()
        tails = [slice(row.begin, row.begin + room) for row, room in zip(rows, rooms, strict=True)]
        read = list(zip(rows, tails, strict=True))
        inputs, learnt = answered(
            prompt, [row.ids[tail] for row, tail in read], [row.learnt[tail] for row, tail in read]
        )
        for i, (chat, row) in enumerate(zip(chats, rows, strict=True)):
            for span in row.spans:
                if span[1] <= row.head:
                    begin, end = (self._before(chat, row.text[:index]) for index in span)
                    same = inputs.input_ids[i, : len(end)].tolist() == end  # or a token lies across
                    learnt[i, len(begin) : len(end)] = same
        return inputs, learnt

    def _before(self, chat: Chat, text: str) -> list[int]:
        """The ids of ``text``, the beginning of a chat, with its pictures and videos."""
        counts = [text.count(wording.placeholder(self.reader, kind) or "\0") for kind in KINDS]
        begun = Chat((), chat.images[: counts[0]], chat.videos[: counts[1]])
        return VLMPrompt(self._heads([begun], [text]), 1).rows()[0]

    def _heads(self, chats: Sequence[Chat], texts: Sequence[str]) -> dict[str, Any]:
        prompts = [_opened_media(chat) for chat in chats]
        pictures, videos = [q.pictures[0] for q in prompts], [q.videos[0] for q in prompts]
        return wording.read(self.reader, texts, pictures, videos)

    def asked(self, chat: Chat, turn: int) -> str:
        """The prompt that asks the model for the answer in message ``turn``."""
        messages = [self._thought(message) for message in chat.messages[:turn]]
        if self.template is None:
            return self._untemplated([*messages, _message("assistant", "")], chat)[0]
        return self._render(messages, chat.tools, begin=True)

    def prompts(self, chats: Sequence[Chat], longest: int) -> VLMPrompt:
        """The questions of the chats' last answers, for answers of at most ``longest`` tokens."""
        texts = [self.asked(chat, len(chat.messages) - 1) for chat in chats]
        if self.sees:
            return VLMPrompt(self._heads(chats, texts), longest)
        ids = [self.words(text, add_special_tokens=False)["input_ids"] for text in texts]
        return VLMPrompt({**padded(ids)}, longest)

    def said(self, chats: Sequence[Chat]) -> Tensor:
        """How often each token [V] is learnt in ``chats``."""
        counts = torch.zeros(len(self.words), dtype=torch.long)
        for row in map(self.written, chats):
            counts += torch.bincount(torch.tensor(row.said), minlength=len(counts))
        return counts

    def answers(
        self, pipe: Any, chats: Sequence[Chat], turns: Sequence[int], **options: Any
    ) -> list[str]:
        """Answers by ``pipe`` for the messages ``turns`` of ``chats``."""
        pairs = list(zip(chats, turns, strict=True))
        texts = [self.asked(chat, turn) for chat, turn in pairs]
        if not self.sees:
            return list(pipe(texts, **options).texts)
        images, videos = (
            [list(getattr(chat, f"{kind}s")[: _count(chat, turn, kind)]) for chat, turn in pairs]
            for kind in KINDS
        )
        fixed: dict[str, Any] = {"chat": False, "videos": videos if any(videos) else None}
        return list(pipe(images, texts, **fixed, **options).answers)

    def facts(self) -> list[str]:
        """All facts besides the model on which answers depend, for a cache's key."""
        words = self.words.backend_tokenizer.to_str()
        processor = self.reader.to_json_string() if self.sees else ""
        return [str(self.template), str(self.given), words, processor]

    def coloured(self, chat: Chat, colours: bool) -> str:
        """``chat`` as the model reads it, learnt tokens in green, or in ⟦ and ⟧ without colours."""
        row = self.written(chat)
        opened, closed = ("\033[1;32m", "\033[0m") if colours else ("⟦", "⟧")
        page = ""
        for learnt, tokens in groupby(zip(row.ids, row.learnt, strict=True), itemgetter(1)):
            text = self.words.decode([token for token, _ in tokens])
            page += f"{opened}{text}{closed}" if learnt else text
        return page


def _count(chat: Chat, turn: int, kind: str) -> int:
    """The number of pictures or videos (``kind``) before message ``turn``."""
    return sum(p["type"] == kind for message in chat.messages[:turn] for p in message["content"])


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _alike(one: str, other: str) -> int:
    """The length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _opened_media(chat: Chat) -> Questions:
    """The pictures and videos of ``chat``, opened."""
    return Questions.of([list(chat.images)], ["?"], videos=[list(chat.videos)])


def answered(
    prompt: VLMPrompt, answers: Sequence[Sequence[int]], learnt: Sequence[Sequence[bool]]
) -> tuple[VLMPrompt, Tensor]:
    """``prompt`` with each row's answer appended, and a mask [B, L] of the tokens that are learnt;
    ``learnt`` is the mask over the answers' tokens.
    """
    answer_ids = padded([list(ids) for ids in answers])
    counted = padded([list(map(int, flags)) for flags in learnt])["input_ids"]
    said_mask = answer_ids["attention_mask"]
    count = said_mask.shape[1]
    where = prompt.lengths[:, None] + torch.arange(count)
    width = int((prompt.lengths + said_mask.sum(1)).max())
    nothing = torch.zeros_like(said_mask)  # the kind of a text's token, to every model

    def longer(values: Tensor, new: Tensor) -> Tensor:
        return F.pad(values, (0, count)).scatter(1, where, new.to(values))[:, :width]

    per_token = {k: prompt.inputs[k] for k in PER_TOKEN if prompt.inputs.get(k) is not None}
    tokens = {k: longer(values, answer_ids.get(k, nothing)) for k, values in per_token.items()}
    spoken = longer(torch.zeros_like(prompt.mask), counted)
    return VLMPrompt({**prompt.inputs, **tokens}, prompt.max_new_tokens), spoken
