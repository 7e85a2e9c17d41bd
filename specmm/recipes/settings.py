"""Settings that the recipes of drafters share, and their common steps: the drafter's folder, the
target, the data, the loop, and the end.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specmm import __version__, methods
from specmm.core.decode import EndTokens, decode
from specmm.core.derived import digest
from specmm.core.processors import Processor
from specmm.hf.drafters.drafting import KINDS, assemble, row_uniforms
from specmm.hf.drafters.features import acceptance_of
from specmm.hf.loading.placing import Placing
from specmm.hf.loading.pretrained import find_target, load_config, load_tokenizer, weights_folder
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.loading.files import writable
from specmm.loading.hardware import Place
from specmm.recipes.loop import Losses, Run, check_same, one_first, own_device
from specmm.recipes.losses import check_loss
from specmm.recipes.recipe import Amount, Count, Found, Places, Recipe, Seed, Size, beside
from specmm.recipes.training.seen import Read, Seen, SeenRows, learn
from specmm.text.pipeline import TextPipeline
from specmm.vlm.loading import is_composed
from specmm.vlm.pipeline import VQAPipeline

# settings that may be others when a run goes on
APART = {"out", "replace", "steps", "epochs", "save_every", "measure_every", "tracker"}
APART |= {"keep", "device", "device_map"}
WARMUP = 100  # steps, where a training has ten times as many
LONG = 60  # characters of a setting that are shown


@dataclass(frozen=True)
class Training:
    """A training's loop and its results."""

    steps: Count
    batch: Count
    lr: Amount | None
    warmup: Size | None
    accumulate: Count
    seed: Seed
    replace: bool
    out: Path
    save_every: Amount
    tracker: str
    device: str | None

    def begun(self, model: str, kind: str, recipe: Recipe) -> Begun:
        """Begin training a drafter of method ``kind`` for ``model``.

        Raises ``ValueError`` for an unknown model, for folders that cannot be written, for an
        existing drafter that is not to be replaced, and for a run that began with other settings.
        """
        folder = beside(model, find_target(model))
        result = folder / "drafters" / KINDS[kind].place
        if (result / "config.json").exists() and not self.replace:
            raise ValueError(f"{result} exists already; give --set replace=true to replace it")
        writable(result.parent)
        writable(self.out)
        begun = Begun(self, model, folder, result, facts_of(recipe))
        check_same(self.out, begun.facts)
        return begun

    def run(self, facts: Mapping[str, object], **more: Any) -> Run:
        """The loop, with ``facts`` for its checkpoint; ``more`` override these settings."""
        options: dict[str, Any] = dict(lr=self.lr, accumulate=self.accumulate, steps=self.steps)
        options |= dict(save_every=self.save_every, tracker=self.tracker, batch=self.batch)
        options |= more
        short = min(WARMUP, options["steps"] // 10)
        options["warmup"] = short if self.warmup is None else self.warmup
        return Run(self.out, made_of=facts, **options)


@dataclass(frozen=True)
class Targeted(Training):
    """A training on the states of a target; settings of the target's loading and measuring."""

    loss: str
    epochs: Amount | None
    scenes: Count
    measure_every: Size
    keep: Amount
    dtype: str | None
    device_map: str | None

    def __post_init__(self) -> None:
        check_loss(self.loss)


def load_frozen(
    folder: Path, device: str | None = None, dtype: str | None = None, device_map: str | None = None
) -> VLMTarget:
    """The frozen model in ``folder``, loaded as in pipelines."""
    target_place = Place.named(device, dtype, device_map=device_map)
    where = folder if is_composed(folder) else weights_folder(folder)
    kind: Any = VQAPipeline if sees(folder) else TextPipeline
    model, _ = kind.placed(folder, Placing.of(where, target_place, device_map))
    return VLMTarget(model.requires_grad_(False), Processor(), str(folder))


def facts_of(recipe: Recipe) -> dict[str, str]:
    """The facts that must not change when a run resumes: the version, and settings by name."""
    facts = {"specmm": __version__}
    for name, value in recipe.settings.items():
        if name not in APART:
            several = value.places if isinstance(value, Places) else value
            values = [_full(x) for x in several] if isinstance(several, list) else _full(several)
            facts[name] = _short(str(values))
    return facts


def _full(value: Any) -> Any:
    """``value``, or the absolute path if it is a path."""
    named = isinstance(value, str | Path) and str(value) and Path(value).exists()
    return str(Path(value).absolute()) if named else value


def _short(text: str) -> str:
    """``text``, or its end and a digest of it."""
    if len(text) <= LONG:
        return text
    return f"…{text[-LONG:]} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def sees(folder: Path) -> bool:
    """Whether the model in ``folder`` reads pictures."""
    return is_composed(folder) or hasattr(load_config(weights_folder(folder)), "vision_config")


@dataclass(frozen=True)
class Lessons:
    """The data of a drafter's training: ``rows``, with a digest ``key`` and a function ``read``
    that makes batches; ``said`` returns how often each token [V] occurs as a token to draft.
    Acceptance is measured on answers to the held-out ``prompt``, which end with ``ends``.
    """

    rows: Sequence[Any]
    key: str
    read: Read
    said: Callable[[], Tensor]
    prompt: VLMPrompt
    ends: Sequence[int]
    lengths: Sequence[int] = ()

    def vocabulary(self, most: int) -> Tensor | None:
        """The ``most`` frequent tokens, or all that occur if they are fewer; None for 0."""
        if not most:
            return None
        counts = self.said()
        return counts.topk(min(most, int((counts > 0).sum()))).indices


@dataclass(frozen=True)
class Begun:
    """A drafter's training for ``model`` in ``folder``, with its result in ``place`` and ``facts``
    for its checkpoint.
    """

    training: Any  # a Training, or a Targeted
    model: str
    folder: Path
    place: Path
    facts: Mapping[str, str]

    @cached_property
    def target(self) -> VLMTarget:
        """The target, in its dtype and on its device."""
        args = self.training
        return load_frozen(self.folder, own_device(args.device), args.dtype, args.device_map)

    def pipeline(self, method: str = "ar") -> Any:
        """The model's pipeline with a ``method``, on the target's device."""
        args = self.training
        kind: Any = VQAPipeline if sees(self.folder) else TextPipeline
        where = None if args.device_map else own_device(args.device)
        options = dict(device=where, dtype=args.dtype, device_map=args.device_map)
        return kind.from_pretrained(self.folder, method=method, **options)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        return load_tokenizer(weights_folder(self.folder))

    def mask(self, token: int | None) -> int:
        """The mask ``token``, or the tokenizer's; raises ``ValueError`` without either."""
        mask = self.tokenizer.mask_token_id if token is None else token
        if mask is None:
            raise ValueError(
                "tokenizer must have a mask token for a block drafter, got none; "
                "give one of its ids as mask"
            )
        return int(mask)

    def steps(self, rows: Sequence[Any]) -> int:
        """Optimiser steps over ``rows``."""
        args = self.training
        step_rows = args.batch * args.accumulate
        return math.ceil(args.epochs * len(rows) / step_rows) if args.epochs else int(args.steps)

    def run(self, lessons: Lessons, drafter: Any, network: nn.Module, **more: Any) -> Run:
        """The training loop over ``lessons``, with measurements of the ``drafter`` while its
        ``network`` learns; ``more`` override the training's settings.
        """
        args = self.training
        facts = {**self.facts, "rows learnt": lessons.key, "target": digest(self.target.model)}
        more |= dict(measure=self.tau(drafter, network, lessons), measure_every=args.measure_every)
        run: Run = args.run(facts, **{"steps": self.steps(lessons.rows), **more})
        return run

    def learn(
        self,
        lessons: Lessons,
        drafter: Any,
        loss: Callable[[Seen, int], Losses],
        save: Callable[[], object],
        *,
        network: nn.Module | None = None,
        layers: Sequence[int] = (),
        clip: float = 1.0,
        **more: Any,
    ) -> Found:
        """Train the ``drafter``, or its ``network``, by the ``loss`` on the target's states (of
        ``layers``) on ``lessons``; then ``save`` writes it.
        """
        args = self.training
        network = drafter if network is None else network
        run = self.run(lessons, drafter, network, **more)
        options = (args.batch, args.seed, args.out, args.keep, lessons.lengths)
        seen = SeenRows(self.target, lessons.rows, lessons.read, layers, *options)
        learn(network, loss, seen.batch, run, clip=clip)
        return self.end(save, run)

    def tau(
        self, drafter: Any, network: nn.Module, lessons: Lessons
    ) -> Callable[[], dict[str, float]]:
        """A function that measures the ``drafter`` while its ``network`` learns: tokens a round of
        greedy answers, drafted in chains, to the held-out questions of ``lessons``.
        """
        target, prompt = self.target, lessons.prompt
        method = methods.make(methods.GENERATE, self.place.name)
        if hasattr(method, "top_k"):
            method = dataclasses.replace(method, top_k=1, total=method.depth + 2)

        def measure() -> dict[str, float]:
            judge = VLMTarget(target.model, Processor(0.0), target.name)
            stop = EndTokens(lessons.ends, target.device)
            length, uniforms = prompt.max_new_tokens, row_uniforms(prompt)
            with served(network, target.dtype):
                bound, rule = assemble(method, judge, drafter)
                *_, end = decode(judge, bound, rule, prompt, length, uniforms, stop=stop)
            return {"tau": end.stats.tau}

        return measure

    def accepted(self, head: Any, lessons: Lessons) -> None:
        """Measure the acceptance of a trained ``head``, for method auto."""
        target = self.target
        with served(head, target.dtype):
            head.acceptance = acceptance_of(target, head, [lessons.prompt], lessons.ends)

    def end(self, save: Callable[[], object], run: Run) -> Found:
        """The training's results; the first process writes them by ``save``."""
        with one_first() as first:
            if first:
                save()
        kind = self.place.name
        return {"kind": kind, "model": self.model, "steps": run.steps, "outputs": [str(self.place)]}


@contextmanager
def served(network: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A block in which the float32 weights of ``network`` are in ``dtype``, as when it drafts."""
    masters = [weight for weight in network.parameters() if weight.dtype == torch.float32 != dtype]
    values = [weight.data for weight in masters]
    for weight in masters:
        weight.data = weight.data.to(dtype)
    try:
        yield
    finally:
        for weight, data in zip(masters, values, strict=True):
            weight.data = data
