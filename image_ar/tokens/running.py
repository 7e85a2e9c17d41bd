"""Tokens of pictures by any method, and what a run may claim: what the pipelines of image tokens
share.

Shape letters: B pictures, T tokens a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from specmm import methods
from specmm.captured import captures, prepare_programs, round_program
from specmm.compiled import NotCompiled
from specmm.continuous_batching import Queue
from specmm.decode import Play, Progress, decode, decode_plain, one_round, without_drafts
from specmm.derived import version
from specmm.drafter import Drafter
from specmm.drawing import DrawingTarget
from specmm.image_ar.calls import Tell
from specmm.image_ar.shared import Drawn
from specmm.image_ar.tokens.assemble import Method, PictureParts, assemble
from specmm.image_ar.tokens.row_parallel import decode_rows, rows_certificate
from specmm.randomness import Uniforms
from specmm.verify import Rule
from specmm.verify.claims import run_claim
from specmm.when_compiled import Works

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """The ``prompt`` of the pictures drawn at first, a generator each, and the ``queue`` of all
    where there are more.
    """

    prompt: Any
    generators: list[torch.Generator]
    queue: Queue | None = None


def draw_tokens(
    target: DrawingTarget, parts: PictureParts, batch: Batch, method: Method, tell: Tell | None
) -> Drawn:
    """Pictures without pixels, by a ``method`` that is settled; ``tell`` is called after each
    round.

    Raises ``ValueError`` for a method that the model has no drafter for.
    """
    steps, rule, drafter = _steps(target, parts, batch, method)
    for i, progress in enumerate(steps):
        if tell is not None:
            tell(i, int(progress.counts.min()), {"tokens": progress.tokens})
    queue = batch.queue
    # copies: the next batch's rounds may be played in the same memory
    rows = queue.tokens if queue is not None else progress.tokens[:, : target.length].unbind()
    tokens = torch.stack(list(rows))
    window = method.row_window
    made = run_claim(rule, progress, drafter)
    said = made if window is None else rows_certificate(target, window)
    measured = float(progress.measured)
    return Drawn(tokens, None, progress.stats, said, method.name, measured)


def _steps(
    target: DrawingTarget, parts: PictureParts, batch: Batch, method: Method
) -> tuple[Iterator[Progress], Rule | None, Drafter | None]:
    """The loop over ``batch``, its rule and its drafter (none for plain decoding)."""
    prompt = batch.prompt
    uniforms = Uniforms(batch.generators)
    if method.row_window is not None:
        return decode_rows(target, prompt, method.row_window, uniforms), None, None
    length = target.length
    if not (method.drafts or (target.static_shapes and captures(target.device))):
        return decode_plain(target, prompt, length, uniforms), None, None
    play = _play(target, parts, method)
    if not method.drafts:  # filters and the draw are part of a round's graph, but not of a step's
        alone = without_drafts()
        return decode(target, *alone, prompt, length, uniforms, play=play), None, None
    target, drafter, rule = assemble(method, target, parts)
    steps = decode(target, drafter, rule, prompt, length, uniforms, queue=batch.queue, play=play)
    return steps, rule, drafter


def _play(target: DrawingTarget, parts: PictureParts, method: Method) -> Play:
    """What plays the rounds of ``method``: programs that calls share, or the loop as it is."""
    if not target.static_shapes:
        return one_round
    key = methods.filed(method)
    make = partial(round_program, target.device)
    if target.programs is None:
        own = ("round", parts.made.get("static of"), key)
        return parts.once(own, make)
    if key not in target.programs:
        target.programs[key] = make()
    return target.programs[key]


def static_target(
    method: Method,
    parts: PictureParts,
    key: Hashable,
    make: Callable[[], T],
    network: torch.nn.Module,
    works: Works,
) -> T:
    """What ``make`` gives for compiled steps and rounds of ``method``; calls with the same ``key``
    share it as long as the ``network`` and the drafters are what they were, and ``works`` are told
    when it is another.

    Raises ``ValueError`` for a method that compiled rounds do not serve, and where there is no
    compiler.
    """
    if not method.static_shapes:
        raise NotCompiled(
            "compiled=True needs ar, sjd or a method with a block drafter or an EAGLE head "
            f"(rounds all alike), got {method}"
        )
    prepare_programs(next(network.parameters()).device)
    heads = [head for head in parts.drafters.values() if isinstance(head, torch.nn.Module)]
    now = version(network, *heads)
    if parts.made.get("version") != now:  # programs are traced of networks as they are
        parts.made.clear()
        parts.made["version"] = now
    if parts.made.get("static of") != key:  # one at a time: it keeps its cache
        parts.made["static of"] = key
        parts.made.pop("static", None)
        works.replaced()
    return parts.once("static", make)
