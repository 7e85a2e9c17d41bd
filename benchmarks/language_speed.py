"""Seconds a token of answers about pictures and of continued text, against the faster of
``model.generate`` and our plain loop.

    python -m benchmarks.language_speed pocket/llava
    python -m benchmarks.language_speed pocket/coder

Questions are about held-out scenes; prompts are places in files that no model was trained on. In
each repeat every contender answers the same ones with the same seed, so that drift affects all
alike. Wall clock is a whole call: picture, prompt and answer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from specmm.hf.loading.pretrained import find
from specmm.hf.prompts.prompt import on_device
from specmm.loading.hardware import named_dtype
from specmm.recipes.settings import sees
from specmm.recipes.training.texts import read_files
from specmm.runs.race import in_turn
from specmm.text.pipeline import TextPipeline
from specmm.vlm.asking import Questions
from specmm.vlm.pipeline import VQAPipeline

ANSWER = 80  # tokens of an answer
PROMPT, TEXT = 96, 128  # tokens of a text that are read, and written
Repeats = Annotated[int, typer.Option(min=1, help="Calls of every contender.")]
Minutes = Annotated[float, typer.Option(min=0, help="No new part begins after so many.")]
# of feature drafters that see, children by level
SEEING = ((1, 1, 1), (2, 1, 1, 1, 1, 1), (3, 2, 1, 1, 1), (1,) * 7, (1,) * 10)
GROWN = ((1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 1, 1, 1))  # of an EAGLE-3 head of text
LENGTHS = (2, 3, 4, 5, 6, 8)  # of a block
TREES = (4, 8, 16, (2, 1, 1, 1, 1, 1))  # nodes of the likeliest paths, and a fixed one
COMPILED = (methods.AR(), methods.Block(length=6), methods.Block(), methods.Block(tree=TREES[-1]))
PROSE = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a storm.",
    "What is photosynthesis? Describe the steps.",
    "Give three tips for writing clear emails.",
    "Summarise the plot of a fairy tale of your choice.",
    "How does a bicycle stay upright?",
)
TASKS = (
    "Write a Python function that returns the factorial of n.",
    "Write a Python class for a stack with push and pop.",
    "Write a Python function that reads a CSV file and prints each row.",
    "Write a Python function that checks whether a word is a palindrome.",
    "Show how to sort a list of dictionaries by a key in Python.",
    "Write a Python function that computes the first n prime numbers.",
)


@dataclass(frozen=True)
class Asked:
    """What a batch is asked: what a pipeline is ``given``, with ``options`` of all contenders."""

    given: tuple[Any, ...]
    seed: int
    options: Mapping[str, Any]


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


def ours(pipe: Any, method: Any, temperature: float, **own: Any) -> Answer:
    """A method of ours."""

    def answer(asked: Asked) -> Answered:
        options = dict(method=method, temperature=temperature, seed=asked.seed)
        out = pipe(*asked.given, **{**asked.options, **options, **own})
        return Answered(out.tokens, out.stats, out.certificate.kind)

    return answer


def theirs(pipe: VQAPipeline | TextPipeline, temperature: float, **own: Any) -> Answer:
    """transformers' ``generate``, with options such as ``assistant_model``."""
    ends = pipe.ends()

    def answer(asked: Asked) -> Answered:
        given = inputs(pipe, asked)
        torch.manual_seed(asked.seed)
        longest = asked.options["max_new_tokens"]
        said = pipe.model.generate(**given, max_new_tokens=longest, **sampling(temperature), **own)
        return Answered([cut(row, ends) for row in said[:, given["input_ids"].shape[1] :]])

    return answer


def inputs(pipe: VQAPipeline | TextPipeline, asked: Asked) -> Mapping[str, Any]:
    """What the model itself reads."""
    if isinstance(pipe, VQAPipeline):
        found = Questions.of(*asked.given).inputs(pipe.processor)
        return on_device(found, pipe.model.device, pipe.model.dtype)
    rows = [{"input_ids": ids} for ids in pipe.encode(*asked.given, asked.options["chat"])]
    padded: Mapping[str, Any] = pipe.tokenizer.pad(rows, padding_side="left", return_tensors="pt")
    return padded


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


