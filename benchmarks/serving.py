"""``specmm serve`` beside ``transformers serve``: the same requests to both, in turn.

    python -m benchmarks.serving pocket/coder
    python -m benchmarks.serving pocket/llava

Processes of one thread, float32, the same folder, greedy. Every request has a text or a picture of
its own, which its server has never seen: ours drafts from earlier answers. Code that is continued
is of files that no model was trained on. ``transformers serve`` is measured with and without
continuous batching; one that was less than half as fast as the other in the first repeat is left
out of later ones. Answers are compared with the pipeline's, plainly decoded one at a time.
"""

from __future__ import annotations

import asyncio
import base64
import io
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from PIL import Image

from benchmarks.common import EMOJI, RESULTS, DataFolder, Out, Row, read_results, write_results
from benchmarks.language_speed import begin
from benchmarks.processes import Process, ours, running, theirs
from recipes.scenes.facts import fact
from recipes.scenes.sprites import load_sprites
from recipes.scenes.stream import World
from specmm.hf.loading.pretrained import find_target
from specmm.recipes.training.texts import read_files
from specmm.runs.load import Load, Served, measured, percentiles, served
from specmm.runs.race import in_turn
from specmm.text.pipeline import TextPipeline
from specmm.vlm.pipeline import VQAPipeline

LENGTH = 64  # tokens of an answer
CLIENTS = {1: 4, 2: 4, 4: 8, 8: 24, 16: 48}  # and their requests in all, a repeat
COMPARED = (1, 8, 16)  # clients with whom transformers' server is measured
AUTO, PLAIN = "specmm serve", "specmm serve --method ar"
THEIRS, BATCHED = "transformers serve", "transformers serve --continuous-batching"
LONG, EVERY = 8, 1.0  # long prompts, and seconds between them
LINES = 3  # of a head
BEFORE, SHORT = 850, 16  # tokens of text before a chat's question, and of its answers
Body = Mapping[str, Any]


class Part(Enum):
    """What is measured: tokens a second, seconds to the first token in special cases, or both."""

    all = "all"
    speed = "speed"
    first = "first"


@dataclass
class Asked:
    """Bodies of requests, each of which is given once, and how the pipeline answers them."""

    bodies: Iterator[Body]
    answer: Callable[[Body], str]
    known: dict[int, str] = field(default_factory=dict)
    kept: dict[int, Body] = field(default_factory=dict)

    def take(self, count: int) -> list[Body]:
        """The next ``count``; raises ``ValueError`` if there are no more."""
        found = list(islice(self.bodies, count))
        if len(found) < count:
            raise ValueError("there are not so many prompts; ask for fewer repeats")
        return found

    def equal(self, body: Body, text: str) -> bool:
        """Whether ``text`` is the pipeline's answer."""
        if id(body) not in self.known:
            self.known[id(body)], self.kept[id(body)] = self.answer(body), body
        return self.known[id(body)].strip() == text.strip()


def heads(pattern: str, lines: int) -> list[str]:
    """Each place of held-out files where a line begins with ``pattern``: so many ``lines``."""
    found = []
    for text in read_files(True).values():
        all_lines = text.splitlines()
        for i, line in enumerate(all_lines):
            if re.match(rf"\s*(?:{pattern})\b", line):
                found.append("\n".join(all_lines[i : i + lines]) + "\n")
    found = list(dict.fromkeys(found))
    Random(0).shuffle(found)
    return found


def texts(pipe: TextPipeline) -> Asked:
    """Heads of functions, to be continued."""

    def answer(body: Body) -> str:
        return pipe(body["prompt"], method="ar", max_new_tokens=LENGTH).texts[0]

    return Asked(({"prompt": head} for head in heads("def", LINES)), answer)


def pictures(pipe: VQAPipeline, folder: Path) -> Asked:
    """Scenes, each to be described."""
    world, random = World(load_sprites(folder, "test"), ()), Random(0)
    shown: dict[str, tuple[Image.Image, str]] = {}

    def bodies() -> Iterator[Body]:
        while True:
            scene, turns = world.scene(random)
            image = Image.fromarray(scene.image)
            body = question(image, turns[0].question)
            shown[body["messages"][0]["content"][0]["image_url"]["url"]] = image, turns[0].question
            yield body

    def answer(body: Body) -> str:
        image, asked = shown[body["messages"][0]["content"][0]["image_url"]["url"]]
        return pipe(image, asked, method="ar", max_new_tokens=LENGTH).answers[0]

    return Asked(bodies(), answer)


def question(image: Image.Image, text: str) -> dict[str, Any]:
    """A chat's question about a picture."""
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}]}


# ---- loads


@dataclass
class Measured:
    """What a server did under a load, repeat by repeat."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    answers: list[tuple[Body, str]] = field(default_factory=list)

    def median(self, read: Callable[[dict[str, Any]], float]) -> float:
        """The middle of what ``read`` finds in each repeat."""
        return statistics.median(map(read, self.runs))


Loads = Mapping[tuple[str, int], Measured]
"""By the server's name and how many clients there were."""


