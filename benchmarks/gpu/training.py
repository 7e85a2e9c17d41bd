"""Training of an EAGLE-3 head for Qwen3-8B and Qwen2.5-VL-7B on one card: rows a second, the share
that the target's forward takes, and memory.

Targets have random weights and rows random tokens, of 2,048 each; a row of the model that sees
holds a picture of 256 tokens. States are computed for every step, as they are where none are kept.
The head drafts 32,000 tokens, in float32 under bfloat16, with four drafts in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from benchmarks.common import Row
from benchmarks.gpu.language import TINY, TINY_MROPE
from benchmarks.gpu.parts import Bench, Case
from benchmarks.gpu.published import filled, qwen3, qwen_vl
from specmm.core.processors import Processor
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.recipes.features import RolledEagle3, build_eagle3, rollout_loss
from specmm.recipes.loop import MUON, Losses, Run, fit
from specmm.recipes.training.seen import Seen, SeenRows

LENGTH, SIDE, STEPS = 2048, 32, 200  # tokens, patches along a picture
DRAFTED, ROLLOUT = 32000, 4


def training(bench: Bench) -> Iterator[Case]:
    """A head for each target, one and two rows a step."""
    text, seeing = qwen3(), qwen_vl()
    if bench.tiny:
        text = tf.Qwen3Config(**TINY)
        tower = dict(hidden_size=16, intermediate_size=24, out_hidden_size=32, depth=2, num_heads=2)
        sizes = TINY | dict(rope_parameters=TINY_MROPE, vocab_size=151936)
        seeing = tf.Qwen2_5_VLConfig(text_config=sizes, vision_config=tower)
    kinds = {
        "Qwen3-8B": (tf.Qwen3ForCausalLM, text),
        "Qwen2.5-VL-7B": (tf.Qwen2_5_VLForConditionalGeneration, seeing),
    }
    for name, (kind, config) in kinds.items():
        made = cache(lambda kind=kind, config=config: _target(bench, kind, config))
        for batch in (1, 2):
            facts: Row = {"model": name, "batch": batch}
            yield Case(f"{name} batch {batch}", lambda m=made, f=facts: [_row(bench, m, f)])


def _target(bench: Bench, kind: Any, config: Any) -> VLMTarget:
    model = filled(lambda: kind._from_config(config), bench.device, bench.dtype)
    return VLMTarget(model.requires_grad_(False), Processor(0.0))


def _row(bench: Bench, made: Callable[[], VLMTarget], facts: Row) -> Row:
    target, batch = made(), int(str(facts["batch"]))
    length, steps = (64, 4) if bench.tiny else (LENGTH, STEPS)
    few = min(DRAFTED, target.family.vocabulary - 8)
    head = build_eagle3(target, 1, 0, torch.arange(few))
    read = cache(lambda: _prompt(target, batch, length, bench.tiny))
    layers = head.config.layers
    output = target.family.logits_of(head.ids)
    spent: list[float] = []
    memory: list[float] = []

    def drawn() -> Seen:
        begun = bench.now()
        found = seen._compute(range(batch)).to(bench.device, bench.dtype)
        spent.append(bench.now() - begun)
        return found

    def step(i: int) -> Losses:
        found = drawn()
        with torch.autocast(bench.device.type, torch.bfloat16):
            losses = rollout_loss(RolledEagle3(head), output, found, ROLLOUT)
        if bench.on_gpu:
            memory.append(torch.cuda.memory_allocated() / 2**30)
        return losses

    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with TemporaryDirectory() as folder:
        own = (batch, 0, Path(folder), 0.0)
        seen = SeenRows(target, range(batch), lambda rows: read(), layers, *own)
        begun = bench.now()
        run = Run(Path(folder), steps, 1e-4, batch=batch, save_every=1e9)
        fit(head, step, run, clip=0.5, muon=MUON * 1e-4)
        seconds = bench.now() - begun
    whole = sum(spent[1:]) / len(spent[1:])
    each = seconds / steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if bench.on_gpu else 0.0
    return facts | {
        "tokens": length,
        "steps": steps,
        "rows_s": round(batch / each, 3),
        "target_share": round(whole / each, 3),
        "peak_gib": round(peak, 2),
        "gib_at_20": round(memory[min(20, steps - 1)], 3) if memory else 0.0,
        "gib_at_end": round(memory[-1], 3) if memory else 0.0,
        "parameters": sum(p.numel() for p in head.parameters()),
    }


def _prompt(target: VLMTarget, rows: int, length: int, tiny: bool) -> tuple[VLMPrompt, Tensor]:
    """Random rows, and which of their tokens are learnt: the second half."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (rows, length), generator=generator)
    inputs: dict[str, Any] = {}
    config = target.model.config
    if hasattr(config, "vision_config"):
        side = 4 if tiny else SIDE
        vision = config.vision_config
        tokens = (side // vision.spatial_merge_size) ** 2
        ids[:, 2] = config.vision_start_token_id
        ids[:, 3 : 3 + tokens] = config.image_token_id
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(rows * side * side, width, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, side, side]] * rows)
    learnt = torch.zeros_like(ids, dtype=torch.bool)
    learnt[:, length // 2 :] = True
    return VLMPrompt({"input_ids": ids, **inputs}, 1), learnt
