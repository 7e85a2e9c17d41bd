"""Speculative Verdict: accuracy of the experts, their majority, the judge alone, and the verdict.

    python -m benchmarks.verdict pocket/llava

Questions are short ones about held-out scenes and of easy-VQA's test split; an answer counts when
it is right to the letter. Gains are over the judge alone on the same questions, with the 95%
interval of paired shares.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from PIL import Image
from tqdm import tqdm

from benchmarks.common import EMOJI, RESULTS, Out, Row, Threads, environment, write_results
from benchmarks.language_bars import ALONE, EXPERT, VERDICT
from benchmarks.vqa_accuracy import Question, easy_questions, row, scene_questions
from recipes.scenes.stream import World, load_world
from specmm.vlm.pipeline import VQAPipeline

MAJORITY = "majority of the experts"
LONGEST = 24  # tokens of a short answer


@dataclass
class Scores:
    """Who was right on each question, and the seconds it took."""

    right: dict[str, list[bool]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, who: str, asked: Question, answer: str, seconds: float | None = None) -> None:
        """Record one answer."""
        self.right.setdefault(who, []).append(answer.strip() in asked.right)
        if seconds is not None:
            self.seconds.setdefault(who, []).append(seconds)

    def rows(self, about: str) -> list[Row]:
        """The table's lines, whose gains are over the judge alone."""
        return [
            {"questions about": about, "who": who, **_without(row(about, outcomes), "kind")}
            | paired(outcomes, self.right[ALONE])
            | ({"seconds": statistics.median(self.seconds[who])} if who in self.seconds else {})
            for who, outcomes in self.right.items()
        ]


def _without(found: Row, name: str) -> Row:
    return {k: v for k, v in found.items() if k != name}


def paired(ours: Sequence[bool], theirs: Sequence[bool]) -> Row:
    """Gain in accuracy of ``ours`` over ``theirs``, with its 95% interval (Wald, paired)."""
    count = len(ours)
    won = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    gain = (won - lost) / count
    spread = 1.96 * math.sqrt(max(won + lost - (won - lost) ** 2 / count, 0)) / count
    return {"gain": gain, "gain_low": gain - spread, "gain_high": gain + spread}


def questions(world: World, scenes: int, easy: int, seed: int) -> dict[str, list[Question]]:
    """The questions by what they are about; easy-VQA's are drawn over all its pictures."""
    short = [a for a in scene_questions(world, scenes, seed) if a.kind != "describe"]
    return {"scenes": short, "easy-VQA": Random(seed).sample(easy_questions(world, None), easy)}


def majority(answers: Sequence[str]) -> str:
    """The majority of the experts' answers; the first of them in a tie."""
    return Counter(answers).most_common(1)[0][0]


def measure(pipe: VQAPipeline, asked: Sequence[Question]) -> Scores:
    """Every question to the judge alone and by Speculative Verdict."""
    scores = Scores()
    for one in tqdm(asked, desc="ask"):
        picture = Image.fromarray(one.image)
        options = dict(max_new_tokens=LONGEST)
        start = time.perf_counter()
        alone = pipe(picture, one.question, method="ar", **options)
        scores.add(ALONE, one, alone.answers[0], time.perf_counter() - start)
        start = time.perf_counter()
        judged = pipe(picture, one.question, method="verdict", **options)
        scores.add(VERDICT, one, judged.answers[0], time.perf_counter() - start)
        scores.add(MAJORITY, one, majority(judged.ruling.answers))
        for i, answer in enumerate(judged.ruling.answers):
            scores.add(f"{EXPERT} {i + 1}", one, answer)
    return scores


def main(
    model: Annotated[
        str, typer.Argument(help="A vision-language model with experts beside it.")
    ] = "pocket/llava",
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes.")] = 120,
    easy: Annotated[int, typer.Option(min=1, help="Questions of easy-VQA's test split.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Of scenes and questions.")] = 2,
    data: Annotated[Path, typer.Option(help="Folder of the emoji.")] = EMOJI,
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Measure and write ``verdict.json`` and ``verdict.csv``."""
    torch.set_num_threads(threads)
    pipe = VQAPipeline.from_pretrained(model, torch_dtype=torch.float32, device="cpu")
    asked = questions(load_world(data.expanduser(), "test"), scenes, easy, seed)
    rows = [line for about, part in asked.items() for line in measure(pipe, part).rows(about)]
    write_results(out, "verdict", rows, environment(model=model, dtype="float32", seed=seed))


if __name__ == "__main__":
    typer.run(main)
