"""Method ``auto`` for questions: the MSD tree that should be fastest for this batch on this
machine, or plain decoding.

Acceptance by level and rank lies beside the drafter, measured when it was trained, by temperature;
seconds are measured on the first prompt of each batch size.

Shape letters: B batch, D levels, K ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from specmm import methods
from specmm.autotune import WIDEST, AcceptanceCounter, Plan, planned
from specmm.decode import EndTokens, decode
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.randomness import Uniforms
from specmm.shape.sequoia import best_tree
from specmm.shape.trees import spine
from specmm.verify import Recursive
from specmm.vlm.drafters.msd import MSDDrafter
from specmm.vlm.drafters.msd_head import Acceptance, MSDHead

SIZES = (3, 4, 8, 12, 16, 24)  # nodes of the candidate trees, the root included
ROOM = 24  # tokens of answer that measuring needs


def choose_method(
    target: VLMTarget, head: MSDHead, prompt: VLMPrompt, plans: dict[Any, Plan], kind: methods.MSD
) -> methods.VQAMethod:
    """MSD with the planned tree, or plain decoding where that should be as fast.

    ``plans`` keeps what was planned.
    """
    key = (len(prompt.lengths), target.processor.greedy, torch.get_num_threads())
    if key not in plans:
        plans[key] = _plan(target, head, prompt)
    shape = plans[key].shape
    if shape is None:
        return methods.AR()
    return dataclasses.replace(kind, sampled=True, tree=tuple(int(p) for p in shape.parents[0]))


def _plan(target: VLMTarget, head: MSDHead, prompt: VLMPrompt) -> Plan:
    acceptance = head.acceptance
    if not acceptance:
        return Plan(None, 1.0, 1.0, "the drafter's acceptance was never measured")
    longer = dataclasses.replace(prompt, max_new_tokens=max(prompt.max_new_tokens, ROOM))
    try:
        target.check(longer)
    except ValueError as error:
        return Plan(None, 1.0, 1.0, f"no room to measure ({error})")
    table = acceptance[min(acceptance) if target.processor.greedy else max(acceptance)]
    shapes = [best_tree(table, n, len(table))[0] for n in SIZES]
    uniforms = Uniforms(
        [torch.Generator(target.device).manual_seed(i) for i in range(len(prompt.lengths))]
    )
    return planned(
        target,
        lambda shape: MSDDrafter(head, target, shape),
        shapes,
        Recursive(),
        longer,
        uniforms,
        table,
    )


def measure_acceptance(
    target: VLMTarget,
    head: MSDHead,
    prompts: Iterable[VLMPrompt],
    ends: Sequence[int],
    levels: int = 6,
) -> Acceptance:
    """Acceptance by level and rank over the answers to ``prompts`` under exact decoding with the
    target's processor.
    """
    shape = spine(WIDEST[:levels])
    counter = AcceptanceCounter(MSDDrafter(head, target, shape), shape)
    for i, prompt in enumerate(prompts):
        uniforms = Uniforms.from_seeds(range(i, i + len(prompt.lengths)))
        stop = EndTokens(ends, target.device)
        for _ in decode(
            target, counter, Recursive(), prompt, prompt.max_new_tokens, uniforms, stop=stop
        ):
            pass
    return counter.table()
