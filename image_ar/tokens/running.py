"""Base of the token pipelines: draws picture tokens by any method, and certifies the run.

Shape letters: B pictures, T tokens a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch

from specmm import methods
from specmm.choose.contest import Record
from specmm.core.continuous_batching import Queue
from specmm.core.decode import Play, Progress, decode, decode_plain, one_round, without_drafts
from specmm.core.derived import placed, version
from specmm.core.drafter import Drafter
from specmm.core.drawing import DrawingTarget
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.image_ar.calls import NOT_DRAWN, SoFar
from specmm.image_ar.files import with_options
from specmm.image_ar.shared import Batch, Drawn, PicturePipeline
from specmm.image_ar.tokens.assemble import Method, PictureParts, assemble
from specmm.image_ar.tokens.choosing import settled
from specmm.programs.compiled import NotCompiled
from specmm.programs.graphs import captures, prepare_programs, round_program
from specmm.verify import Rule
from specmm.verify.claims import run_claim

T = TypeVar("T")


class TokenPictures(PicturePipeline[methods.Method]):
    """Base of pipelines that draw token by token; a family defines its targets."""

    parts: PictureParts
    sampling_options = ("cfg", "cfg_interval", "temperature", "top_k", "top_p")
    plans = "trees"
    static: ClassVar[type[Any]]  # the target for compiled steps and rounds

    def sampled(self, **options: Any) -> tuple[Guidance, Processor]:
        """Guidance and processor under ``options``; None stands for the model's setting."""
        chosen = with_options(self.settings, **options)
        processor = Processor(chosen.temperature, chosen.top_k, chosen.top_p)
        return Guidance(chosen.cfg, chosen.cfg_interval), processor

    def claimed(self, target: Any) -> Mapping[str, object]:
        settings: Mapping[str, object] = target.processor.settings | target.guidance.settings
        return settings

    def runnable(self, usual: list[methods.Method]) -> list[methods.Method]:
        """The ``usual`` methods whose drafter it has; SJD, without a drafter, if there are none."""
        return [m for m in usual if self.parts.serves(m)] or [methods.SJD()]

    def settle(
        self, method: methods.Method, batch: int, sampling: Any, pictures: int = 1
    ) -> tuple[methods.Method, str, Record | None]:
        return settled(method, sampling, self.parts, batch, pictures)

    def ran_as(self, method: methods.Method, decided: methods.Method, reason: str) -> str:
        return (
            f"auto: {methods.label(decided)}" if isinstance(method, methods.Auto) else method.name
        )

    def work(self, target: Any) -> tuple[Any, ...]:
        return target.guidance, target.processor

    def quick(self, target: Any, method: methods.Method, batch: int) -> Any:
        """A separate target whose steps and rounds are compiled or captured as CUDA graphs.

        Calls share it until the network or a drafter changes, or other guidance, sampling or
        another ``batch`` is asked for. Raises ``NotCompiled`` for methods whose rounds differ.
        """
        if not method.static_shapes:
            raise NotCompiled(
                "compiled=True needs ar, sjd or a method with a block drafter or an EAGLE head, "
                f"whose rounds have equal shapes, got {method}"
            )
        prepare_programs(self.device)
        parts = self.parts
        heads = [head for head in parts.drafters.values() if isinstance(head, torch.nn.Module)]
        now = (placed if captures(self.device) else version)(self.transformer, *heads)
        if parts.made.get("version") != now:  # programs of changed networks are stale
            parts.made.clear()
            parts.made["version"] = now
        key = (*self.work(target), batch)
        if parts.made.get("static of") != key:  # one at a time: it keeps its cache
            parts.made["static of"] = key
            parts.made.pop("static", None)
            self.works.replaced()
        return parts.once("static", lambda: self.static(target))

    def moved(self) -> None:
        self.parts.made.clear()
        self.parts.records.clear()

    def prompt(self, batch: Batch[methods.Method]) -> Any:
        """The target's prompt for the pictures of ``batch``."""
        return batch.of

    def draw(self, batch: Batch[methods.Method]) -> Drawn:
        """See :class:`PicturePipeline`; ``ValueError`` for a method without its drafter here."""
        queue = None
        if len(batch.generators) > batch.rows:
            every = batch.of
            common = (batch.generators, batch.rows, batch.ended)
            queue = Queue(lambda i: every[i : i + 1], *common)
            first = slice(batch.rows)
            batch = replace(batch, of=batch.of[first], generators=batch.generators[first])
        target = batch.on
        steps, rule, drafter = self._steps(batch, queue)
        if batch.record is not None and queue is None:  # with a queue, rows restart within a run
            steps = batch.record.called(batch.method, steps)
        for i, progress in enumerate(steps):
            if interrupted := batch.watch(i, so_far, progress, target.length):
                break
        # copies: the next batch's rounds may be played in the same memory
        if queue is None:
            tokens = so_far(progress, target.length).tokens
        else:
            none = progress.tokens.new_full((target.length,), NOT_DRAWN)
            tokens = torch.stack([row if len(row) else none for row in queue.tokens])
        claim = run_claim(rule, progress, drafter)
        finished = not interrupted
        return Drawn(tokens, tokens, progress.stats, claim, float(progress.measured), finished)

    def _steps(
        self, batch: Batch[methods.Method], queue: Queue | None
    ) -> tuple[Iterator[Progress], Rule | None, Drafter | None]:
        """The loop over ``batch``, its rule and its drafter (none for plain decoding)."""
        method, target, parts = batch.method, batch.on, self.parts
        prompt = self.prompt(batch)
        uniforms = Uniforms(batch.generators)
        length = target.length
        if not (method.drafts or (target.static_shapes and captures(target.device))):
            return decode_plain(target, prompt, length, uniforms), None, None
        if not method.drafts:  # filters and the draw are part of a round's graph, not of a step's
            _, play = _rounds(target, parts, method, lambda: None)
            undrafted = without_drafts()
            return decode(target, *undrafted, prompt, length, uniforms, play=play), None, None
        run, play = _rounds(target, parts, method, lambda: assemble(method, target, parts))
        target, drafter, rule = run
        steps = decode(target, drafter, rule, prompt, length, uniforms, queue=queue, play=play)
        return steps, rule, drafter


def so_far(progress: Progress, length: int) -> SoFar:
    """A copy of the tokens drawn so far of pictures of ``length`` tokens."""
    counts = progress.counts.clamp(max=length)
    drawn = torch.arange(length, device=counts.device) < counts[:, None]
    tokens = progress.tokens[:, :length].where(drawn, NOT_DRAWN)
    return SoFar(int(counts.min()), float(counts.sum()) / length, tokens)


def _rounds(
    target: DrawingTarget, parts: PictureParts, method: Method, assembled: Callable[[], T]
) -> tuple[T, Play]:
    """The parts that rounds of ``method`` use, and the function that runs a round: the uncompiled
    function, or a program that calls share together with its ``assembled`` parts.
    """
    if not target.static_shapes:
        return assembled(), one_round
    key = ("round", parts.made.get("static of"), methods.filed(method))
    return parts.once(key, lambda: (assembled(), round_program(target.device)))
