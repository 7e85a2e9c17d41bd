"""Drafts under a grammar: seconds of plain decoding with it over those with each drafter.

    OMP_NUM_THREADS=1 python -m benchmarks.structured

Greedy, one thread, one prompt at a time, methods in turn, against our plain decoding and
transformers' ``generate`` under xgrammar, of which the faster counts; tokens of all must be equal.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
import xgrammar

from benchmarks.common import RESULTS, Out, Row, environment, write_results
from specmm import structured
from specmm.text.pipeline import TextPipeline

METHODS = ("ar", "prompt-lookup", "block", "deer", "text-draft", "diffuspec")
LENGTH = 90
SHORT = {"name": "left", "n": 4, "tags": ["a", "b"]}
LONG = {
    "latitude": 52.5,
    "longitude": 13.4,
    "temperature_unit": "celsius",
    "forecast_days": 3,
    "include_hourly_values": True,
    "precipitation_unit": "inches",
}
KINDS = {
    str: {"type": "string", "maxLength": 10},
    int: {"type": "integer", "minimum": 0, "maximum": 99},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    list: {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
}


def schema(example: dict[str, Any]) -> dict[str, Any]:
    """That of objects like ``example``."""
    fields = {name: KINDS[type(value)] for name, value in example.items()}
    closed = {"required": list(example), "additionalProperties": False}
    return {"type": "object", "properties": fields, **closed}


def prompts(example: dict[str, Any], shown: bool) -> list[str]:
    """Beginnings of Python code, of which some have ``shown`` one such object."""
    if not shown:
        return ["def f():\n    return ", "x = ", "import os\n\nNAME = "]
    text = json.dumps(example)
    before = f"import json\n\nFIRST = json.dumps({text})\nSECOND = json.dumps("
    return [f"ROWS = [\n    {text},\n    ", f"a = {text}\nb = ", before]


def plainly(pipe: TextPipeline, grammar: Any) -> Callable[[str], list[int]]:
    """transformers' ``generate`` under ``grammar``, by xgrammar's own class."""
    compiled = grammar.compiled(pipe.tokenizer, pipe.model.config.vocab_size, pipe.ends())

    def answer(prompt: str) -> list[int]:
        ids = pipe.tokenizer(prompt, return_tensors="pt")["input_ids"]
        own = xgrammar.contrib.hf.LogitsProcessor(compiled)
        options: dict[str, Any] = dict(max_new_tokens=LENGTH, do_sample=False)
        found = pipe.model.generate(ids, logits_processor=[own], **options)
        return [int(i) for i in found[0, ids.shape[1] :]]

    return answer


def main(repeats: Annotated[int, typer.Option(min=1)] = 5, out: Out = RESULTS) -> None:
    """Measure all schemas, prompts and methods, and write the table."""
    pipe = TextPipeline.from_pretrained("pocket/coder", torch_dtype=torch.float32)
    rows: list[Row] = []
    for name, example in (("short names", SHORT), ("long names", LONG)):
        for anywhere in (True, False):
            grammar = structured.json_schema(schema(example), anywhere)
            for shown in (False, True):
                asked = prompts(example, shown)
                row: Row = {"schema": name, "whitespace": "any" if anywhere else "one line"}
                row["example in the prompt"] = shown
                rows.append(row | measured(pipe, grammar, asked, repeats))
                print(rows[-1])
    write_results(out, "structured", rows, environment(repeats=repeats))


def measured(pipe: TextPipeline, grammar: Any, asked: list[str], repeats: int) -> Row:
    """Plain decoding's seconds and each method's gain, medians of ``repeats``."""
    theirs = plainly(pipe, grammar)
    seconds: dict[str, list[float]] = {}
    taus: dict[str, float] = {}
    for _ in range(repeats + 1):  # the first one warms up
        begun = time.perf_counter()
        wanted = [theirs(prompt) for prompt in asked]
        seconds.setdefault("generate", []).append(time.perf_counter() - begun)
        for method in METHODS:
            begun = time.perf_counter()
            runs = [pipe(p, method=method, max_new_tokens=LENGTH, grammar=grammar) for p in asked]
            seconds.setdefault(method, []).append(time.perf_counter() - begun)
            for run, ids in zip(runs, wanted, strict=True):
                found = run.tokens[0].tolist()
                if found != ids[: len(found)]:
                    raise ValueError(f"{method} must give generate's tokens, got others")
            taus[method] = statistics.mean(run.stats.tau for run in runs)
    middle = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    plain = min(middle["generate"], middle["ar"])
    row: Row = {"plain, s": round(plain, 2)}
    for method in METHODS[1:]:
        row[method] = round(plain / middle[method], 2)
        row[f"{method} τ"] = round(taus[method], 2)
    return row


if __name__ == "__main__":
    typer.run(main)
