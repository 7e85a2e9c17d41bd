"""Drafters of text and vision-language models that read the target's states: EAGLE-3 heads
(``eagle3``), and a target's own MTP layers (``mtp``); written to the model's ``drafters/``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from specmm.files import writable
from specmm.hf.drafters.eagle3_files import save_eagle3
from specmm.hf.drafters.eagle3_head import layers_read
from specmm.hf.drafters.features import acceptance_of
from specmm.hf.drafters.mtp_layers import layers_of, save_layers, told_layers
from specmm.hf.pretrained import find_target, load_config, load_target, weights_folder
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.recipes.recipe import Amount, Count, Found, Open, Seed, Share, Size, beside
from specmm.recipes.text import place_of, text_rows
from specmm.recipes.training.drawn_rows import frequent
from specmm.recipes.training.msd import MOSTLY
from specmm.recipes.training.rollout import RolledEagle3, RolledMtp, build_eagle3, train_rollout
from specmm.recipes.training.seen import Seen, SeenConversations, SeenTexts, answered_lines
from specmm.text.pipeline import TextPipeline
from specmm.vlm.loading import is_composed, load_model, load_processor
from specmm.vlm.pipeline import VQAPipeline

LONGEST = 80  # tokens of an answer that acceptance is measured on
PROMPT = 64  # tokens of a text's beginning that is continued to measure it


@dataclass(frozen=True)
class Lessons:
    """What a drafter of ``target`` learns from: ``draw`` gives the batch of a step, ``said`` are
    the tokens that it is to draft. ``prompts``, held out, end with ``ends``.
    """

    target: VLMTarget
    draw: Callable[[int], Seen]
    said: Tensor
    prompts: Sequence[VLMPrompt]
    ends: Sequence[int]


@dataclass(frozen=True)
class Source:
    """Settings of what is learnt from, as a recipe has them."""

    folder: Path
    data: Open
    text: list[Path]
    rows: int
    drawn: float
    chats: bool
    batch: int
    scenes: int
    seed: int
    out: Path

    def lessons(self, reads: Callable[[int], Sequence[int]]) -> Lessons:
        """Conversations for models that read pictures, texts for others.

        ``reads`` tells which of so many layers of the target are read.
        """
        return self._conversations(reads) if self.sees() else self._texts(reads)

    def sees(self) -> bool:
        """Whether the model reads pictures."""
        return is_composed(self.folder) or hasattr(self._config(), "vision_config")

    def _config(self) -> Any:
        return load_config(weights_folder(self.folder))

    def _texts(self, reads: Callable[[int], Sequence[int]]) -> Lessons:
        network, tokenizer = load_target(self.folder, torch.float32)
        target = VLMTarget(network, Processor(), str(self.folder))
        share = None if self.chats else self.drawn
        rows = text_rows(target, tokenizer, self.text, self.rows, share, self.out, self.seed)
        layers = reads(len(target.family.layers))
        texts = SeenTexts(target, rows, layers, self.batch, self.seed)
        beginnings = padded([row[:PROMPT].tolist() for row in rows[-self.scenes :]])
        ends = TextPipeline(network, tokenizer).ends()
        return Lessons(target, texts.batch, rows, [VLMPrompt(beginnings, LONGEST)], ends)

    def _conversations(self, reads: Callable[[int], Sequence[int]]) -> Lessons:
        """The share with pictures rises to ``MOSTLY`` in the first third of all; the target itself
        answers a share ``drawn``, half greedily.
        """
        processor = load_processor(self.folder)
        model = load_model(self.folder, torch.float32)
        target = VLMTarget(model, Processor(), str(self.folder))
        opened = self.data(target, processor)
        lines = []
        for i in range(self.rows):
            random = Random(f"lines {self.seed} {i}")
            share = MOSTLY * min(1.0, 3 * i / self.rows)
            lines.append(opened.draw(random, random.random() < share))
        if self.drawn:  # in the dtype that is fastest here
            pipe = VQAPipeline.from_pretrained(self.folder, device="cpu")
            lines = answered_lines(pipe, lines, self.drawn, self.out)
        asked = opened.questions(self.scenes)
        prompts = [VLMPrompt(asked.inputs(processor), LONGEST, asked)]
        layers = reads(len(target.family.layers))
        seen = SeenConversations(target, lines, opened.read, layers, self.batch)
        ends = VQAPipeline(model, processor).ends()
        words = processor.tokenizer([line.answer for line in lines], add_special_tokens=False)
        said = torch.tensor([*ends, *(token for ids in words["input_ids"] for token in ids)])
        return Lessons(target, seen.batch, said, prompts, ends)


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
    picture_slots: Size,
    scenes: Count,
    seed: Seed,
    replace: bool,
    out: Path,
) -> Found:
    """Train an EAGLE-3 head; the result is MODEL/drafters/eagle3."""
    folder = beside(model, find_target(model))
    place = place_of(folder, "eagle3", replace)
    out = writable(out)
    source = Source(folder, data, text, rows, drawn, chats, batch, scenes, seed, out)
    if picture_slots and not source.sees():
        raise ValueError(f"picture_slots must be 0 for a model without pictures, got {model}")
    lessons = source.lessons(layers_read)
    target = lessons.target
    most = min(vocabulary, len(lessons.said.unique()))
    ids = frequent(lessons.said, most) if vocabulary else None
    head = build_eagle3(target, layers, inner, ids, picture_slots)
    output = target.family.logits_of(head.ids)
    options: dict[str, Any] = dict(steps=steps, lr=lr, rollout=rollout, slots=slots)
    train_rollout(head, RolledEagle3(head), output, lessons.draw, out, **options)
    head.acceptance = acceptance_of(target, head, lessons.prompts, lessons.ends)
    save_eagle3(head, place, target.model)
    return {"kind": "eagle3", "model": model, "steps": steps, "outputs": [str(place)]}


def mtp(
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
    slots: Size,
    scenes: Count,
    seed: Seed,
    replace: bool,
    out: Path,
) -> Found:
    """Fine-tune the MTP layers of a model's checkpoint; the result is MODEL/drafters/mtp."""
    folder = beside(model, find_target(model))
    place = place_of(folder, "mtp", replace)
    told_layers(load_config(folder), folder)  # or the target would answer for minutes first
    out = writable(out)
    source = Source(folder, data, text, rows, drawn, chats, batch, scenes, seed, out)
    lessons = source.lessons(lambda count: ())
    target = lessons.target
    layers = layers_of(target.model)
    rolled = RolledMtp(layers, target, rollout)
    output = target.family.logits
    options: dict[str, Any] = dict(steps=steps, lr=lr, rollout=rollout, slots=slots)
    train_rollout(rolled.network, rolled, output, lessons.draw, out, **options)
    save_layers(layers, place, target.model)
    return {"kind": "mtp", "model": model, "steps": steps, "outputs": [str(place)]}
