"""Seconds a token of pictures drawn from words, against the faster of the class's own ``generate``
and our plain loop.

    python -m benchmarks.words_to_pictures pocket/janus

A Janus, or a folder of one. In each repeat every contender draws a picture of the same prompt with
the same seed, so that drift affects all alike. Only tokens are timed: pixels cost all the same.

Shape letters: L tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import JanusProcessor

from benchmarks.common import RESULTS, Dtype, Out, Row, Threads, label, load_pipeline, write_results
from benchmarks.language_speed import Answer, Answered, Repeats, Runner, begin, race, row, sampling
from specmm import methods
from specmm.hf.loading.pretrained import find
from specmm.loading.hardware import named_dtype

PROMPTS = (  # of things and styles that pocket/janus was trained on, some of them not together
    "a red heart, flat",
    "a smiling cat, glossy",
    "a tulip, noto",
    "a hamburger, twemoji",
    "an owl, flat",
    "a fire engine, glossy",
)
CONTENDERS: tuple[methods.Method, ...] = (
    methods.AR(),
    methods.SJD(),
    methods.SJD(init="left"),
    methods.Speculative(tree=(1, 1)),
    methods.Speculative(tree=(2, 1)),
    methods.Speculative(tree=(3, 1, 1)),
    methods.LanternPP(),
    methods.GSD(),
)


def ours(pipe: Any, method: methods.Method, temperature: float, compiled: bool = False) -> Answer:
    """A method of ours; the seed's number chooses the prompt."""

    def answer(seed: int) -> Answered:
        out = pipe(
            PROMPTS[seed % len(PROMPTS)],
            method=method,
            temperature=temperature,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
            compiled=compiled,
        )
        return Answered(list(out.tokens), out.stats, out.certificate.kind)

    return answer


def theirs(pipe: Any, processor: Any, temperature: float) -> Answer:
    """The class's own ``generate``."""
    drawing: Row = {"generation_mode": "image", "guidance_scale": pipe.settings.cfg}

    def answer(seed: int) -> Answered:
        torch.manual_seed(seed)
        inputs = processor(
            text=[asked(processor, PROMPTS[seed % len(PROMPTS)])],
            generation_mode="image",
            return_tensors="pt",
        )
        drawn: Tensor = pipe.transformer.generate(**inputs, **drawing, **sampling(temperature))
        return Answered(list(drawn))

    return answer


def asked(processor: Any, prompt: str) -> str:
    """The chat that asks for a picture."""
    turn = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    found: str = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return found


def contenders(
    pipe: Any, processor: Any, temperature: float, compiled: Sequence[methods.Method]
) -> list[Runner]:
    """The class's generate and our plain loop first."""
    chosen = [m for m in CONTENDERS if pipe.parts.serves(m)]
    found = [Runner("transformers generate", theirs(pipe, processor, temperature))]
    found += [Runner(label(method), ours(pipe, method, temperature)) for method in chosen]
    found += [
        Runner(f"{label(method)}, compiled", ours(pipe, method, temperature, True))
        for method in compiled
    ]
    return found


def main(
    model: Annotated[str, typer.Argument(help="A Janus: folder or pocket name.")] = "pocket/janus",
    repeats: Repeats = 12,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also compiled programs, a minute each.")
    ] = False,
    dtype: Dtype = "float32",
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Write ``words_to_pictures_NAME.json`` and ``.csv``: greedy, and at the model's settings."""
    facts = begin(threads, model=model, dtype=dtype)
    pipe = load_pipeline(model, named_dtype(dtype))
    processor = JanusProcessor.from_pretrained(find(model))
    rows: list[Row] = []
    programs = (methods.AR(), methods.Speculative(tree=(3, 1, 1))) if compiled else ()
    for temperature in (0.0, pipe.settings.temperature):
        runners = contenders(pipe, processor, temperature, programs)
        race(runners, lambda seed: seed, repeats, ("prompts", temperature, 1))
        rows += [row(r, runners, "prompts", temperature, 1) for r in runners]
        write_results(out, f"words_to_pictures_{find(model).name}", rows, facts)


if __name__ == "__main__":
    typer.run(main)
