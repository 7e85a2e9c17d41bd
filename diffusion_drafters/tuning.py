"""Method ``auto`` for text: the length of block that should be fastest for this batch on this
machine, or none.

Acceptance by position is measured on the first prompt of each batch size, seconds as well; so a
plan costs about what answering that prompt once does.

Shape letters: B batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from specmm import methods
from specmm.autotune import AcceptanceCounter, Plan, planned
from specmm.decode import decode
from specmm.diffusion_drafters.assemble import block_source, chain_rule
from specmm.diffusion_drafters.drafters.block import ChainDrafter, block_length
from specmm.diffusion_drafters.drafters.sources import BlockSource
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.randomness import Uniforms
from specmm.tree import TreeShape

LENGTHS = (2, 3, 4, 6, 8, 12, 16)  # of the candidate blocks
ROOM = 48  # tokens of text that measuring needs


def choose_method(
    target: VLMTarget,
    drafter: Any,
    prompt: VLMPrompt,
    plans: dict[Any, Plan],
    kind: methods.DEER | methods.Block,
) -> methods.TextMethod:
    """``kind`` with the planned length, or plain decoding where that should be as fast; ``plans``
    keeps the plans.
    """
    key = (kind.name, len(prompt.lengths), target.processor.greedy, torch.get_num_threads())
    if key not in plans:
        plans[key] = _plan(target, kind, drafter, prompt)
    shape = plans[key].shape
    return methods.AR() if shape is None else dataclasses.replace(kind, length=shape.depth)


def _plan(
    target: VLMTarget, kind: methods.DEER | methods.Block, drafter: Any, prompt: VLMPrompt
) -> Plan:
    longer = dataclasses.replace(prompt, max_new_tokens=max(prompt.max_new_tokens, ROOM))
    source = block_source(
        kind, drafter, target
    )  # a drafter that does not fit is the user's to know of
    try:
        target.check(longer)
    except ValueError as error:
        return Plan(None, 1.0, 1.0, f"no room to measure ({error})")
    table = _acceptance(target, source, dataclasses.replace(prompt, max_new_tokens=ROOM))
    shapes = [TreeShape.chain(n, target.device) for n in LENGTHS if n <= len(table)]

    def make(shape: TreeShape) -> ChainDrafter:
        return ChainDrafter(block_source(kind, drafter, target), target, shape.depth)

    return planned(target, make, shapes, chain_rule(target), longer, _uniforms(prompt), table)


def _acceptance(
    target: VLMTarget, source: BlockSource, prompt: VLMPrompt
) -> tuple[tuple[float, ...], ...]:
    """Of drafts whose predecessors were kept, the share kept, by position [D, 1]."""
    length = block_length(source, source.longest or LENGTHS[-1])
    counter = AcceptanceCounter(
        ChainDrafter(source, target, length), TreeShape.chain(length, target.device)
    )
    for _ in decode(
        target, counter, chain_rule(target), prompt, prompt.max_new_tokens, _uniforms(prompt)
    ):
        pass
    return counter.table()


def _uniforms(prompt: VLMPrompt) -> Uniforms:
    return Uniforms(
        [
            torch.Generator(prompt.input_ids.device).manual_seed(i)
            for i in range(len(prompt.lengths))
        ]
    )
