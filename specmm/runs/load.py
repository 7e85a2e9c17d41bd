"""A load test of any server of OpenAI's protocol: requests arrive, answers stream, times are noted.

A request's times count from its planned arrival, so that a server that falls behind shows it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from specmm.extending.kinds import shown
from specmm.loading.files import JSON_LINES, json_lines, numbered_lines, sentence_of

PERCENTILES = (50, 90, 99)
PATIENCE = 600.0  # seconds without a sign
CHAT, COMPLETIONS = "/chat/completions", "/completions"
PARTS = ("text", "content", "reasoning_content", "tool_calls")  # a piece's fields
UNLISTED = (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError)
BUILT_IN = (
    "def add(a, b):",
    "Write a function that counts the words of a text.",
    "import json\n\ndef read(path):",
    "What is speculative decoding?",
    "class Stack:\n    def __init__(self):",
    "Name three colours and a thing of each.",
)


@dataclass(frozen=True)
class Load:
    """A load on the server at ``url``: ``count`` requests with ``bodies`` in turn to ``model``
    (None: its first), of ``max_tokens`` each, at a ``temperature``, with a ``key``.
    """

    url: str
    bodies: Sequence[Mapping[str, Any]]
    count: int
    max_tokens: int = 64
    temperature: float = 0.0
    model: str | None = None
    key: str = ""
    seed: int = 0


@dataclass
class Served:
    """A request's ``start``, the times of its answer's ``pieces``, its ``tokens``, those of the
    ``prompt``, its ``end``, its ``error``, "" if there was none, and its ``text``.
    """

    start: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt: int = 0
    end: float = 0.0
    error: str = ""
    text: str = ""


def bodies_of(file: Path | None, completions: bool) -> list[dict[str, Any]]:
    """Request bodies from the lines of a ``file`` (None: built-in ones): a text each, or in JSON
    lines an object with ``messages`` or a ``prompt`` and other fields of a request; ``at`` is its
    arrival in seconds. Texts are questions of a chat, or are continued with ``completions``.

    Raises ``ValueError`` for a line that is none of these.
    """
    if file is None:
        return [_body(text, completions) for text in BUILT_IN]
    if file.suffix in JSON_LINES:
        lines = list(json_lines(file))
    else:
        texts = (line.rstrip("\r\n") for _, line in numbered_lines(file))
        lines = [("", _body(text, completions)) for text in texts]
    if not lines:
        raise ValueError(f"{file} must have a line at least, got none")
    for where, body in lines:
        if not isinstance(body, dict) or not body.keys() & {"messages", "prompt"}:
            raise ValueError(f"{where} must have messages or a prompt, got {shown(body)}")
    return [body for _, body in lines]


def _body(text: str, completions: bool) -> dict[str, Any]:
    return {"prompt": text} if completions else {"messages": [{"role": "user", "content": text}]}


def arrivals(load: Load, rate: float | None) -> list[float]:
    """The seconds at which requests arrive: those that their lines say, or by a Poisson process of
    ``rate`` a second.

    Raises ``ValueError`` if only some lines have a time.
    """
    if rate is not None:
        draw = random.Random(load.seed)
        times = [0.0]
        while len(times) < load.count:
            times.append(times[-1] + draw.expovariate(rate))
        return times
    times = [body["at"] for body in load.bodies if isinstance(body.get("at"), int | float)]
    if len(times) < len(load.bodies):
        raise ValueError("every line of a trace must have at, the seconds when it arrives")
    return times


def run(load: Load, clients: int | None = None, rate: float | None = None) -> dict[str, Any]:
    """Send the requests of ``load`` and return times in seconds by percentile. ``clients`` each
    wait for an answer before the next request; without them requests come at :func:`arrivals`.

    Raises ``ValueError`` for a server that cannot be asked, or answers no token.
    """
    model, found, seconds = asyncio.run(served(load, clients, rate))
    result = measured(found, seconds)
    if result["errors"] and not result["tokens"]:
        raise ValueError(f"{load.url} must answer, got no token: {'; '.join(failures(result))}")
    return {"url": load.url, "model": model, **result}


async def served(
    load: Load, clients: int | None, rate: float | None
) -> tuple[str, list[Served], float]:
    """The model that was asked, each request as it was answered, in order, and all their seconds;
    see :func:`run`.
    """
    base, headers = protocol(load.url, load.key)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=PATIENCE) as client:
        model = load.model or await _first_model(client, base)
        common = {"model": model, "max_tokens": load.max_tokens, "temperature": load.temperature}
        common |= {"stream": True, "stream_options": {"include_usage": True}}

        begin = time.perf_counter()
        times = arrivals(load, rate) if clients is None else [0.0] * load.count
        free = asyncio.Semaphore(clients or len(times))

        async def ask(number: int, at: float) -> Served:
            body = {k: v for k, v in load.bodies[number % len(load.bodies)].items() if k != "at"}
            path = CHAT if "messages" in body else COMPLETIONS
            await asyncio.sleep(max(begin + at - time.perf_counter(), 0))
            async with free:  # a client sends the next request once it is answered
                start = begin + at if clients is None else time.perf_counter()
                return await _served(client, base + path, common | body, start)

        answered = await asyncio.gather(*(ask(number, at) for number, at in enumerate(times)))
        seconds = time.perf_counter() - begin
    return model, answered, seconds


def protocol(url: str, key: str) -> tuple[str, dict[str, str]]:
    """Where the paths of a server begin, and the headers of requests with a ``key``, if any."""
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    return base, {"Authorization": f"Bearer {key}"} if key else {}


def listed(answer: httpx.Response) -> list[str]:
    """The models in a server's ``answer``; raises one of ``UNLISTED`` if there are none."""
    models = [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
    if not models:
        raise LookupError("an empty list")
    return models


async def _first_model(client: httpx.AsyncClient, base: str) -> str:
    """The first model that a server lists."""
    try:
        return listed(await client.get(f"{base}/models"))[0]
    except UNLISTED as error:
        said = sentence_of(error)
        raise ValueError(f"{base}/models must list a model, got: {said}; give --model") from error


async def _served(
    client: httpx.AsyncClient, address: str, body: Mapping[str, Any], start: float
) -> Served:
    """Send a request and note when pieces arrive."""
    found = Served(start)
    try:
        async with client.stream("POST", address, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                found.error = f"status {response.status_code}: {' '.join(text.split())[:200]}"
            else:
                await _read(response.aiter_lines(), found)
    except (httpx.HTTPError, ValueError) as error:
        found.error = sentence_of(error)
    found.end = time.perf_counter()
    return found


async def _read(lines: AsyncIterator[str], found: Served) -> None:
    """Note a stream's pieces and its usage; without a usage each piece counts as a token."""
    async for line in lines:
        event = event_of(line)
        for choice in event.get("choices") or ():
            if any({**choice, **(choice.get("delta") or {})}.get(name) for name in PARTS):
                found.pieces.append(time.perf_counter())
                found.text += said_in(choice)
        if usage := event.get("usage"):
            found.tokens, found.prompt = usage["completion_tokens"], usage["prompt_tokens"]
    found.tokens = found.tokens or len(found.pieces)


def event_of(line: str) -> dict[str, Any]:
    """The event in a ``line`` of a stream, empty if there is none.

    Raises ``ValueError`` for an event that is not JSON, or that reports an error.
    """
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return {}
    event: dict[str, Any] = json.loads(line.removeprefix("data:"))
    if error := event.get("error"):
        said = error.get("message", error) if isinstance(error, dict) else error
        raise ValueError(f"in the stream: {said}")
    return event


def said_in(choice: Mapping[str, Any]) -> str:
    """The text of a ``choice`` of an event: a completion's, or a chat's."""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def measured(served: Sequence[Served], seconds: float) -> dict[str, Any]:
    """A summary of the requests ``served`` within ``seconds``."""
    answered = [one for one in served if not one.error]
    tokens = sum(one.tokens for one in answered)
    with_text = [one for one in answered if one.pieces]
    spans = [(one.pieces[-1] - one.pieces[0], one.tokens - 1) for one in with_text]
    pauses = [b - a for one in with_text for a, b in pairwise(one.pieces)]
    return {
        "requests": len(served),
        "errors": dict(Counter(one.error for one in served if one.error)),
        "seconds": seconds,
        "prompt_tokens": sum(one.prompt for one in answered),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(answered) / seconds,
        "first_token": percentiles([one.pieces[0] - one.start for one in with_text]),
        "between_tokens": percentiles([span / n for span, n in spans if n > 0]),
        "pause": percentiles(pauses),
        "answer": percentiles([one.end - one.start for one in answered]),
    }


def failures(result: Mapping[str, Any]) -> list[str]:
    """How many requests of a ``result`` failed, and why."""
    return [f"{count} failed, {why}" for why, count in result["errors"].items()]


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """By nearest rank; None where there are no ``values``."""
    if not values:
        return dict.fromkeys(f"p{p}" for p in PERCENTILES)
    numbers = np.percentile(values, PERCENTILES, method="inverted_cdf").tolist()
    return {f"p{p}": value for p, value in zip(PERCENTILES, numbers, strict=True)}
