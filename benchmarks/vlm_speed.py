"""Seconds a token of answers about pictures, against ``model.generate`` and our plain loop.

    python -m benchmarks.vlm_speed pocket/llava

The baseline is the faster of the two. In each repeat every contender answers the same questions
about the same held-out scenes with the same seed, so that drift affects all alike. Wall clock is a
whole call: picture, prompt and answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import transformers
import typer
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from benchmarks.arithmetic import level_rates, quartiles, round_times, speedup
from benchmarks.common import (
    EMOJI,
    RESULTS,
    Budget,
    DataFolder,
    Dtype,
    Out,
    Row,
    Threads,
    environment,
    label,
    write_results,
)
from recipes.scenes.facts import fact
from recipes.scenes.stream import World, load_world
from specmm import methods
from specmm.core.stats import Stats
from specmm.hf.prompts.prompt import on_device
from specmm.loading.hardware import named_dtype
from specmm.runs.race import in_turn
from specmm.text.pipeline import TextPipeline
from specmm.vlm.asking import Questions
from specmm.vlm.pipeline import VQAPipeline

LONGEST = 80  # tokens of an answer
Repeats = Annotated[int, typer.Option(min=1, help="Calls of every contender.")]
Minutes = Annotated[float, typer.Option(min=0, help="No new part begins after so many.")]
# of feature drafters, children by level
TREES = ((1, 1, 1), (2, 1, 1, 1, 1, 1), (3, 2, 1, 1, 1), (1,) * 7, (1,) * 10)


@dataclass(frozen=True)
class Batch:
    """A batch of questions: ``pictures`` holds one each, or None for questions without."""

    pictures: list[Image.Image | None]
    questions: list[str]
    seed: int


@dataclass
class Answered:
    """The ids of each answer of a call, and the loop's statistics where it is ours."""

    tokens: list[Tensor]
    stats: Stats | None = None
    kind: str = ""


Answer = Callable[[Any], Answered]


