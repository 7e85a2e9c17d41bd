"""Method ``auto`` against the fixed methods beside it, call by call.

    python -m benchmarks.auto

Each model answers eight inputs three times over (pictures: eight classes), by every method in turn,
the order rotated. Seconds are those of the calling thread's processor, one thread in use, so that
other work on the machine counts for little. ``first`` is the first call of a fresh process over
plain decoding's first, on a machine where nothing was measured; ``median`` and ``worst`` are of all
calls from the second on, over the method that is best in the median. ``later_`` says the same of a
process that finds the notes of those calls.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import RESULTS, Out, Row, environment, label, write_results
from specmm import methods
from specmm.runs.run import open_model

PAIRS = 5  # of first calls
PICTURE = "pocket/llamagen"
TEXTS = (
    "def add(a, b):",
    "def main():\n    x = 1\n",
    "class Stack:\n    def __init__(self",
    "for i in range(10):\n    print(i)\n",
    "import os\n\ndef read(path):",
    "while True:\n    x += 1\n",
    "def fib(n):",
    "def sort(items):",
)
QUESTIONS = ("What do you see?", "How many things are there?", "What colour is it?", "Describe it.")


@dataclass(frozen=True)
class Case:
    """``model`` at ``temperature``, ``batch`` inputs at a time, beside methods ``fixed``."""

    model: str
    temperature: float
    batch: int
    fixed: tuple[Any, ...]

    def opened(self) -> Callable[[Any, int], Any]:
        """What answers input ``i`` by a method."""
        if self.model == PICTURE:
            pipe = open_model("images", self.model)

            def draw(method: Any, i: int) -> Any:
                known = pipe.transformer.config.num_classes
                classes = [(i * self.batch + j) % known for j in range(self.batch)]
                own = dict(generator=torch.Generator().manual_seed(i), output_type="latent")
                return pipe(classes=classes, method=method, batch_size=self.batch, **own)

            return draw
        seeing = self.model == "pocket/llava"
        pipe = open_model("questions" if seeing else "text", self.model)

        def answer(method: Any, i: int) -> Any:
            rows = [(i + j) % 8 for j in range(self.batch)]
            asked: Any = ([TEXTS[row] for row in rows],)
            if seeing:
                asked = [None] * self.batch, [QUESTIONS[row % 4] for row in rows]
            own = dict(temperature=self.temperature, seed=i if self.temperature else None)
            return pipe(*asked, method=method, max_new_tokens=64, **own)

        return answer


BLOCKS = (methods.Block(), methods.DEER(), methods.PromptLookup())
CASES = (
    Case("pocket/coder", 0.0, 1, BLOCKS),
    Case("pocket/coder", 0.8, 1, BLOCKS),
    Case("pocket/coder", 0.0, 4, BLOCKS),
    Case("pocket/llava", 0.0, 1, (methods.MSD(), methods.TextDraft(), methods.PromptLookup())),
    Case(PICTURE, 1.0, 1, (methods.Speculative(), methods.SJD())),
    Case(PICTURE, 1.0, 4, (methods.Speculative(), methods.SJD())),
)


def seconds(call: Callable[[Any, int], Any], method: Any, i: int) -> tuple[float, Any]:
    """Seconds a token of a call, and what it gave."""
    begin = time.thread_time()
    out = call(method, i)
    tokens = sum(row.numel() for row in out.tokens)
    return (time.thread_time() - begin) / tokens, out


def compared(case: Case, calls: int) -> Row:
    """The row of a case."""
    call = case.opened()
    contenders = [methods.AR(), methods.Auto(), *case.fixed]
    found: dict[Any, list[float]] = {method: [] for method in contenders}
    for i in range(calls):
        for method in [*contenders[i % len(contenders) :], *contenders[: i % len(contenders)]]:
            each, out = seconds(call, method, i)
            found[method].append(each)
            if method == methods.Auto():
                said = out.method
    later = {method: each[1:] for method, each in found.items()}
    over = {
        method: statistics.median(a / b for a, b in zip(later[methods.AR()], each, strict=True))
        for method, each in later.items()
    }
    best = max((method for method in contenders if method != methods.Auto()), key=over.__getitem__)
    ratios = [a / b for a, b in zip(later[best], later[methods.Auto()], strict=True)]
    return {
        "model": case.model,
        "temperature": case.temperature,
        "batch": case.batch,
        "calls": calls,
        "auto_over_plain": over[methods.Auto()],
        "best": label(best),
        "best_over_plain": over[best],
        "median": statistics.median(ratios),
        "worst": min(ratios),
        "taken": said.partition(" (")[0].removeprefix("auto: "),
    }


def first_call(number: int, method: str) -> None:
    """Print the seconds a token of the first call of this process."""
    torch.set_num_threads(1)
    print(seconds(CASES[number].opened(), method, 0)[0])


def first(number: int, notes: str | None = None) -> float:
    """Plain decoding's seconds of a first call over those of ``auto``, medians of processes, which
    know the ``notes`` of others in a folder, or nothing.
    """
    found: dict[str, list[float]] = {"ar": [], "auto": []}
    for _ in range(PAIRS):
        for method, each in found.items():
            code = f"from benchmarks.auto import first_call; first_call({number}, {method!r})"
            with TemporaryDirectory() as nothing:
                env = dict(os.environ) | {"SPECMM_PROGRAMS": notes or nothing}
                run = [sys.executable, "-c", code]
                done = subprocess.run(run, capture_output=True, check=True, env=env)
            each.append(float(done.stdout.split()[-1]))
    return statistics.median(found["ar"]) / statistics.median(found["auto"])


def main(
    calls: Annotated[int, typer.Option(min=3, help="Of each method and case.")] = 24,
    only: Annotated[str, typer.Option(help="Cases whose model has this in its name.")] = "",
    out: Out = RESULTS,
) -> None:
    """Measure and write ``auto.json`` and ``auto.csv``."""
    torch.set_num_threads(1)
    rows: Sequence[Row] = []
    for number, case in enumerate(CASES):
        if only in case.model:
            with TemporaryDirectory() as notes:
                os.environ["SPECMM_PROGRAMS"] = notes
                row = compared(case, calls) | {"first": first(number)}
                again = compared(case, calls)  # as a process that finds the first one's notes
                row |= {f"later_{name}": again[name] for name in ("median", "worst")}
                rows = [*rows, row | {"later_first": first(number, notes)}]
            write_results(out, "auto", rows, environment(threads=1))


if __name__ == "__main__":
    typer.run(main)
