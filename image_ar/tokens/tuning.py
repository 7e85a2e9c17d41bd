"""Method ``auto``: measures this machine on the real model and takes the exact tree that should be fastest.

Acceptance by level and rank is the model's (``settings.json``, measured when it was made); seconds are this
machine's, for this batch size, measured once per process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from specmm import methods
from specmm.autotune import Costs, Plan, measure, plan
from specmm.drafter import Feedback, committed
from specmm.image_ar.tokens.assemble import Parts
from specmm.image_ar.tokens.drafters.block import BlockDrafter
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.randomness import Uniforms, categorical
from specmm.shape.sequoia import best_tree
from specmm.shape.static import spine
from specmm.stats import Clock
from specmm.tree import TreeShape
from specmm.verify import Recursive, decide

SIZES = (3, 4, 6, 8, 11, 14, 18, 24)  # nodes of the candidate trees, the root included
PLANNED = methods.Speculative(rule="recursive")  # the rule that acceptance by level and rank describes
PROBES = ((1,), (1, 1, 1), (2, 2, 1, 1, 1), (4, 4, 3, 3, 2))  # children by level of the trees whose cost is measured


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
    levels = parts.head("block").config.levels
    shapes = [best_tree(parts.acceptance, n, levels)[0] for n in SIZES]
    return plan(measure_costs(target, parts, batch), parts.acceptance, shapes)


@torch.inference_mode()
def measure_costs(target: LlamaGenTarget, parts: Parts, batch: int, repeats: int = 7) -> Costs:
    """Seconds of a plain step, of drafting by depth, of verifying by nodes and of the host's share of a round."""
    prompt = _any_prompt(target, batch)
    uniforms = Uniforms([torch.Generator().manual_seed(i) for i in range(batch)])
    output = target.prefill(prompt, 0)
    token = categorical(output.laws[:, -1], uniforms.draw(1)[:, 0])

    def step() -> None:
        nonlocal token
        token = categorical(target.step(token).laws[:, 0], uniforms.draw(1)[:, 0])

    seconds = measure(step, repeats=2 * repeats, warmup=3)
    draft, verify, host = {}, {}, 0.0
    for widths in PROBES:
        if len(widths) <= parts.head("block").config.levels:
            shape = spine(widths)
            draft[shape.depth], verify[shape.size], host = _round(target, parts, shape, prompt, uniforms, repeats)
    return Costs(draft, verify, seconds, host)


def _round(
    target: LlamaGenTarget, parts: Parts, shape: TreeShape, prompt: Prompt, uniforms: Uniforms, repeats: int
) -> tuple[float, float, float]:
    """Median seconds of drafting, verifying, and deciding and committing one round with ``shape``."""
    drafter = BlockDrafter(parts.head("block"), target, shape, hindsight=PLANNED.hindsight)
    rule = Recursive()
    output = target.prefill(prompt, shape.size)
    feedback = Feedback(output, categorical(output.laws[:, -1], uniforms.draw(1)[:, 0]))
    drafter.begin(feedback, Clock())
    tree = drafter.propose(feedback, uniforms)
    output = target.score(tree)
    verdict = decide(rule, tree, output.laws, uniforms)
    verdict.kept = torch.ones_like(verdict.kept)  # so that every repetition commits one token and none overflows
    feedback = Feedback(output, verdict.next_token, tree, verdict, committed(tree, verdict))

    def settle() -> None:
        decide(rule, tree, output.laws, uniforms)
        target.commit(verdict)

    parts_of_round: list[Callable[[], object]] = [
        lambda: drafter.propose(feedback, uniforms),
        lambda: target.score(tree),
        settle,
    ]
    draft, verify, host = (measure(part, repeats=repeats, warmup=2) for part in parts_of_round)
    return draft, verify, host


def _any_prompt(target: LlamaGenTarget, batch: int) -> Prompt:
    config, device = target.model.config, target.model.output.weight.device
    if config.model_type == "c2i":
        return Prompt(torch.arange(batch, device=device) % config.num_classes)
    return Prompt(torch.zeros(batch, config.cls_token_num, config.caption_dim, dtype=target.dtype, device=device))
