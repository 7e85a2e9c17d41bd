"""Parses requests of OpenAI's protocol, with vLLM's further settings, for an engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specmm.chats.tokens import THINKING
from specmm.extending.kinds import shown, texts_of
from specmm.serving.addresses import Looking
from specmm.serving.fields import Fields, Refused
from specmm.serving.parsing import Parsing
from specmm.serving.requests import Asked
from specmm.structured import Grammar, json_schema

MOST_TOP = 20  # likeliest tokens told beside each one
COMPLETION = 16  # tokens of a completion that asks for no number, at OpenAI's and vLLM
SEEDS = 2**63
ROLES = {  # as chat templates know them
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
IGNORED = (  # fields that change no answer
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "prediction",
    "request_id",
    "priority",
)


@dataclass(frozen=True)
class Settings:
    """A server's limits on requests: the ``api_key`` they need ("": none), whether pictures may be
    at http(s) addresses, and the most tokens an answer (None: as many as the model has room for),
    answers, pictures, pixels in all, bytes, and pictures that wait to be drawn. ``sampling`` are
    options by model where a request has none.
    """

    api_key: str = ""
    http_pictures: bool = False
    max_tokens: int | None = None
    max_answers: int = 128
    max_pictures: int = 16
    max_pixels: int = 50_000_000
    max_bytes: int = 32_000_000
    max_waiting: int = 16
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """A parsed request: the answers ``asked`` for, in order, ``n`` for each prompt; whether as a
    ``stream``, and with ``usage`` at its end.
    """

    asked: Sequence[Asked]
    n: int
    stream: bool
    usage: bool


def chat(
    fields: Fields, settings: Settings, own: Mapping[str, Any], parsing: Parsing | None
) -> Wanted:
    """Parse a request for a chat's next message; ``own`` are the model's options, and ``parsing``
    reads its answers.

    Raises :class:`Refused`. Pictures are opened here, which may take a while.
    """
    options = _options(fields, settings, own, "max_completion_tokens", "max_tokens")
    top = fields.whole("top_logprobs", 0, MOST_TOP)
    logprobs = (top or 0) if fields.flag("logprobs") else None
    if top is not None and logprobs is None:
        raise Refused("top_logprobs needs logprobs, which is not true", "top_logprobs")
    fields.only("answers are text", modalities=["text"], audio=None)
    tools, forced = _tools(fields, parsing)
    if forced is not None and options.setdefault("grammar", forced) is not forced:
        raise Refused("an answer is a call or spelled in another way, got both", "tool_choice")
    more: dict[str, Any] = {"tools": tools} if tools else {}
    told = fields.inner("chat_template_kwargs")
    if told is not None:
        more |= {name: told.flag(name) for name in THINKING if told.any(name) is not None}
        told.done()
    goes_on = fields.flag("ignore_eos")
    listed = fields.items("messages")
    if not listed:
        raise fields.wrong("messages", "a list of messages, one at least", fields.any("messages"))
    limits = settings.max_pictures, settings.max_pixels, settings.max_bytes
    look = Looking(*limits, settings.http_pictures)
    messages: list[dict[str, Any]] = []
    wanted = _wanted(fields, settings, [Asked(messages, None, options, more, logprobs, goes_on)])
    for number, one in enumerate(listed):  # last of all, for pictures take their time
        messages.append(_message(Fields(one, f"messages[{number}]"), look))
    return wanted


def completion(
    fields: Fields, settings: Settings, own: Mapping[str, Any], _: Parsing | None = None
) -> Wanted:
    """A request to continue a text, tokens, or a list of either; as :func:`chat`."""
    options = _options(fields, settings, own, "max_tokens")
    options.setdefault("max_new_tokens", min(COMPLETION, settings.max_tokens or COMPLETION))
    logprobs = fields.whole("logprobs", 0, MOST_TOP)
    goes_on = fields.flag("ignore_eos")
    echo = fields.flag("echo")
    fields.only("this server continues prompts, it does not fill them in", suffix=None)
    fields.only("all answers are returned: give n", best_of=fields.any("n") or 1)
    prompts = _prompts(fields)
    asked = [Asked(None, one, options, {}, logprobs, goes_on, echo) for one in prompts]
    return _wanted(fields, settings, asked)


def _tools(fields: Fields, parsing: Parsing | None) -> tuple[list[Any], Grammar | None]:
    """The tools that are shown, and how a call is spelled if one must be made."""
    tools, choice = fields.items("tools"), fields.any("tool_choice")
    fields.only("give tools and tool_choice", functions=None, function_call=None)
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    told = [one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]
    named = {one["name"]: one for one in told}
    if len(named) < len(tools):
        wanted = 'a list of {"type": "function", "function": {"name": …}}, each of another name'
        raise fields.wrong("tools", wanted, tools)
    if choice in (None, "none", "auto"):
        return ([] if choice == "none" else tools), None
    if isinstance(choice, dict):
        inner = Fields(choice, "tool_choice").inner("function")
        name = inner and inner.text("name", tuple(named))
        named = {name: named[name]} if name in named else {}
    if not named or not (choice == "required" or isinstance(choice, dict)):
        wanted = '"none", "auto", "required" or a function of tools'
        raise fields.wrong("tool_choice", wanted, choice)
    forced = None if parsing is None else parsing.forced(list(named.values()))
    if forced is None:
        wanted = '"none" or "auto", for how this model calls tools cannot be spelled'
        raise fields.wrong("tool_choice", wanted, choice)
    return tools, forced


def _prompts(fields: Fields) -> list[str | list[int]]:
    """The prompts of a request."""
    given = fields.any("prompt")
    several = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
    prompts = given if isinstance(given, list) and several else [given]
    for one in prompts:
        ids = isinstance(one, list) and all(type(i) is int and 0 <= i < SEEDS for i in one)
        if not one or not (isinstance(one, str) or ids):
            wanted = "a text that is not empty, a list of such, a list of token ids or of such"
            raise fields.wrong("prompt", wanted, given)
        if isinstance(one, str):
            texts_of("prompt", one)
    return prompts


def _wanted(fields: Fields, settings: Settings, asked: Sequence[Asked]) -> Wanted:
    """``n`` answers to each of ``asked``, with seeds from the request's on."""
    n = fields.whole("n", 1, settings.max_answers) or 1
    if n * len(asked) > settings.max_answers:
        got = n * len(asked)
        raise Refused(f"a request may have {settings.max_answers} answers, got {got}", "n")
    seed = fields.whole("seed", -SEEDS, SEEDS - 1)
    stream = fields.flag("stream")
    told = fields.inner("stream_options")
    usage = False
    if told is not None:
        if not stream:
            raise Refused("stream_options needs stream, which is not true", "stream_options")
        usage = told.flag("include_usage")
        told.ignore("include_obfuscation")
        told.done()
    fields.ignore(*IGNORED)
    fields.done()
    each = [_seeded(one, seed, i) for one in asked for i in range(n)]
    return Wanted(each, n, stream, usage)


