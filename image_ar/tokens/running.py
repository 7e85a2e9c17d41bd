"""Tokens of pictures by any method, and what a run may claim: what the pipelines of image tokens
share.

Shape letters: B pictures, T tokens a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from specmm import methods
from specmm.choose.contest import Record
from specmm.choose.when_compiled import Works
from specmm.core.continuous_batching import Queue
from specmm.core.decode import Play, Progress, decode, decode_plain, one_round, without_drafts
from specmm.core.derived import placed, version
from specmm.core.drafter import Drafter
from specmm.core.drawing import DrawingTarget
from specmm.core.randomness import Uniforms
from specmm.image_ar.calls import Tell
from specmm.image_ar.shared import Drawn
from specmm.image_ar.tokens.assemble import Method, PictureParts, assemble
from specmm.image_ar.tokens.row_parallel import decode_rows, rows_certificate
from specmm.programs.compiled import NotCompiled
from specmm.programs.graphs import captures, prepare_programs, round_program
from specmm.verify import Rule
from specmm.verify.claims import run_claim

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
    target: DrawingTarget,
    parts: PictureParts,
    batch: Batch,
    method: Method,
    tell: Tell | None,
    record: Record | None = None,
) -> Drawn:
    """Pictures without pixels, by a ``method`` that is settled; ``tell`` is called after each
    round. The ``record`` takes a sample of their seconds.

    Raises ``ValueError`` for a method that the model has no drafter for.
    """
    steps, rule, drafter = _steps(target, parts, batch, method)
    if record is not None and batch.queue is None:  # or rows begin anew
        steps = record.called(method, steps)
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
    if not method.drafts:  # filters and the draw are part of a round's graph, but not of a step's
        _, play = _rounds(target, parts, method, lambda: None)
        alone = without_drafts()
        return decode(target, *alone, prompt, length, uniforms, play=play), None, None
    made, play = _rounds(target, parts, method, lambda: assemble(method, target, parts))
    target, drafter, rule = made
    steps = decode(target, drafter, rule, prompt, length, uniforms, queue=batch.queue, play=play)
    return steps, rule, drafter


def _rounds(
    target: DrawingTarget, parts: PictureParts, method: Method, assembled: Callable[[], T]
) -> tuple[T, Play]:
    """What rounds of ``method`` take, and what plays them: the loop as it is, or programs, which
    calls share with what is ``assembled`` for them.
    """
    if not target.static_shapes:
        return assembled(), one_round
    own = ("round", parts.made.get("static of"), methods.filed(method))
    return parts.once(own, lambda: (assembled(), round_program(target.device)))


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
    device = next(network.parameters()).device
    prepare_programs(device)
    heads = [head for head in parts.drafters.values() if isinstance(head, torch.nn.Module)]
    now = (placed if captures(device) else version)(network, *heads)
    if parts.made.get("version") != now:  # programs are traced of networks as they are
        parts.made.clear()
        parts.made["version"] = now
    if parts.made.get("static of") != key:  # one at a time: it keeps its cache
        parts.made["static of"] = key
        parts.made.pop("static", None)
        works.replaced()
    return parts.once("static", make)
