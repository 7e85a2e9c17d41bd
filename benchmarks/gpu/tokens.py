"""LlamaGen at its published sizes: plain steps, eager and captured, and captured rounds by nodes.

Guided, batch 1 and 8. Rounds: our block drafter's and LANTERN's head, whose tree of 58 nodes is the
release's, and a dynamic tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

from benchmarks.common import Row, label
from benchmarks.gpu.graphs import GraphTarget
from benchmarks.gpu.parts import Bench, Case
from benchmarks.gpu.published import filled, llamagen, picture_drafters
from benchmarks.gpu.rounds import (
    ROUND,
    Asked,
    captured_plain_row,
    captured_row,
    plain_row,
    round_row,
)
from specmm import methods
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.image_ar.tokens.assemble import PictureParts, assemble
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt, StaticTarget

TINY = GPTConfig(64, 2, 2, 128, 64, num_classes=5, multiple_of=16)
CODE = 8  # width of LlamaGen's codebook
SIDES = (256, 384)
BATCHES = (1, 8)
SPINES = ((1, 1, 1, 1), (3, 2, 2, 1, 1), (6, 5, 5, 4, 3, 2))
SAMPLING = dict(cfg=4.0, top_k=2000)  # the release's demonstration


def rounds() -> list[methods.Method]:
    """What is measured."""
    found: list[methods.Method] = [methods.Speculative(tree=tree) for tree in SPINES]
    found += [methods.LanternPP(tree=tree) for tree in (*SPINES[:2], "naive_extend_57")]
    found.append(methods.Eagle(total=60, depth=5, top_k=10))
    return found


class Model:
    """One size on the device, with its drafters."""

    def __init__(self, bench: Bench, config: GPTConfig) -> None:
        place = bench.device, bench.dtype
        self.transformer = filled(lambda: Transformer(config), *place)
        heads = {
            name: filled(make, *place, seed=1) for name, make in picture_drafters(config).items()
        }
        generator = torch.Generator(bench.device).manual_seed(2)
        codebook = torch.randn(config.vocab_size, CODE, device=bench.device, generator=generator)
        self.parts = PictureParts(heads, codebook)

    def target(self, captured: bool) -> LlamaGenTarget:
        """The transformer under the release's sampling."""
        top_k = min(int(SAMPLING["top_k"]), self.transformer.config.vocab_size)
        processor = Processor(1.0, top_k)
        plain = LlamaGenTarget(self.transformer, Guidance(SAMPLING["cfg"]), processor)
        return GraphTarget(plain) if captured else plain

    def asked(self, batch: int) -> Asked:
        """A picture of each of ``batch`` classes."""
        config = self.transformer.config
        device = self.transformer.output.weight.device
        labels = torch.arange(batch, device=device) % config.num_classes
        return Asked(Prompt(labels), batch, config.block_size, device)


def base(bench: Bench) -> Iterator[Case]:
    """LlamaGen-B."""
    return _cases(bench, "GPT-B")


def extra_large(bench: Bench) -> Iterator[Case]:
    """LlamaGen-XL."""
    return _cases(bench, "GPT-XL")


def _cases(bench: Bench, size: str) -> Iterator[Case]:
    for side in SIDES[:1] if bench.tiny else SIDES:
        config = TINY if bench.tiny else llamagen(size, side)
        made = cache(lambda config=config: Model(bench, config))
        name = f"Llama{size.replace('GPT', 'Gen')} {side}"
        for batch in BATCHES[:1] if bench.tiny else BATCHES:
            facts = {"model": name, "batch": batch}
            yield from _of_model(bench, made, facts)
        made.cache_clear()


def _of_model(bench: Bench, made: Any, facts: Row) -> Iterable[Case]:
    """Plain steps, then rounds, of one size and batch."""
    where = f"{facts['model']}, batch {facts['batch']}"
    batch = int(facts["batch"])

    def plain(mode: str) -> list[Row]:
        model = made()
        if mode == ROUND:
            row = captured_plain_row(bench, StaticTarget(model.target(False)), model.asked(batch))
        else:
            row = plain_row(bench, model.target(mode == "graph"), model.asked(batch))
        return [facts | {"mode": mode} | row]

    def speculative(method: methods.Method) -> list[Row]:
        model = made()
        target, *parts = assemble(method, model.target(True), model.parts)
        row = round_row(bench, label(method), target, (parts[0], parts[1]), model.asked(batch))
        return [facts | {"mode": "graph"} | row]

    def captured(method: methods.Method) -> list[Row]:
        model = made()
        target, *parts = assemble(method, StaticTarget(model.target(False)), model.parts)
        given = bench, label(method), target, (parts[0], parts[1]), model.asked(batch)
        return [facts | {"mode": ROUND} | captured_row(*given)]

    for mode in (ROUND, "graph", "eager"):
        yield Case(f"{where}: plain, {mode}", lambda mode=mode: plain(mode))
    for method in rounds():
        named = f"{where}: {label(method)}"
        yield Case(f"{named}, {ROUND}", lambda method=method: captured(method))
        yield Case(named, lambda method=method: speculative(method))
