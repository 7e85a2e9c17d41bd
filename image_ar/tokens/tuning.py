"""Method ``auto``: measures this machine on the real model and takes the exact tree that should be fastest.

Acceptance by level and rank is the model's (``settings.json``, measured when it was made); seconds are this
machine's, for this batch size, measured once per process.
"""

from __future__ import annotations

import dataclasses

import torch

from specmm import methods, probing
from specmm.autotune import Costs, Plan, plan
from specmm.image_ar.tokens.assemble import Parts
from specmm.image_ar.tokens.drafters.block import BlockDrafter
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.randomness import Uniforms
from specmm.shape.sequoia import best_tree
from specmm.shape.static import spine
from specmm.tree import TreeShape
from specmm.verify import Recursive

SIZES = (3, 4, 8, 12, 16, 24)  # nodes of the candidate trees, the root included; matrix kernels like multiples of 4
PLANNED = methods.Speculative(rule="recursive")  # the rule that acceptance by level and rank describes
PROBES = ((1,), (1, 1, 1), (2, 2, 1, 1, 1), (4, 4, 3, 3, 2))  # children by level where no acceptance is known


def choose_method(target: LlamaGenTarget, parts: Parts, batch: int) -> methods.Method:
    """The speculative method with the planned tree, or plain decoding where that should be as fast."""
    planned = planned_for(target, parts, batch)
    if planned.shape is None:
        return methods.AR()
    return dataclasses.replace(PLANNED, tree=tuple(int(p) for p in planned.shape.parents[0]))


def planned_for(target: LlamaGenTarget, parts: Parts, batch: int) -> Plan:
    """The plan for ``batch`` pictures at a time, made once per process and kept in ``parts``."""
    key = (batch, target.guidance.branches, torch.get_num_threads(), target.processor)
    if key not in parts.plans:
        parts.plans[key] = _plan(target, parts, batch)
    return parts.plans[key]


def _plan(target: LlamaGenTarget, parts: Parts, batch: int) -> Plan:
    if not parts.acceptance or "block" not in parts.drafters:
        return Plan(None, 1.0, 1.0, "the model has no block drafter or no measured acceptance")
    return plan(measure_costs(target, parts, batch), parts.acceptance, candidates(parts))


def candidates(parts: Parts) -> list[TreeShape]:
    """The trees whose cost is measured and of which one is taken: Sequoia's, for the block drafter's acceptance."""
    levels = parts.head("block").config.levels
    if not parts.acceptance:
        return [spine(widths) for widths in PROBES if len(widths) <= levels]
    return [best_tree(parts.acceptance, n, levels)[0] for n in SIZES]


def measure_costs(target: LlamaGenTarget, parts: Parts, batch: int, repeats: int = 7) -> Costs:
    """Seconds of a plain step, of drafting by depth, of verifying by nodes and of the host's share of a round."""
    prompt = _any_prompt(target, batch)
    uniforms = Uniforms([torch.Generator().manual_seed(i) for i in range(batch)])
    head = parts.head("block")

    def drafter_of(shape: TreeShape) -> BlockDrafter:
        return BlockDrafter(head, target, shape, hindsight=PLANNED.hindsight)

    return probing.measure_costs(target, drafter_of, candidates(parts), Recursive(), prompt, uniforms, repeats)


def _any_prompt(target: LlamaGenTarget, batch: int) -> Prompt:
    config, device = target.model.config, target.model.output.weight.device
    if config.model_type == "c2i":
        return Prompt(torch.arange(batch, device=device) % config.num_classes)
    return Prompt(torch.zeros(batch, config.cls_token_num, config.caption_dim, dtype=target.dtype, device=device))
