"""Seconds a token of continued text, against the faster of ``model.generate`` and our plain loop.

    python -m benchmarks.text_speed pocket/coder

Prompts are places in files that no model was trained on. In each repeat every contender continues
the same ones with the same seed, so that drift affects all alike. Wall clock is a whole call.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, Budget, Dtype, Out, Row, Threads, label, write_results
from benchmarks.vlm_speed import (
    Answer,
    Answered,
    Minutes,
    Repeats,
    Runner,
    begin,
    begun,
    drafts,
    dynamic,
    generated,
    race,
    row,
)
from specmm import methods
from specmm.loading.hardware import named_dtype
from specmm.recipes.training.texts import read_files
from specmm.text.pipeline import TextPipeline

PROMPT = 96  # tokens read
LONGEST = 128  # tokens written
LENGTHS = (2, 3, 4, 5, 6, 8)  # of a block
TREES = (4, 8, 16, (2, 1, 1, 1, 1, 1))  # nodes of the likeliest paths, and a fixed one
GROWN = ((1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 1, 1, 1))  # of an EAGLE-3 head, children by level
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
class Questions:
    """A batch of prompts; with ``chat`` they are questions."""

    prompts: list[str]
    seed: int
    chat: bool = False


def ours(pipe: TextPipeline, method: Any, temperature: float, compiled: bool = False) -> Answer:
    """A method of ours."""

    def answer(asked: Questions) -> Answered:
        options: dict[str, Any] = dict(
            method=method, temperature=temperature, seed=asked.seed, chat=asked.chat
        )
        out = pipe(asked.prompts, max_new_tokens=LONGEST, compiled=compiled, **options)
        return Answered(out.tokens, out.stats, out.certificate.kind)

    return answer


def theirs(pipe: TextPipeline, temperature: float, **options: Any) -> Answer:
    """transformers' ``generate``, with ``options`` such as ``prompt_lookup_num_tokens``."""

    def inputs(asked: Questions) -> Mapping[str, Any]:
        rows = [{"input_ids": ids} for ids in pipe.encode(asked.prompts, asked.chat)]
        found: Mapping[str, Any] = pipe.tokenizer.pad(
            rows, padding_side="left", return_tensors="pt"
        )
        return found

    return generated(pipe, inputs, temperature, max_new_tokens=LONGEST, **options)


def contenders(pipe: TextPipeline, temperature: float, batch: int) -> list[Runner]:
    """Plain decoding twice first, then all that draft; transformers' assistants at batch 1 only."""
    chosen: list[Any] = [methods.AR()]
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
    chosen += [methods.TextDraft()] if drafts(pipe, methods.TextDraft()) else []
    found = [Runner("transformers generate", theirs(pipe, temperature))]
    found += [Runner(label(method), ours(pipe, method, temperature)) for method in chosen]
    if batch == 1:
        drafting: dict[str, Any] = {"prompt lookup": {"prompt_lookup_num_tokens": 8}}
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
        Runner(f"{label(method)}, compiled", ours(pipe, method, temperature, True))
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


def places(pipe: TextPipeline, texts: Sequence[str], batch: int, seed: int) -> Questions:
    """``batch`` prompts of the held-out ``texts``, each the lines before a random one of them."""
    random = Random(f"places {seed}")
    prompts = []
    for _ in range(batch):
        lines = random.choice(texts).splitlines(keepends=True)
        ids = pipe.tokenizer("".join(lines[: random.randrange(4, len(lines))]))["input_ids"]
        prompts.append(pipe.tokenizer.decode(ids[-PROMPT:]))
    return Questions(prompts, seed)


def measure(
    pipe: TextPipeline,
    kind: str,
    temperature: float,
    batch: int,
    repeats: int,
    compiled: bool = False,
) -> list[Row]:
    """Every contender (with ``compiled`` the programs) over ``repeats`` batches of a ``kind``.

    It is held-out ``code``, or questions: ``prose``, ``tasks``.
    """
    texts = (
        [text for text in read_files(True).values() if text.count("\n") > 30]
        if kind == "code"
        else []
    )

    def ask(seed: int) -> Questions:
        if kind == "code":
            return places(pipe, texts, batch, seed)
        prompts = PROSE if kind == "prose" else TASKS
        return Questions(
            [prompts[(seed + i) % len(prompts)] for i in range(batch)], seed, chat=True
        )

    runners = (
        compiled_contenders(pipe, temperature) if compiled else contenders(pipe, temperature, batch)
    )
    race(runners, ask, repeats, (kind, temperature, batch))
    return [row(r, runners, kind, temperature, batch) | searched(r) for r in runners]


def searched(runner: Runner) -> Row:
    """The share of a round that DiffuSpec's path search takes."""
    stats = runner.stats
    return {"search_share": stats.search_seconds / stats.seconds if stats.seconds else None}


def main(
    model: Annotated[
        str, typer.Argument(help="Folder or name of a text model with its drafters.")
    ] = "pocket/coder",
    repeats: Repeats = 12,
    minutes: Minutes = 20.0,
    kinds: Annotated[str, typer.Option(help="code, prose, tasks, with commas between.")] = "code",
    dtype: Dtype = "float32",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compiled programs against one another.")
    ] = False,
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Write ``text_speed_NAME.json`` and ``.csv`` (``…_compiled`` with --compile) part by part."""
    facts = begin(threads, model=model, dtype=dtype)
    budget = Budget(minutes)
    rows = list[Row]()
    pipe = TextPipeline.from_pretrained(model, torch_dtype=named_dtype(dtype), device="cpu")
    name = f"text_speed_{Path(model).name}" + ("_compiled" if compiled else "")
    settings = ((0.0, 1), (1.0, 1), *([] if compiled else [(0.0, 8)]))
    parts = [(kind, *setting) for setting in settings for kind in kinds.split(",")]
    for part in begun(parts, repeats, budget):
        rows += measure(pipe, *part, compiled)
        write_results(out, name, rows, facts)


if __name__ == "__main__":
    typer.run(main)
