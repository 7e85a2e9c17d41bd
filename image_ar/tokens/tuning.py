"""Method ``auto``: measures this machine on the real model and takes the exact tree that should be
fastest.

Acceptance by level and rank is the model's (``settings.json``, measured when it was made); seconds
are this machine's, for this batch size, measured once per process.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch

from specmm import autotune, methods
from specmm.autotune import Plan
from specmm.decode import decode, decode_plain
from specmm.image_ar.tokens.assemble import Parts, assemble
from specmm.image_ar.tokens.drafters.block import BlockDrafter
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.randomness import Uniforms
from specmm.shape.sequoia import best_tree
from specmm.shape.trees import spine
from specmm.tree import TreeShape
from specmm.verify import Recursive

SIZES = (
    3,
    4,
    8,
    12,
    16,
    24,
)  # nodes of the candidate trees, the root included; matrix kernels like multiples of 4
PLANNED = methods.Speculative(
    rule="recursive"
)  # the rule that acceptance by level and rank describes
PICTURES, MARGIN = (
    3,
    0.05,
)  # drawn by each method where nothing can be planned; what a method must gain at least
PROBES = (
    (1,),
    (1, 1, 1),
    (2, 2, 1, 1, 1),
    (4, 4, 3, 3, 2),
)  # children by level where no acceptance is known


def choose_method(target: LlamaGenTarget, parts: Parts, batch: int) -> methods.Method:
    """The speculative method with the planned tree, or plain decoding where that should be as fast.

    A model without a block drafter draws by SJD where that was faster than plain decoding.
    """
    planned = planned_for(target, parts, batch)
    if planned.shape is None:
        return planned.draft_free or methods.AR()
    return dataclasses.replace(PLANNED, tree=tuple(int(p) for p in planned.shape.parents[0]))


def planned_for(target: LlamaGenTarget, parts: Parts, batch: int) -> Plan:
    """The plan for ``batch`` pictures at a time, made once per process and kept in ``parts``."""
    key = (batch, target.guidance.branches, torch.get_num_threads(), target.processor)
    if key not in parts.plans:
        parts.plans[key] = _plan(target, parts, batch)
    return parts.plans[key]


def _plan(target: LlamaGenTarget, parts: Parts, batch: int) -> Plan:
    prompt = _any_prompt(target, batch)
    if not parts.acceptance or "block" not in parts.drafters:
        return _without_drafter(target, parts, prompt, batch)
    head, uniforms = parts.head("block"), _uniforms(batch)

    def drafter_of(shape: TreeShape) -> BlockDrafter:
        return BlockDrafter(head, target, shape, rejected_weight=PLANNED.rejected_weight)

    shapes = candidates(parts)
    return autotune.planned(
        target, drafter_of, shapes, Recursive(), prompt, uniforms, parts.acceptance
    )


def _without_drafter(target: LlamaGenTarget, parts: Parts, prompt: Prompt, batch: int) -> Plan:
    """Jacobi rounds or plain decoding: whole pictures by both in turn, the medians of their seconds
    compared.
    """
    method = methods.SJD()
    own, drafter, rule = assemble(method, target, parts)

    def seconds(jacobi: bool, i: int) -> float:
        uniforms, length = Uniforms.from_seeds(range(i, i + batch)), target.length
        steps = decode(own, drafter, rule, prompt, length, uniforms) if jacobi else None
        begin = time.perf_counter()
        *_, end = steps or decode_plain(target, prompt, length, uniforms)
        taus.append(end.stats.tau)
        return time.perf_counter() - begin

    taus: list[float] = []
    ratios = [seconds(False, i) / seconds(True, i) for i in range(PICTURES)]
    speedup, tau = statistics.median(ratios), statistics.median(taus[1::2])
    lacking = "the model has no block drafter or no measured acceptance"
    if speedup <= 1 + MARGIN:
        return Plan(None, 1.0, 1.0, f"plain decoding: {lacking}, and sjd is {speedup:.2f}x as fast")
    return Plan(
        None,
        tau,
        speedup,
        f"sjd: {lacking}; {speedup:.2f}x plain decoding measured",
        draft_free=method,
    )


def candidates(parts: Parts) -> list[TreeShape]:
    """The trees whose cost is measured and of which one is taken: Sequoia's, for the block
    drafter's acceptance.
    """
    levels = parts.head("block").config.levels
    if not parts.acceptance:
        return [spine(widths) for widths in PROBES if len(widths) <= levels]
    return [best_tree(parts.acceptance, n, levels)[0] for n in SIZES]


def _uniforms(batch: int) -> Uniforms:
    return Uniforms([torch.Generator().manual_seed(i) for i in range(batch)])


def _any_prompt(target: LlamaGenTarget, batch: int) -> Prompt:
    config, device = target.model.config, target.model.output.weight.device
    if config.model_type == "c2i":
        return Prompt(torch.arange(batch, device=device) % config.num_classes)
    return Prompt(
        torch.zeros(
            batch, config.cls_token_num, config.caption_dim, dtype=target.dtype, device=device
        )
    )