def seeing_methods(pipe: VQAPipeline, temperature: float) -> list[Any]:
    """All that draft answers about pictures."""
    chosen: list[Any] = []
    for kind in (methods.MSD, methods.Eagle3):
        if drafts(pipe, kind()):
            chosen += [kind(sampled=True, tree=tree) for tree in SEEING]
            chosen += dynamic(kind, temperature)
    chosen += [m for m in (methods.TextDraft(), methods.VLMDraft()) if drafts(pipe, m)]
    return [*chosen, methods.PromptLookup(), methods.Auto()]


def text_methods(pipe: TextPipeline, temperature: float) -> list[Any]:
    """All that draft texts."""
    chosen: list[Any] = []
    for kind in (methods.DEER, methods.Block):
        if drafts(pipe, kind()):
            chosen += [kind(length=n) for n in LENGTHS] + [kind(tree=n) for n in TREES]
            chosen.append(kind(recall=3))
    if drafts(pipe, methods.Eagle3()):
        chosen += [methods.Eagle3(sampled=True, tree=tree) for tree in GROWN]
        chosen += dynamic(methods.Eagle3, temperature)
    if drafts(pipe, methods.DiffuSpec()):
        chosen += [methods.DiffuSpec(), methods.DiffuSpec(least=12), methods.SpecDiff()]
    chosen += [methods.PromptLookup()]
    return chosen + ([methods.TextDraft()] if drafts(pipe, methods.TextDraft()) else [])


def contenders(pipe: Any, temperature: float, batch: int) -> list[Runner]:
    """Plain decoding twice first, then all that draft; transformers' assistants at batch 1 only."""
    seeing = isinstance(pipe, VQAPipeline)
    chosen = (seeing_methods if seeing else text_methods)(pipe, temperature)
    found = [Runner("transformers generate", theirs(pipe, temperature))]
    found += [Runner(label(m), ours(pipe, m, temperature)) for m in (methods.AR(), *chosen)]
    if batch == 1:
        lookup: dict[str, Any] = {"prompt lookup": {"prompt_lookup_num_tokens": 8}}
        drafting = {} if seeing else lookup
        if drafts(pipe, methods.TextDraft()):
            vocabulary = len(pipe.model.get_input_embeddings().weight)
            assistant = _of_size(pipe.drafter("text-draft").model, vocabulary)
            drafting["assisted"] = {"assistant_model": assistant}
        for name, options in drafting.items():
            found.append(Runner(f"transformers {name}", theirs(pipe, temperature, **options)))
    return found


def compiled_contenders(pipe: TextPipeline, temperature: float) -> list[Runner]:
    """Plain decoding and a block drafter as compiled programs, and plain decoding without."""
    found = [
        Runner(f"{label(method)}, compiled", ours(pipe, method, temperature, compiled=True))
        for method in COMPILED
    ]
    for runner in found:
        for seed in (0, 1):  # the second call compiles what the first began
            runner.answer(places(pipe, ["\n".join("abcdefgh")], 1, seed))
    return [
        found[0],
        Runner(label(methods.AR()), ours(pipe, methods.AR(), temperature)),
        *found[1:],
    ]


def _of_size(assistant: Any, vocabulary: int) -> Any:
    """A copy without the drafter's own tokens (a mask): transformers wants equal vocabularies."""
    found = copy.deepcopy(assistant)
    found.resize_token_embeddings(vocabulary)
    return found


def drafts(pipe: Any, method: Any) -> bool:
    """Whether ``pipe`` has the drafter of ``method``."""
    try:
        return pipe.drafter(method.name) is not None
    except ValueError:
        return False


def ask(world: World, kind: str, batch: int, seed: int) -> Asked:
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
    return Asked((pictures, questions), seed, {"max_new_tokens": ANSWER})