@dataclass
class Runner:
    """A contender and what its calls gave so far."""

    name: str
    answer: Answer
    seconds: list[float] = field(default_factory=list)  # a token
    answers: list[list[Tensor]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    certificate: str = ""

    def once(self, asked: Any) -> None:
        """Answer and record the seconds."""
        start = time.perf_counter()
        found = self.answer(asked)
        seconds = time.perf_counter() - start
        self.seconds.append(seconds / sum(map(len, found.tokens)))
        self.answers.append(found.tokens)
        self.certificate = found.kind
        if found.stats is not None:
            self.stats.add(found.stats)


def ours(pipe: VQAPipeline, method: methods.VQAMethod, temperature: float) -> Answer:
    """A method of ours."""

    def answer(asked: Batch) -> Answered:
        options: dict[str, Any] = dict(method=method, temperature=temperature, seed=asked.seed)
        out = pipe(asked.pictures, asked.questions, max_new_tokens=LONGEST, **options)
        return Answered(out.tokens, out.stats, out.certificate.kind)

    return answer


def theirs(pipe: VQAPipeline, temperature: float, **options: Any) -> Answer:
    """transformers' own ``generate``, with ``options`` such as ``assistant_model``."""

    def inputs(asked: Batch) -> Mapping[str, Any]:
        found = Questions.of(asked.pictures, asked.questions).inputs(pipe.processor)
        return on_device(found, pipe.model.device, pipe.model.dtype)

    return generated(pipe, inputs, temperature, max_new_tokens=LONGEST, **options)


def generated(
    pipe: VQAPipeline | TextPipeline,
    inputs: Callable[[Any], Mapping[str, Any]],
    temperature: float,
    **options: Any,
) -> Answer:
    """The model's own ``generate`` with ``options`` on the ``inputs`` of what is asked."""
    ends = pipe.ends()

    def answer(asked: Any) -> Answered:
        given = inputs(asked)
        torch.manual_seed(asked.seed)
        said = pipe.model.generate(**given, **sampling(temperature), **options)
        return Answered([cut(row, ends) for row in said[:, given["input_ids"].shape[1] :]])

    return answer


def sampling(temperature: float) -> dict[str, Any]:
    """The options of transformers' ``generate`` for a ``temperature`` (0: greedy) alone."""
    if temperature > 0:
        return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return {"do_sample": False}


def cut(ids: Tensor, ends: Sequence[int]) -> Tensor:
    """``ids`` up to the first end token, which is kept."""
    found = torch.isin(ids, torch.tensor(list(ends))).nonzero()
    return ids[: int(found[0]) + 1] if len(found) else ids


def dynamic(kind: Any, temperature: float) -> list[Any]:
    """EAGLE-2's trees of feature drafters."""
    if temperature > 0:
        return [kind(total=12, depth=4, top_k=4)]
    return [kind(total=8, depth=4, top_k=3), kind(total=24, depth=5, top_k=5)]


def contenders(pipe: VQAPipeline, temperature: float, batch: int) -> list[Runner]:
    """Plain decoding twice first, then all that draft; transformers' assistants at batch 1 only."""
    found = [Runner("transformers generate", theirs(pipe, temperature))]
    chosen: list[methods.VQAMethod] = [methods.AR()]
    for kind in (methods.MSD, methods.Eagle3):
        if drafts(pipe, kind()):
            chosen += [kind(sampled=True, tree=tree) for tree in TREES]
            chosen += dynamic(kind, temperature)
    small = [m for m in (methods.TextDraft(), methods.VLMDraft()) if drafts(pipe, m)]
    chosen += [*small, methods.PromptLookup(), methods.Auto()]
    found += [Runner(label(method), ours(pipe, method, temperature)) for method in chosen]  # type: ignore[arg-type]
    if batch == 1 and drafts(pipe, methods.TextDraft()):
        assistant = pipe.drafter("text-draft").model
        found.append(
            Runner("transformers assisted", theirs(pipe, temperature, assistant_model=assistant))
        )
    return found


def drafts(pipe: Any, method: Any) -> bool:
    """Whether ``pipe`` has the drafter of ``method``."""
    try:
        return pipe.drafter(method.name) is not None
    except ValueError:
        return False


def ask(world: World, kind: str, batch: int, seed: int) -> Batch:
    """``batch`` questions of a ``kind``: descriptions, short ones, or text without a picture."""
    random = Random(f"{kind} {seed}")
    pictures: list[Image.Image | None] = []
    questions = []
    for _ in range(batch):
        if kind == "text":
            pictures.append(None)
            questions.append(fact(random).question)
            continue
        scene, turns = world.scene(random)
        pictures.append(Image.fromarray(scene.image))
        questions.append(
            turns[0].question if kind == "describe" else random.choice(turns[1:]).question
        )
    return Batch(pictures, questions, seed)


def measure(
    pipe: VQAPipeline, world: World, kind: str, temperature: float, batch: int, repeats: int
) -> list[Row]:
    """Every contender over ``repeats`` batches of one kind of question."""
    runners = contenders(pipe, temperature, batch)
    race(runners, lambda seed: ask(world, kind, batch, seed), repeats, (kind, temperature, batch))
    return [row(r, runners, kind, temperature, batch) for r in runners]


Part = tuple[str, float, int]
"""Kind of questions, temperature, and how many are asked at a time."""


def begun(parts: Iterable[Part], repeats: int, budget: Budget) -> Iterator[tuple[*Part, int]]:
    """Those of ``parts`` that begin in time, and their repeats: of batches a third."""
    for kind, temperature, batch in parts:
        if not budget.spent:
            yield kind, temperature, batch, repeats if batch == 1 else -(-repeats // 3)


def begin(threads: int, **facts: Any) -> Row:
    """What is recorded of a run, which begins: with so many threads, and transformers silent."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    return environment(**facts, transformers=transformers.__version__)


def race(runners: list[Runner], ask: Callable[[int], Any], repeats: int, part: Part) -> None:
    """Each of ``runners`` on what ``ask`` gives for each seed; those that cannot are taken out."""
    for runner in runners[:]:
        try:
            runner.answer(ask(10**6))  # warm-up: caches, plans
        except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
            print(f"left out {runner.name}: {type(error).__name__}: {error}", flush=True)
            runners.remove(runner)
    kind, temperature, batch = part
    for repeat in tqdm(range(repeats), desc=f"{kind} T={temperature:g} batch {batch}"):
        asked = ask(repeat)
        for runner in in_turn(runners, repeat):
            runner.once(asked)


def row(runner: Runner, runners: list[Runner], kind: str, temperature: float, batch: int) -> Row:
    """A line of the table; the baseline is the faster of the two plain contenders, the first."""
    generate = runners[0]
    plain = runners[1]
    best = min((generate, plain), key=lambda r: sorted(r.seconds)[len(r.seconds) // 2])
    low, high = quartiles(best.seconds, runner.seconds)
    pairs = zip(chain(*generate.answers), chain(*runner.answers), strict=True)
    same = [torch.equal(a, b) for a, b in pairs]
    drafting = runner.stats.rounds > 0 and runner is not plain
    times = (
        round_times(runner.stats, plain.stats.seconds, plain.stats.tokens)
        if drafting and batch == 1
        else {}
    )
    return {
        "questions": kind,
        "temperature": temperature,
        "batch": batch,
        "method": runner.name,
        "baseline": runner is best,
        "answers": len(same),
        "tokens": sum(len(a) for answers in runner.answers for a in answers),
        "ms_a_token": 1000 * sorted(runner.seconds)[len(runner.seconds) // 2],
        "speedup": speedup(best.seconds, runner.seconds),
        "speedup_low": low,
        "speedup_high": high,
        "tau": runner.stats.tau if drafting else 1.0,
        "token_equal": sum(same) / len(same) if temperature == 0 else None,
        "certificate": runner.certificate,
        **times,
        "accepted_by_position": level_rates(runner.stats.kept) if drafting else [],
    }


def main(
    model: Annotated[
        str, typer.Argument(help="A vision-language model with drafters: folder or pocket name.")
    ],
    repeats: Repeats = 12,
    minutes: Minutes = 20.0,
    dtype: Dtype = "float32",
    data: DataFolder = EMOJI,
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Measure and write ``vlm_speed_NAME.json`` and ``.csv`` part by part."""
    facts = begin(threads, model=model, dtype=dtype)
    world = load_world(data, "test")
    budget = Budget(minutes)
    rows = []
    pipe = VQAPipeline.from_pretrained(model, torch_dtype=named_dtype(dtype), device="cpu")
    parts = [("describe", 0.0, 1), ("describe", 1.0, 1), ("describe", 0.0, 8), ("describe", 1.0, 8)]
    parts += [("text", 0.0, 1), ("short", 0.0, 1)]
    for part in begun(parts, repeats, budget):
        rows += measure(pipe, world, *part)
        write_results(out, f"vlm_speed_{Path(model).name}", rows, facts)


if __name__ == "__main__":
    typer.run(main)
