"""A server under mixed load for minutes: ``python -m benchmarks.soak.server --minutes 10``.

Clients of all kinds at once: whole answers, streams, some who hang up in mid-stream or before
anything came, and wrong requests. Answers to the same request must stay the same, each must end
once, every wrong request must get an error object, and then the server must be empty and have no
traceback in its log. It must have ``grown`` by nothing since half of the time, when the pages of
what was read fill the 1 GiB that they may. ``--out`` writes what was found.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.common import File, environment, show
from benchmarks.processes import Process, ours, running
from benchmarks.serving import heads

MINUTE = 60.0  # seconds after which memory is looked at
PATH = "/v1/completions"
WRONG: tuple[Any, ...] = (
    b"{",
    b"\xff\xfe",
    [],
    {},
    {"prompt": 3},
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "max_tokens": 10**9},
    {"prompt": "a", "nothing": 1},
    {"prompt": "a", "model": "none"},
    {"prompt": "a " * 5000},
    {"prompt": "a", "n": 10**6},
    {"prompt": "a", "stop": [1]},
    {"prompt": "a", "response_format": {"type": "json_schema"}},
)


@dataclass
class Soak:
    """What clients saw of the server at ``line``: counts, and answers by request."""

    line: httpx.AsyncClient
    seen: Counter[str] = field(default_factory=Counter)
    answers: dict[str, str] = field(default_factory=dict)

    async def client(self, number: int, prompts: list[str], end: float) -> None:
        """One of the clients, until ``end``."""
        draw = random.Random(number)
        kinds = (self.whole, self.stream, self.stream, self.hang_up, self.give_up, self.wrong)
        while time.monotonic() < end:
            kind = draw.choice(kinds)
            try:
                await kind(draw, draw.choice(prompts))
                self.seen[kind.__name__] += 1
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.seen[f"failed: {kind.__name__}: {type(error).__name__}: {error}"] += 1
            await asyncio.sleep(draw.expovariate(5.0))

    def body(self, draw: random.Random, prompt: str, **more: Any) -> dict[str, Any]:
        """A request with settings at random; the same settings give the same answer."""
        seeded = {"temperature": draw.choice([0.0, 0.0, 0.8]), "seed": draw.randrange(3)}
        return {"prompt": prompt, "max_tokens": draw.choice([1, 17, 64]), **seeded, **more}

    def check(self, body: dict[str, Any], text: str) -> None:
        """Whether the answer is the one that was given before."""
        key = json.dumps([body[name] for name in ("prompt", "max_tokens", "temperature", "seed")])
        if self.answers.setdefault(key, text) != text:
            self.seen["sampled differently" if body["temperature"] else "answered otherwise"] += 1

    async def whole(self, draw: random.Random, prompt: str) -> None:
        """An answer at once."""
        body = self.body(draw, prompt)
        answer = (await self.line.post(PATH, json=body)).raise_for_status().json()
        self.check(body, answer["choices"][0]["text"])

    async def stream(self, draw: random.Random, prompt: str) -> None:
        """An answer in pieces, which must end once."""
        body = self.body(draw, prompt, stream=True)
        text, ends, done = "", 0, 0
        async with self.line.stream("POST", PATH, json=body) as answer:
            async for line in answer.raise_for_status().aiter_lines():
                if line == "data: [DONE]":
                    done += 1
                elif line:
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    text += choice["text"]
                    ends += choice["finish_reason"] is not None
        if (ends, done) != (1, 1):
            self.seen[f"ended {ends} times, {done} done"] += 1
        self.check(body, text)

    async def hang_up(self, draw: random.Random, prompt: str) -> None:
        """Leave a stream after some pieces."""
        left = draw.randrange(5)
        body = self.body(draw, prompt, stream=True, max_tokens=500)
        async with self.line.stream("POST", PATH, json=body) as answer:
            async for line in answer.raise_for_status().aiter_lines():
                left -= bool(line)
                if left <= 0:
                    return

    async def give_up(self, draw: random.Random, prompt: str) -> None:
        """Ask, and leave before an answer is there."""
        try:
            await self.line.post(
                PATH, json=self.body(draw, prompt, max_tokens=500), timeout=draw.random() / 10
            )
        except httpx.TimeoutException:
            return

    async def wrong(self, draw: random.Random, _: str) -> None:
        """What cannot be answered."""
        body = draw.choice(WRONG)
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"Content-Type": "application/json"}
        answer = await self.line.post(PATH, headers=headers, **given)
        if not (400 <= answer.status_code < 500 and answer.json()["error"]["message"]):
            self.seen[f"{body!r:.60} was answered {answer.status_code}"] += 1


async def soaked(server: Process, minutes: int, clients: int) -> dict[str, Any]:
    """Load ``server``, and look at its memory every minute."""
    limits = httpx.Limits(max_connections=None)
    prompts = heads("def", 3)[:200]
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=120) as line:
        soak = Soak(line)
        sizes = []
        for part in range(minutes):
            end = time.monotonic() + MINUTE
            numbers = range(part * clients, (part + 1) * clients)
            await asyncio.gather(*(soak.client(i, prompts, end) for i in numbers))
            sizes.append(server.resident)
        await asyncio.sleep(5)
    counts = server.counts()
    log = server.log.read_text()
    return {
        "minutes": minutes,
        "clients": clients,
        "resident_mib": [round(size, 1) for size in sizes],
        "grown": sizes[-1] / sizes[minutes // 2] - 1,
        "left": {name: counts[name] for name in ("rows", "waiting", "reading")},
        "engine": {name: value for name, value in counts.items() if name.endswith("_total")},
        "tracebacks": log.count("Traceback"),
        "seen": dict(soak.seen.most_common()),
    }


def main(
    minutes: Annotated[int, typer.Option(min=1)] = 10,
    clients: Annotated[int, typer.Option(min=1)] = 12,
    model: Annotated[str, typer.Option(help="One that continues texts.")] = "pocket/coder",
    out: File = None,
) -> None:
    """Load a server of its own."""
    facts = environment(model=model)
    with (
        tempfile.TemporaryDirectory() as folder,
        running("server", ours(model), Path(folder)) as server,
    ):
        found = asyncio.run(soaked(server, minutes, clients))
    show({"environment": facts, **found}, out)


if __name__ == "__main__":
    typer.run(main)
