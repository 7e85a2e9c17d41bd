"""Accuracy of a vision-language model by kind of question, with transformers' own ``generate``.

    python -m benchmarks.vqa_accuracy pocket/llava

Short answers count when they are right to the letter; a description counts when everything in it is
true and nothing is left out. Pictures are easy-VQA's test split and scenes of emoji pictures that
were held out from training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import transformers
import typer
from tqdm import tqdm

from benchmarks.common import EMOJI, RESULTS, Row, environment, write_results
from recipes.scenes.questions import description, short_questions, tellings
from recipes.scenes.sprites import Array
from recipes.scenes.stream import World, load_world
from specmm.hf.loading.pretrained import find
from specmm.vlm.loading import load_model, load_processor

LONGEST = 80  # tokens of an answer


@dataclass(frozen=True)
class Question:
    """A question about a picture and every answer that is right."""

    image: Array
    question: str
    right: set[str]
    kind: str


def scene_questions(world: World, scenes: int, seed: int) -> Iterator[Question]:
    """All short questions of held-out scenes, and one for a description of each."""
    random = Random(seed)
    for _ in range(scenes):
        scene = world.scene(random)[0]
        for turn in short_questions(scene, random):
            yield Question(scene.image, turn.question, {turn.answer}, f"scenes {turn.kind}")
        told = description(scene, random)
        yield Question(scene.image, told.question, tellings(scene), told.kind)


def easy_questions(world: World, most: int | None) -> list[Question]:
    """easy-VQA's questions, the first ``most`` of them."""
    asked = [
        Question(e.image, turn.question, {turn.answer}, turn.kind)
        for e in world.easy
        for turn in e.turns
    ]
    return asked[:most]


@torch.no_grad()
def answer(model: Any, processor: Any, asked: list[Question]) -> list[str]:
    """Greedy answers to a batch of questions."""
    chats = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": a.question}]}]
        for a in asked
    ]
    prompts = processor.apply_chat_template(chats, add_generation_prompt=True)
    inputs = processor(
        images=[a.image.copy() for a in asked], text=prompts, padding=True, return_tensors="pt"
    )
    said = model.generate(**inputs, do_sample=False, max_new_tokens=LONGEST)
    return processor.batch_decode(said[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927)."""
    centre = right + z * z / 2
    spread = z * math.sqrt(right * (count - right) / count + z * z / 4)
    return (centre - spread) / (count + z * z), (centre + spread) / (count + z * z)


def row(kind: str, outcomes: list[bool]) -> Row:
    """One line of the table."""
    right = sum(outcomes)
    count = len(outcomes)
    low, high = wilson(right, count)
    return {
        "kind": kind,
        "questions": count,
        "right": right,
        "accuracy": right / count,
        "low": low,
        "high": high,
    }


def measure(model: Any, processor: Any, asked: list[Question], batch: int) -> list[Row]:
    """Accuracy by kind of question, over all of easy-VQA and all short questions about scenes."""
    outcomes: dict[str, list[bool]] = {}
    asked = sorted(
        asked, key=lambda a: a.kind == "describe"
    )  # short answers do not wait for long ones
    for first in tqdm(range(0, len(asked), batch), desc="ask"):
        part = asked[first : first + batch]
        for a, said in zip(part, answer(model, processor, part), strict=True):
            outcomes.setdefault(a.kind, []).append(said.strip() in a.right)
    rows = [row(kind, found) for kind, found in sorted(outcomes.items())]
    for whole in ("easy", "scenes"):
        together = [o for kind, found in outcomes.items() if kind.startswith(whole) for o in found]
        rows += [row(f"{whole} all", together)] if together else []
    return rows


def main(
    model: Annotated[
        str, typer.Argument(help="A vision-language model: folder, pocket name or hub id.")
    ],
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes.")] = 300,
    easy: Annotated[
        int | None,
        typer.Option(min=1, help="Questions of easy-VQA's test split, all if not given."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Questions at once.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of the scenes.")] = 1,
    data: Annotated[Path, typer.Option(help="Folder of the emoji.")] = EMOJI,
    threads: Annotated[int, typer.Option(min=1, help="Of torch.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of the tables.")] = RESULTS,
) -> None:
    """Measure and write ``vqa_accuracy_NAME.json`` and ``.csv``."""
    torch.set_num_threads(threads)
    world = load_world(data, "test")
    folder = find(model)
    asked = [*scene_questions(world, scenes, seed), *easy_questions(world, easy)]
    rows = measure(load_model(folder, torch.float32), load_processor(folder), asked, batch)
    facts = environment(
        model=model, dtype="float32", seed=seed, transformers=transformers.__version__
    )
    write_results(out, f"vqa_accuracy_{folder.name}", rows, facts)


if __name__ == "__main__":
    typer.run(main)
