"""EAGLE-3 heads of text and vision-language models (``eagle3``): written to the model's
``drafters/``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from specmm.files import writable
from specmm.hf.drafters.eagle3_files import save_eagle3
from specmm.hf.drafters.eagle3_head import Eagle3Head
from specmm.hf.drafters.features import measure_acceptance
from specmm.hf.pretrained import find_target, load_config, load_target, weights_folder
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.recipes.recipe import Amount, Count, Found, Open, Seed, Share, Size, beside
from specmm.recipes.text import place_of, text_rows
from specmm.recipes.training.drawn_answers import SeenConversations, answered_lines
from specmm.recipes.training.drawn_rows import Rows, frequent
from specmm.recipes.training.eagle3 import Seen, build_eagle3, train_eagle3
from specmm.recipes.training.msd import MOSTLY
from specmm.text.pipeline import TextPipeline
from specmm.vlm.loading import is_composed, load_model, load_processor
from specmm.vlm.pipeline import VQAPipeline

LONGEST = 80  # tokens of an answer that acceptance is measured on
PROMPT = 64  # tokens of a text's beginning that is continued to measure it
Draw = Callable[[int], Seen]


def eagle3(
    *,
    model: str,
    data: Open,
    text: list[Path],
    rows: Count,
    drawn: Share,
    chats: bool,
    steps: Count,
    batch: Count,
    lr: Amount,
    rollout: Count,
    layers: Count,
    inner: Size,
    slots: Size,
    vocabulary: Size,
    scenes: Count,
    seed: Seed,
    replace: bool,
    out: Path,
) -> Found:
    """Train an EAGLE-3 head; the result is MODEL/drafters/eagle3."""
    folder = beside(model, find_target(model))
    place = place_of(folder, "eagle3", replace)
    writable(out)
    sizes: dict[str, Any] = dict(layers=layers, inner=inner)
    if _sees(folder):
        target, draw, prompts, ends, said = _visual(
            folder, data, rows, drawn, batch, scenes, seed, out
        )
        most = min(vocabulary, len(said.unique()))
        head = build_eagle3(target, ids=frequent(said, most) if vocabulary else None, **sizes)
    else:
        network, tokenizer = load_target(folder, torch.float32)
        target = VLMTarget(network, Processor(), model)
        found = text_rows(target, tokenizer, text, rows, None if chats else drawn, out, seed)
        known = frequent(found, vocabulary) if vocabulary else None
        head = build_eagle3(target, ids=known, **sizes)
        draw = _text(target, found, head.config.layers, batch, seed)
        beginnings = padded([row[:PROMPT].tolist() for row in found[-scenes:]])
        prompts = [VLMPrompt(beginnings, LONGEST)]
        ends = TextPipeline(network, tokenizer).ends()
    train_eagle3(target, head, draw, out, steps=steps, lr=lr, rollout=rollout, slots=slots)
    head.acceptance = _acceptance(target, head, prompts, ends)
    save_eagle3(head, place, target.model)
    return {"kind": "eagle3", "model": model, "steps": steps, "outputs": [str(place)]}


def _sees(folder: Path) -> bool:
    """Whether the model in ``folder`` reads pictures."""
    return is_composed(folder) or hasattr(load_config(weights_folder(folder)), "vision_config")


def _text(target: VLMTarget, rows: Tensor, layers: tuple[int, ...], batch: int, seed: int) -> Draw:
    """Draws rows of text [R, L], of which every slot counts that has a next token."""
    data = Rows(target, rows, layers)

    def draw(step: int) -> Seen:
        found = data.batch(step, batch, seed)
        mask = torch.ones_like(found.tokens, dtype=torch.bool)
        mask[:, -1] = False
        width = target.dtype
        following = target.embed(found.tokens.roll(-1, 1))
        return Seen(following, found.context.to(width), found.hidden.to(width), mask)

    return draw


def _visual(
    folder: Path, data: Open, rows: int, drawn: float, batch: int, scenes: int, seed: int, out: Path
) -> tuple[VLMTarget, Draw, list[VLMPrompt], list[int], Tensor]:
    """The target, what draws batches of ``rows`` conversations, held-out questions, end tokens, and
    the tokens of all answers.

    The share with pictures rises to ``MOSTLY`` in the first third of them; the target itself
    answers a share ``drawn``, half greedily.
    """
    processor = load_processor(folder)
    model = load_model(folder, torch.float32)
    target = VLMTarget(model, Processor(), str(folder))
    opened = data(target, processor)
    lines = []
    for i in range(rows):
        random = Random(f"eagle3 {seed} {i}")
        share = MOSTLY * min(1.0, 3 * i / rows)
        lines.append(opened.draw(random, random.random() < share))
    if drawn:  # in the dtype that is fastest here
        lines = answered_lines(VQAPipeline.from_pretrained(folder), lines, drawn, out)
    asked = opened.questions(scenes)
    prompts = [VLMPrompt(asked.inputs(processor), LONGEST, asked)]
    conversations = SeenConversations(target, lines, opened.read, batch)
    ends = VQAPipeline(model, processor).ends()
    words = processor.tokenizer([line.answer for line in lines], add_special_tokens=False)
    said = torch.tensor([*ends, *(token for ids in words["input_ids"] for token in ids)])
    return target, conversations.batch, prompts, ends, said


def _acceptance(target: VLMTarget, head: Eagle3Head, prompts: Any, ends: Any) -> Any:
    """By temperature, what is accepted of the answers to ``prompts``, for method ``auto``."""
    found = {}
    for temperature in (0.0, 1.0):
        judge = VLMTarget(target.model, Processor(temperature), target.name)
        found[temperature] = measure_acceptance(judge, head, prompts, ends)
    return found