def _seeded(asked: Asked, seed: int | None, number: int) -> Asked:
    if seed is None or not asked.options["temperature"]:
        return asked  # nothing is drawn
    options = {**asked.options, "seed": (seed + number) % SEEDS}
    return dataclasses.replace(asked, options=options)


# ---- how tokens are chosen


def _options(
    fields: Fields, settings: Settings, own: Mapping[str, Any], *lengths: str
) -> dict[str, Any]:
    """Options of a call. ``lengths`` are names of the field with the most tokens."""
    most = settings.max_tokens or 2**31
    counts = {count for name in lengths if (count := fields.whole(name, 1, most)) is not None}
    if len(counts) > 1:
        raise Refused(f"give one of {' and '.join(lengths)}, got two numbers", lengths[0])
    top_k = fields.whole("top_k", -1, 2**31)
    given = dict(
        max_new_tokens=counts.pop() if counts else None,
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 1e-6, 1),
        top_k=0 if top_k == -1 else top_k,
        min_p=fields.number("min_p", 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 100),
        presence_penalty=fields.number("presence_penalty", -2, 2),
        frequency_penalty=fields.number("frequency_penalty", -2, 2),
        min_new_tokens=fields.whole("min_tokens", 0, most),
        stop=_stops(fields),
        sequence_bias=_biases(fields),
        grammar=_grammar(fields),
    )
    found = {"temperature": 1.0, **own, **{k: v for k, v in given.items() if v is not None}}
    if not found["temperature"]:
        for name in ("top_p", "top_k", "min_p"):  # nothing is drawn
            found.pop(name, None)
    return found


def _stops(fields: Fields) -> list[str] | None:
    """The texts that end an answer."""
    given = fields.any("stop")
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise fields.wrong("stop", "a text or a list of texts, none of them empty", given)
    return texts_of("stop", stops) or None


def _biases(fields: Fields) -> list[list[Any]] | None:
    """``logit_bias`` as transformers' ``sequence_bias``."""
    told = fields.inner("logit_bias")
    if told is None or not told.given:
        return None
    if not all(token.isdecimal() and len(token) < 10 for token in told.given):
        raise fields.wrong("logit_bias", "numbers by token id", told.given)
    return [[[int(token)], float(told.number(token, -100, 100) or 0)] for token in told.given]


def _grammar(fields: Fields) -> Grammar | None:
    """The grammar of an answer, from whichever field has one.

    Texts are used as grammars directly: functions of :mod:`specmm.structured` would open files.
    """
    told = fields.inner("structured_outputs") or Fields({})
    ways = [(fields, f"guided_{kind}", kind) for kind in SPELLED]
    ways += [(told, kind, kind) for kind in SPELLED]
    found = [_by_format(fields.inner("response_format")), *(_spelled(*way) for way in ways)]
    told.done()
    grammars = [one for one in found if one is not None]
    if len(grammars) > 1:
        raise Refused("an answer is spelled in one way, got several", "response_format")
    return grammars[0] if grammars else None