def ask_text(pipe: TextPipeline, texts: Sequence[str], kind: str, batch: int, seed: int) -> Asked:
    """``batch`` prompts of held-out ``code``, of ``texts``, or questions: ``prose``, ``tasks``."""
    if kind == "code":
        return places(pipe, texts, batch, seed)
    prompts = PROSE if kind == "prose" else TASKS
    return of_text([prompts[(seed + i) % len(prompts)] for i in range(batch)], seed, chat=True)


def held_out() -> list[str]:
    """Files of code that are long enough to begin anywhere."""
    return [text for text in read_files(True).values() if text.count("\n") > 30]


def places(pipe: TextPipeline, texts: Sequence[str], batch: int, seed: int) -> Asked:
    """``batch`` prompts of the held-out ``texts``, each the lines before a random one of them."""
    random = Random(f"places {seed}")
    prompts = []
    for _ in range(batch):
        lines = random.choice(texts).splitlines(keepends=True)
        ids = pipe.tokenizer("".join(lines[: random.randrange(4, len(lines))]))["input_ids"]
        prompts.append(pipe.tokenizer.decode(ids[-PROMPT:]))
    return of_text(prompts, seed)


def of_text(prompts: list[str], seed: int, chat: bool = False) -> Asked:
    """A batch of ``prompts``; with ``chat`` they are questions."""
    return Asked((prompts,), seed, {"max_new_tokens": TEXT, "chat": chat, "compiled": False})


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


def searched(runner: Runner) -> Row:
    """The share of a round that DiffuSpec's path search takes."""
    stats = runner.stats
    return {"search_share": stats.search_seconds / stats.seconds if stats.seconds else None}


def main(
    model: Annotated[
        str, typer.Argument(help="A model of text or of pictures, with drafters: folder or name.")
    ],
    repeats: Repeats = 12,
    minutes: Minutes = 20.0,
    kinds: Annotated[
        str, typer.Option(help="Of text: code, prose, tasks, with commas between.")
    ] = "code",
    dtype: Dtype = "float32",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Of text: compiled programs against one another.")
    ] = False,
    data: DataFolder = EMOJI,
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Write ``vlm_speed_NAME`` or ``text_speed_NAME`` (``…_compiled`` with --compile) as JSON and
    CSV, part by part.
    """
    facts = begin(threads, model=model, dtype=dtype)
    budget = Budget(minutes)
    seeing = sees(find(model))
    kind_of: Any = VQAPipeline if seeing else TextPipeline
    pipe = kind_of.from_pretrained(model, torch_dtype=named_dtype(dtype), device="cpu")
    name = f"{'vlm' if seeing else 'text'}_speed_{Path(model).name}"
    name += "_compiled" if compiled else ""
    if seeing and compiled:
        raise typer.BadParameter(f"--compile is of text, got {model}, which sees")
    if seeing:
        asking = partial(ask, load_world(data, "test"))
        parts = [("describe", float(t), n) for n in (1, 8) for t in (0, 1)]
        parts += [("text", 0.0, 1), ("short", 0.0, 1)]
    else:
        asking = partial(ask_text, pipe, held_out())
        settings = ((0.0, 1), (1.0, 1), *([] if compiled else [(0.0, 8)]))
        parts = [(kind, *setting) for setting in settings for kind in kinds.split(",")]
    rows: list[Row] = []
    for kind, temperature, batch, count in begun(parts, repeats, budget):
        runners = (
            compiled_contenders(pipe, temperature)
            if compiled
            else contenders(pipe, temperature, batch)
        )
        race(runners, partial(asking, kind, batch), count, (kind, temperature, batch))
        found = [(r, row(r, runners, kind, temperature, batch)) for r in runners]
        rows += [line if seeing else line | searched(r) for r, line in found]
        write_results(out, name, rows, facts)


if __name__ == "__main__":
    typer.run(main)
