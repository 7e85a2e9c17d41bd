"""LLaVA-1.5-7B and Qwen2.5-VL-7B with MSD's head, Qwen3-8B with DFlash, at published sizes.

Greedy, after 700 tokens of text: what a picture's tokens cost a step is what any token costs, and
the tower runs once a prompt. Batch 1. Rounds by nodes: EAGLE-2's trees, and DFlash's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers as tf

from benchmarks.common import Row, label
from benchmarks.gpu import published
from benchmarks.gpu.graphs import VLMGraphTarget
from benchmarks.gpu.parts import Bench, Case
from benchmarks.gpu.published import filled
from benchmarks.gpu.rounds import (
    ROUND,
    Asked,
    captured_plain_row,
    captured_row,
    plain_row,
    round_row,
)
from specmm import methods
from specmm.core.processors import Processor
from specmm.hf.drafters.drafting import assemble
from specmm.hf.models.static import CapturedTarget
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.kernels.tree_attention.interface import NAME

PROMPT, ANSWER = 700, 320
TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TINY_TOWER = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2)
TINY_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
MSDS = (
    methods.MSD(total=8, depth=3, top_k=4),
    methods.MSD(total=26, depth=4, top_k=8),
    methods.MSD(),
    methods.MSD(sampled=True, tree=(1,) * 6),
)
BLOCKS = (
    methods.Block(length=3),
    methods.Block(length=7),
    methods.Block(length=15),
    methods.Block(tree=26),
    methods.Block(tree=60),
)


@dataclass(frozen=True)
class Sizes:
    """A model and its drafter: the class and config of one, how the other is made, the rounds."""

    name: str
    kind: Any
    config: Any
    drafter: Callable[[], Any]
    rounds: tuple[methods.MSD | methods.Block, ...]

    @property
    def sees(self) -> bool:
        """Whether the language model is a part of it."""
        return hasattr(self.config, "vision_config")


class Model:
    """The model and its drafter on the device."""

    def __init__(self, bench: Bench, sizes: Sizes) -> None:
        place = bench.device, bench.dtype
        self.sees = sizes.sees
        self.model = filled(lambda: sizes.kind._from_config(sizes.config), *place)
        self.drafter = filled(sizes.drafter, *place, seed=1)
        self.tiny = bench.tiny

    def target(self, mode: str) -> VLMTarget:
        """``eager``: under the model's own attention; ``graph``: captured, under the kernel."""
        chosen = "sdpa" if mode == "eager" else NAME
        self.model.set_attn_implementation({"text_config": chosen} if self.sees else chosen)
        plain = VLMTarget(self.model, Processor(0.0))
        return plain if mode == "eager" else VLMGraphTarget(plain)

    def asked(self) -> Asked:
        """A text to go on with."""
        length, room = (12, 40) if self.tiny else (PROMPT, ANSWER)
        device = self.model.device
        ids = torch.arange(length, device=device)[None] % 29 + 3
        prompt = VLMPrompt({"input_ids": ids}, max_new_tokens=room)
        return Asked(prompt, 1, room, device)


def llava(bench: Bench) -> Iterator[Case]:
    """LLaVA-1.5-7B."""
    config = published.llava()
    if bench.tiny:
        tower = tf.CLIPVisionConfig(**TINY_TOWER, num_hidden_layers=2, image_size=28)
        config = tf.LlavaConfig(text_config=tf.LlamaConfig(**TINY), vision_config=tower)
    drafter = published.msd(config.text_config, qwen=False)
    kind = tf.LlavaForConditionalGeneration
    return _cases(bench, Sizes("LLaVA-1.5-7B", kind, config, drafter, MSDS))


def qwen_vl(bench: Bench) -> Iterator[Case]:
    """Qwen2.5-VL-7B."""
    config = published.qwen_vl()
    if bench.tiny:
        tower = dict(hidden_size=16, intermediate_size=24, out_hidden_size=32, depth=2, num_heads=2)
        text = TINY | dict(rope_parameters=TINY_MROPE)
        config = tf.Qwen2_5_VLConfig(text_config=text, vision_config=tower)
    drafter = published.msd(config.text_config, qwen=True)
    kind = tf.Qwen2_5_VLForConditionalGeneration
    return _cases(bench, Sizes("Qwen2.5-VL-7B", kind, config, drafter, MSDS))


def text(bench: Bench) -> Iterator[Case]:
    """Qwen3-8B."""
    return _cases(bench, text_sizes(bench))


def text_sizes(bench: Bench) -> Sizes:
    """Those of Qwen3-8B and its DFlash drafter."""
    config, layers, facts = published.qwen3(), published.DFLASH_LAYERS, published.DFLASH
    if bench.tiny:
        config, layers, facts = tf.Qwen3Config(**TINY), 1, dict(block=16, mask=60, layers=(0, 1))
    drafter = published.dflash(config, layers, facts)
    return Sizes("Qwen3-8B", tf.Qwen3ForCausalLM, config, drafter, BLOCKS)


def _cases(bench: Bench, sizes: Sizes) -> Iterator[Case]:
    made = cache(lambda: Model(bench, sizes))
    facts = {"model": sizes.name, "batch": 1}

    def static() -> CapturedTarget:
        made().target("graph")  # under the kernel
        return CapturedTarget(made().model, Processor(0.0))

    def plain(mode: str) -> list[Row]:
        if mode == ROUND:
            row = captured_plain_row(bench, static(), made().asked())
        else:
            row = plain_row(bench, made().target(mode), made().asked())
        return [facts | {"mode": mode} | row]

    def speculative(method: methods.MSD | methods.Block) -> list[Row]:
        target = made().target("graph")
        parts = assemble(method, target, made().drafter)
        row = round_row(bench, label(method), target, parts, made().asked())
        return [facts | {"mode": "graph"} | row]

    def captured(method: methods.MSD | methods.Block) -> list[Row]:
        target = static()
        parts = assemble(method, target, made().drafter)
        row = captured_row(bench, label(method), target, parts, made().asked())
        return [facts | {"mode": ROUND} | row]

    for mode in (ROUND, "graph", "eager"):
        yield Case(f"plain, {mode}", lambda mode=mode: plain(mode))
    for method in sizes.rounds:
        if method.captured:
            named = f"{label(method)}, {ROUND}"
            yield Case(named, lambda method=method: captured(method))
        yield Case(label(method), lambda method=method: speculative(method))
