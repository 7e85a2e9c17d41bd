"""``specmm ask``: a question about pictures."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.options import Device, Drafter, Dtype, Json, Model, Options, Seed
from specmm.cli.output import emit, say, stdout_reserved

Images = Annotated[
    list[Path],
    typer.Argument(help="Pictures, all shown with the question; none for a text question."),
]
Question = Annotated[str, typer.Option("--question", "-q", help="What to ask.")]
MethodName = Annotated[
    str, typer.Option(help="ar, text-draft, vlm-draft, msd, prompt-lookup, verdict or auto.")
]


def ask(
    model: Model,
    question: Question,
    images: Images = [],  # noqa: B006  typer copies it
    method: MethodName = "ar",
    option: Options = [],  # noqa: B006
    drafter: Drafter = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Answer a question about pictures; the answer is written to stderr as it comes."""
    from specmm import methods
    from specmm.runs.answers import report_of
    from specmm.runs.method_names import label, parse_method
    from specmm.runs.models import Place, open_model

    chosen = parse_method(methods.VQA, method, option)
    seed = secrets.randbelow(2**31) if seed is None else seed
    sampling = dict(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty
    )
    with stdout_reserved():
        pipe = open_model("questions", model, Place.named(device, dtype), chosen, drafter)
        begin = time.perf_counter()
        out = pipe(
            list(images), question, Echo(pipe), max_new_tokens=max_new_tokens, seed=seed, **sampling
        )
        seconds = time.perf_counter() - begin
    asked = {"question": question, "images": [str(i) for i in images]}
    ruled = {} if out.ruling is None else {"ruling": out.ruling.as_dict()}
    report = (
        report_of(model, pipe, chosen, out, seed, seconds, sampling)
        | asked
        | {"outputs": out.answers}
        | ruled
    )
    show(report, out, label(chosen), as_json)
    if ruled and not as_json:
        say_who_spoke(out.ruling)


def say_who_spoke(ruling: Any) -> None:
    """A line for every expert of Speculative Verdict."""
    for i, (answer, score) in enumerate(zip(ruling.answers, ruling.scores.tolist(), strict=True)):
        heard = f"heard as number {ruling.heard.index(i) + 1}" if i in ruling.heard else "not heard"
        say(f"expert {i + 1}     {answer!r}, consensus {score:.2f} (lower is better), {heard}")


def show(report: dict[str, Any], out: Any, method: str, as_json: bool) -> None:
    """Print the ``report`` as JSON, or the texts and what they took."""
    if as_json:
        emit(report)
        return
    for text in report["outputs"]:
        typer.echo(text)
    seconds, seed = report["seconds"], report["seed"]
    say(
        f"{report['tokens']} tokens by {method} in {seconds:.2f} s, tau {out.stats.tau:.2f}, seed {seed}"
    )
    say(f"certificate  {out.certificate}")


class Echo:
    """A streamer that writes an answer to stderr as it grows, where someone is watching; none of
    the texts ``stop``.
    """

    def __init__(self, pipe: Any, stop: Sequence[str] = ()) -> None:
        from specmm.hf.running import StopStrings

        self.pipe, self.said, self.stops = pipe, "", StopStrings(stop, pipe.text)
        self.ids: list[int] = []

    def put(self, value: Any) -> None:
        """Take in ids."""
        self.ids += value.flatten().tolist()
        self._say(self.stops.sure(self.pipe.text(self.ids)))

    def end(self) -> None:
        """Say what was held back, for it might have become a stop, and finish the line."""
        self._say(self.stops.cut(self.pipe.text(self.ids)))
        if self.ids and sys.stderr.isatty():  # nothing was said of a call that was refused
            say("")

    def _say(self, text: str) -> None:
        """Write what ``text`` has gained."""
        if sys.stderr.isatty():
            sys.stderr.write(text[len(self.said) :])
            sys.stderr.flush()
        self.said = text
