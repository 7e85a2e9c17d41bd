"""Method ``auto`` for picture tokens: the fastest of the methods tried on this machine.

Trees are Sequoia's for the acceptance measured when the model was made (``settings.json``).
Relaxed methods, if allowed, are tried on whole pictures, because their deviation is measured, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from specmm import __version__, methods
from specmm.choose.contest import FEW, SHARE, Candidate, Record, clock_of
from specmm.choose.notes import Notes, sizes_of
from specmm.core.decode import Progress, decode, decode_plain
from specmm.core.drawing import DrawingTarget
from specmm.core.randomness import Uniforms
from specmm.image_ar.tokens.assemble import DEFAULT_TREE, Method, PictureParts, assemble
from specmm.shape.sequoia import best_tree, expected_tau
from specmm.shape.trees import static_tree

SIZES = (4, 8, 16)  # nodes of the trees that are tried, with the root
PLANNED = methods.Speculative(rule="recursive")  # the rule that acceptance by rank describes
# methods without a tree to choose, whose tau is measured as the drafters are trained, by setting
JACOBI = {"sjd": methods.SJD()}
BORROWING = ((2.0, 10), (5.0, 20), (20.0, 60), (40.0, 100))  # λ and k of LANTERN++


def record_of(
    target: DrawingTarget, parts: PictureParts, batch: int, auto: methods.Auto, fresh: bool = False
) -> Record:
    """The record of methods' measurements for ``batch`` pictures at a time, with its candidates;
    ``fresh``: only measurements of this process.
    """
    guided = target.guidance if auto.relaxes else target.guidance.branches  # speed knows no scale
    key = (batch, guided, torch.get_num_threads(), target.processor, target.length, auto)
    if key not in parts.records:
        choices = exact_candidates(target, parts)
        if auto.relaxes:
            choices += [Candidate(method) for method in serving(relaxed_methods(), target, parts)]
        tv = auto.tv if auto.relaxes else 0.0
        sizes = [sizes_of(network) for network in (target.model, *parts.drafters.values())]
        notes = Notes.of_machine("methods", (__version__, target.name, sizes, key))
        record = Record(choices, batch, tv, now=clock_of(target.device))
        parts.records[key] = record.remember(notes, fresh)
    return parts.records[key]


def settled(
    method: Any,
    target: DrawingTarget,
    parts: PictureParts,
    batch: int,
    pictures: int = 1,
    share: float = SHARE,
) -> tuple[Any, str, Record | None]:
    """``method``, or the method that auto chooses for ``pictures`` pictures, ``batch`` at a time;
    the reason; and the record for their seconds. Trials may take a ``share`` of the pictures' time
    (infinite: every candidate draws a whole picture).
    """
    if not isinstance(method, methods.Auto):
        return method, "", None
    record = record_of(target, parts, batch, method, math.isinf(share))
    prompt = target.any_prompt(batch)

    def begin(some: Any) -> Iterator[Progress]:
        first = batch * sum(map(len, record.samples.values()))
        uniforms = Uniforms.from_seeds(range(first, first + batch), target.device)
        if not some.drafts:
            return decode_plain(target, prompt, target.length, uniforms)
        bound, drafter, rule = assemble(some, target, parts)
        return decode(bound, drafter, rule, prompt, target.length, uniforms)

    to_the_end = method.relaxes or math.isinf(share)
    few = target.length if to_the_end else min(FEW, target.length)
    coming = target.length * math.ceil(pictures / batch)
    share = math.inf if to_the_end else share
    chosen = record.choose(begin, coming, few, share)
    target.read_layers(())  # trials' drafters said which they read
    return chosen, record.reason(), record


def exact_candidates(target: DrawingTarget, parts: PictureParts) -> list[Candidate]:
    """The exact methods that can draw with ``target``: the block drafter with its usual tree and,
    if its acceptance is known, with Sequoia's; SJD; prompt lookup if prompts are tokens.
    """
    usual = methods.Speculative()
    trees = [Candidate(usual)]
    if parts.acceptance and "block" in parts.drafters:
        levels = parts.head("block").config.levels
        tree = parts.trees.get(usual.name, DEFAULT_TREE)[:levels]
        shapes = {usual: static_tree(tree, "cpu", parts.acceptance)}
        for nodes in SIZES:
            shape = best_tree(parts.acceptance, nodes, levels)[0]
            shapes[replace(PLANNED, tree=tuple(shape.parents[0].tolist()))] = shape
        trees = [
            Candidate(method, float(expected_tau(shape, parts.acceptance)), shape.size, shape.depth)
            for method, shape in shapes.items()
        ]
    taus = {} if target.processor.greedy else parts.taus
    jacobi = [
        Candidate(some, taus.get(name, 0.0), some.window + 1) for name, some in JACOBI.items()
    ]
    candidates = [*trees, *jacobi, Candidate(methods.PromptLookup())]
    serve = serving([candidate.method for candidate in candidates], target, parts)
    return [candidate for candidate in dict.fromkeys(candidates) if candidate.method in serve]


def relaxed_methods() -> list[Method]:
    """The methods whose certificate is "bounded", in ascending order of borrowed mass."""
    borrowing = (methods.LanternPP(lambda_=x, k=k) for x, k in BORROWING)
    return [methods.GSD(), *borrowing, methods.Lantern(drafter="block")]


def serving(offered: Sequence[Method], target: DrawingTarget, parts: PictureParts) -> list[Method]:
    """The methods among ``offered`` that can draw with ``target``."""
    usable: list[Method] = []
    for method in offered:
        try:
            assemble(method, target, parts)
        except ValueError:  # a small picture, layers that cannot be left out, no drafter
            continue
        usable.append(method)
    return usable