# of white space in JSON: small models go on with it for ever, and tokens that are certain are fast
ANY_WHITESPACE = False
SPELLED = ("json", "regex", "grammar", "choice")


def _by_format(told: Fields | None) -> Grammar | None:
    """The grammar of OpenAI's ``response_format``."""
    if told is None:
        return None
    kind = told.text("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise told.wrong("type", "text, json_object or json_schema", None)
    schema: Any = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        inner = told.inner("json_schema")
        schema = None if inner is None else inner.any("schema")
        if not isinstance(schema, dict):
            raise told.wrong("json_schema.schema", "a JSON schema", schema)
    told.done()
    return None if schema is None else json_schema(schema, ANY_WHITESPACE)


def _spelled(fields: Fields, name: str, kind: str) -> Grammar | None:
    """The grammar of a field as vLLM has them."""
    given = fields.any(name)
    if given is None:
        return None
    if kind == "json":
        try:
            schema = json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, dict):
            raise fields.wrong(name, "a JSON schema", given)
        return json_schema(schema, ANY_WHITESPACE)
    if kind == "choice":
        choices = fields.items(name)
        if not choices or not all(isinstance(one, str) and one for one in choices):
            raise fields.wrong(name, "a list of texts, none of them empty", given)
        return Grammar("grammar", "root ::= " + " | ".join(map(json.dumps, choices)))
    return Grammar(kind, fields.text(name) or "")


# ---- messages


def _message(fields: Fields, look: Looking) -> dict[str, Any]:
    """A message in the form of :mod:`specmm.hf.prompts.messages`, its pictures opened."""
    role = fields.text("role", tuple(ROLES))
    if role is None:
        raise fields.wrong("role", f"one of {', '.join(ROLES)}", None)
    found: dict[str, Any] = {"role": ROLES[role]}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (text := fields.text(name)) is not None:
            found[name] = text
    calls = fields.items("tool_calls")
    if calls:
        place = fields.path("tool_calls")
        found["tool_calls"] = [_call(Fields(c, f"{place}[{i}]")) for i, c in enumerate(calls)]
    content = fields.any("content")
    if content is None and not calls:
        raise fields.wrong("content", "a text or a list of parts", content)
    found["content"] = _content(fields, content, look)
    fields.ignore("refusal", "audio", "annotations", "function_call")  # as answers come back
    fields.done()
    return found


def _content(fields: Fields, content: Any, look: Looking) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return texts_of(fields.path("content"), content)[0]
    place = fields.path("content")
    listed = fields.items("content")
    if not listed:
        raise fields.wrong("content", "a text or a list of parts", content)
    return [_part(Fields(part, f"{place}[{i}]"), look) for i, part in enumerate(listed)]


def _part(fields: Fields, look: Looking) -> dict[str, Any]:
    """A part of a message; ``video`` is ours: the addresses of its frames."""
    kind = fields.any("type")
    found: dict[str, Any]
    if kind in ("text", "refusal"):
        text = fields.text(kind)
        if text is None:
            raise fields.wrong(kind, "a text", None)
        found = {"type": "text", "text": texts_of(fields.path(kind), text)[0]}
    elif kind in ("image_url", "video_url"):
        told, place = fields.any(kind), fields.path(kind)
        if isinstance(told, dict):  # with how closely to look, which models here do not know
            inner = Fields(told, place)
            inner.ignore("detail", "url")
            inner.done()
            told = told.get("url")
        if kind == "image_url":
            found = {"type": "image", "image": look.picture(told, place)}
        else:
            found = {"type": "video", "video": look.film(told, place)}
    elif kind == "video":
        frames = fields.items(kind)
        if not frames:
            raise fields.wrong(kind, "a list of its frames' addresses", None)
        place = fields.path(kind)
        opened = [look.picture(one, f"{place}[{i}]") for i, one in enumerate(frames)]
        found = {"type": "video", "video": opened, "fps": fields.number("fps", 0.01, 1000)}
    else:
        wanted = "text, image_url, video_url or video (a list of frames)"
        got = f"{shown(kind)}, which is not served"
        raise Refused(f"{fields.path('type')} must be {wanted}, got {got}", fields.path("type"))
    fields.ignore("uuid", "cache_control")
    fields.done()
    return found


def _call(fields: Fields) -> dict[str, Any]:
    """A call of a tool as templates read it, whose arguments are no text."""
    inner = fields.inner("function")
    name = None if inner is None else inner.text("name")
    if inner is None or name is None:
        raise fields.wrong("function", "of a name and arguments", None)
    arguments = inner.text("arguments") or "{}"
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        raise inner.wrong("arguments", "JSON", arguments) from None
    found = {"type": "function", "function": {"name": name, "arguments": given}}
    return found | ({"id": fields.text("id")} if fields.any("id") else {})