def load_of(server: Process, bodies: Sequence[Body]) -> Load:
    """Each of ``bodies`` once."""
    return Load(server.url, bodies, len(bodies), LENGTH)


def loaded(server: Process, bodies: Sequence[Body], clients: int, found: Measured) -> None:
    """Load ``server`` once, from so many ``clients``."""
    before = server.processor_seconds
    _, answers, seconds = asyncio.run(served(load_of(server, bodies), clients, None))
    run = measured(answers, seconds)
    used = server.processor_seconds - before
    found.runs.append(run | {"processor": used / max(run["tokens"], 1)})
    pairs = zip(bodies, answers, strict=True)
    found.answers += [(body, one.text) for body, one in pairs if not one.error]


def throughput(servers: Sequence[Process], asked: Asked, repeats: int) -> Loads:
    """What each server does for more and more clients."""
    found = {(server.name, clients): Measured() for server in servers for clients in CLIENTS}
    slow: set[tuple[str, int]] = set()
    for repeat in range(repeats):
        for clients, count in CLIENTS.items():
            bodies = asked.take(count)
            for server in in_turn(list(servers), repeat):
                key = server.name, clients
                own = server.name in (AUTO, PLAIN)
                if key not in slow and (own or clients in COMPARED):
                    loaded(server, bodies, clients, found[key])
                    print(repeat, *key, round(found[key].runs[-1]["tokens_per_second"]), flush=True)
            speeds = {
                name: found[name, clients].runs[0]["tokens_per_second"]
                for name in (THEIRS, BATCHED)
                if (name, clients) in found and found[name, clients].runs
            }
            slow |= {(name, clients) for name, x in speeds.items() if 2 * x < max(speeds.values())}
    return {key: one for key, one in found.items() if one.runs}


def _row(found: Loads, name: str, clients: int, asked: Asked) -> Row:
    own = found[name, clients]
    row: Row = {"server": name, "clients": clients, "repeats": len(own.runs)}
    row["tokens_per_second"] = own.median(lambda run: run["tokens_per_second"])
    row["processor_ms_per_token"] = 1000 * own.median(lambda run: run["processor"])
    for other, column in (
        (PLAIN, "over_plain"),
        (THEIRS, "over_theirs"),
        (BATCHED, "over_batched"),
    ):
        beside = found.get((other, clients))
        if beside is None or not beside.runs or other == name:
            continue
        pairs = list(zip(own.runs, beside.runs, strict=False))
        speed = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]
        work = [b["processor"] / a["processor"] for a, b in pairs]
        row[column] = statistics.median(speed)
        row[f"{column}_by_processor"] = statistics.median(work)
    for key in ("first_token", "pause"):
        for percentile in ("p50", "p90"):
            row[f"{key}_{percentile}"] = own.median(partial(_percentile, key, percentile))
    row["answers"] = len(own.answers)
    row["equal"] = sum(asked.equal(body, text) for body, text in own.answers)
    row["errors"] = sum(sum(run["errors"].values()) for run in own.runs)
    return row


def _percentile(key: str, percentile: str, run: Mapping[str, Any]) -> float:
    return float(run[key][percentile])


# ---- long prompts beside streams


def long_prompts(pipe: TextPipeline, tokens: int) -> Iterator[Body]:
    """Pieces of held-out files of so many ``tokens``."""
    for text in read_files(True).values():
        ids = pipe.tokenizer(text)["input_ids"]
        for at in range(0, len(ids) - tokens, tokens):
            yield {"prompt": pipe.tokenizer.decode(ids[at : at + tokens])}


def beside_long(server: Process, short: Sequence[Body], long: Sequence[Body]) -> dict[str, Any]:
    """Eight clients ask ``short`` prompts while ``long`` ones arrive."""
    arriving = [dict(body) | {"at": EVERY * (i + 1)} for i, body in enumerate(long)]
    before = server.counts()
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(lambda: asyncio.run(served(load_of(server, short), 8, None))[1]),
            pool.submit(lambda: asyncio.run(served(load_of(server, arriving), None, None))[1]),
        ]
        steady, late = (each.result() for each in both)
    after = server.counts()
    made = {name: after[name] - before[name] for name in after}
    pauses = [b - a for one in steady for a, b in pairwise(one.pieces)]
    row: dict[str, Any] = {
        "first_token_p50": percentiles(_first(steady))["p50"],
        "first_token_p90": percentiles(_first(steady))["p90"],
        "long_first_token": percentiles(_first(late))["p50"],
        "longest_pause": max(pauses),
        "errors": sum(bool(one.error) for one in [*steady, *late]),
    }
    if made.get("rounds_total"):
        row["longest_pause_rounds"] = (
            row["longest_pause"] * made["rounds_total"] / made["round_seconds_total"]
        )
    return row


def _first(answers: Sequence[Served]) -> list[float]:
    return [one.pieces[0] - one.start for one in answers if one.pieces]


def under_load(servers: Sequence[Process], pipe: TextPipeline, repeats: int) -> list[Row]:
    """Seconds to the first token while long prompts arrive."""
    words = "class|for|if|with|return|while|try|elif"
    short = iter([{"prompt": head} for head in heads(words, LINES)])
    long = long_prompts(pipe, 940)
    found: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    for repeat in range(repeats):
        bodies = list(islice(short, 96)), list(islice(long, LONG))
        for server in in_turn(list(servers), repeat):
            found[server.name].append(beside_long(server, *bodies))
            print(repeat, server.name, found[server.name][-1], flush=True)
    rows: list[Row] = []
    for name, runs in found.items():
        rows.append({"server": name, "clients": "8, long prompts", "repeats": repeats})
        rows[-1] |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    pairs = list(zip(*found.values(), strict=True))  # of ours and theirs
    for key in ("first_token_p50", "first_token_p90", "long_first_token"):
        rows[0][f"{key}_over_batched"] = statistics.median(a[key] / b[key] for a, b in pairs)
    return rows


# ---- a second turn


def second_turns(server: Process, pipe: VQAPipeline, folder: Path, repeats: int) -> list[Row]:
    """Seconds to the first token of a chat's first and second turn, after a picture and facts."""
    world, random = World(load_sprites(folder, "test"), ()), Random(1)
    seconds: list[tuple[float, float]] = []
    for repeat in range(repeats + 1):  # the first one warms up
        scene, turns = world.scene(random)
        told = ""
        while len(pipe.tokenizer(told)["input_ids"]) < BEFORE:
            told += fact(random).answer + " "
        asked = [told + turns[0].question, turns[1].question]
        chat = question(Image.fromarray(scene.image), asked[0])["messages"]
        first = []
        for text in (*asked[1:], ""):
            load = replace(load_of(server, [{"messages": chat}]), max_tokens=SHORT)
            _, [one], _ = asyncio.run(served(load, 1, None))
            first += _first([one])
            chat = [*chat, {"role": "assistant", "content": one.text}]
            chat.append({"role": "user", "content": text})
        if repeat:
            seconds.append((first[0], first[1]))
    middle = [statistics.median(column) for column in zip(*seconds, strict=True)]
    row: Row = {"server": server.name, "clients": "1, second turn", "repeats": repeats}
    row |= {"first_turn": middle[0], "second_turn": middle[1]}
    row["second_over_first"] = statistics.median(b / a for a, b in seconds)
    return [row]


def commands(model: str, chats: bool) -> dict[str, list[str]]:
    """The servers of ``model`` by name."""
    folder = find_target(model)
    found = {AUTO: ours(model), PLAIN: ours(model, "--method", "ar"), THEIRS: theirs(folder)}
    if not chats:  # falls back to one after the other for pictures
        found[BATCHED] = theirs(folder, "--continuous-batching", "--cb-max-memory-percent", "0.1")
    return found


def main(
    model: Annotated[str, typer.Argument(help="pocket/coder or pocket/llava.")],
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    part: Annotated[
        Part, typer.Option(help="What is measured; rows of other parts stay as they are.")
    ] = Part.all,
    data: DataFolder = EMOJI,
    out: Out = RESULTS,
) -> None:
    """Measure and write ``serving_NAME.json`` and ``.csv``."""
    facts = begin(1, model=model, dtype="float32", repeats=repeats, tokens=LENGTH)
    options: dict[str, Any] = dict(torch_dtype=torch.float32, device="cpu")
    chats = model.endswith("llava")
    kind: Any = VQAPipeline if chats else TextPipeline
    pipe = kind.from_pretrained(model, **options)
    asked = pictures(pipe, data) if chats else texts(pipe)
    loads: Loads = {}
    rows: list[Row] = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        made = commands(model, chats)
        chosen = [AUTO, THEIRS if chats else BATCHED] if part is Part.first else list(made)
        servers = [stack.enter_context(running(name, made[name], Path(logs))) for name in chosen]
        warm = asked.take(20)
        for server in servers:
            loaded(server, warm[:16], 16, Measured())
            loaded(server, warm[16:], 1, Measured())
        if part is not Part.first:
            loads = throughput(servers, asked, repeats)
        if part is not Part.speed and chats:
            rows = [row for server in servers for row in second_turns(server, pipe, data, repeats)]
        elif part is not Part.speed:
            best = [server for server in servers if server.name in (AUTO, BATCHED)]
            rows = under_load(best, pipe, repeats)
    rows = [_row(loads, name, clients, asked) for name, clients in loads] + rows
    name = f"serving_{Path(model).name}"
    again = {(row["server"], row["clients"]) for row in rows}
    before = (read_results(out, name) or {"rows": []})["rows"]
    kept = [row for row in before if (row["server"], row["clients"]) not in again]
    when = {key: facts[key] for key in ("git", "load", "date")}
    write_results(out, name, [*kept, *(row | when for row in rows)], facts)


if __name__ == "__main__":
    typer.run(main)
