"""Workers turn items into results by a pipeline: pictures here, answers in
:mod:`specmm.jobs.answers`.

An item's generator is seeded by the item, and rounding does not depend on the batch
(``batch_invariant``), so neither does the result.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from specmm.choose.when_compiled import Compiled, Turn
from specmm.extending.registry import Registry
from specmm.jobs.folder import Spec
from specmm.jobs.items import Item
from specmm.jobs.programs import Programs, padded
from specmm.jobs.results import Result
from specmm.methods import label
from specmm.methods.making import parse_method
from specmm.programs.batch_invariant import batch_invariant
from specmm.programs.compiled import UNCOMPILED
from specmm.runs.run import Kind, Place, check_sampling, draws, methods_of, open_model

TURNS = 4  # batches' worth of items that a killed job may have to make again


class Worker(Protocol):
    """Makes results of items; raises what the pipeline raises.

    ``network``: the number of threads is chosen for it; None if there is nothing to choose.
    """

    network: nn.Module | None

    def check(self, item: Item) -> None:
        """Raise ``ValueError`` for an item that this model cannot make."""

    def key(self, item: Item) -> Hashable:
        """Items with the same key may be in one batch."""

    def turns(self, item: Item) -> int:
        """The number of batches of items like ``item`` in one ``run``: several if rows that end
        take waiting items.
        """

    def run(self, items: Sequence[Item], rows: int = 0) -> list[Result]:
        """The results of ``items``, in their order, ``rows`` at a time (0: all at once)."""


def kind_of_work(model: str, kinds: Collection[str]) -> Kind:
    """The kind of work of ``model`` on ``kinds`` of items; ``ValueError`` for two kinds."""
    if "question" in kinds and len(kinds) > 1:
        raise ValueError(
            "a job must hold questions, or classes and prompts, got both; make two jobs of it"
        )
    if "question" in kinds:
        return "questions"
    return "text" if "prompt" in kinds and not draws(model) else "images"


class JobMethods:
    """The methods of a job by name; the spec's options belong to the job's own method."""

    def __init__(self, registry: Registry, spec: Spec) -> None:
        self.registry = registry
        self.own = parse_method(registry, spec.method, spec.options)
        self._known: dict[str | None, Any] = {None: self.own}

    def of(self, item: Item) -> Any:
        """The item's method; raises ``ValueError`` for an unknown one."""
        if item.method not in self._known:
            self._known[item.method] = parse_method(self.registry, str(item.method))
        return self._known[item.method]


def check_timed(method: Any, timed: bool) -> None:
    """Raise ``ValueError`` for a ``method`` that is ``timed``: it decides by measured seconds."""
    if timed:
        raise ValueError(
            f"a job's method must not depend on measured seconds, got {method.name}; "
            + ("give its n, as in -o n=8" if method.name == "code" else "name what plan prints")
        )


class ImageWorker:
    """Pictures of classes or prompts.

    Rows of plain batches end together. Rows with drafts take waiting items as they end, unless they
    are compiled: programs do not run a row's first round. ``programs`` decide which methods are
    compiled.
    """

    def __init__(
        self, spec: Spec, device: str = "auto", pipe: Any = None, programs: Programs | None = None
    ) -> None:
        self.spec = spec
        self.methods = JobMethods(methods_of("images", spec.model), spec)
        place = Place.named(device, spec.dtype)
        given = dict(drafter=spec.drafter, text_encoder=spec.text_encoder)
        self.pipe = pipe or open_model("images", spec.model, place, **given)
        self.network = self.pipe.transformer
        check_sampling(self.pipe, spec.model, spec.sampling)
        self.programs = programs if spec.compiled else None
        if self.programs is not None:
            self._check_compiled(self.programs)

    def _check_compiled(self, programs: Programs) -> None:
        """Raise ``ValueError`` for a job's own method that has no programs."""
        own = label(self.methods.own)
        if self.spec.compiled is True or programs.decided(own):
            self._turn(True, self.methods.own, programs.rows_to_be(own))

    def _turn(
        self, compiled: Compiled, method: Any, rows: int, item: Item | None = None
    ) -> Turn[Any]:
        target = self.pipe.target(**self._settled(item)[0])
        found: Turn[Any] = self.pipe.turn(compiled, target, method, rows)
        return found

    def _options(self, item: Item | None) -> dict[str, Any]:
        """The job's options of a call, and the ``item``'s own in their place."""
        own = {} if item is None else dict(item.options)
        other = {"cfg": "guidance_scale", "guidance_scale": "cfg"}  # two names of one
        same = {other[name] for name in own if name in other}
        return {k: v for k, v in self.spec.sampling.items() if k not in same} | own

    def _settled(self, item: Item | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of ``item``: those of the target, and the others of a call."""
        options = self.pipe.settle_names(self._options(item))
        sampling = {k: options.pop(k) for k in self.pipe.sampling_options if k in options}
        return sampling, options

    def check(self, item: Item) -> None:
        """See :class:`Worker`; otherwise one unknown class would fail a whole batch."""
        from specmm.image_ar.calls import class_ids

        if item.options:
            self._check_options(item)
        method = self.methods.of(item)
        check_timed(method, self.pipe.timed(method))
        taken = "class" if self.pipe.takes == "classes" else "prompt"
        if item.kind != taken:
            raise ValueError(
                f"an item for {self.spec.model} must hold a {taken}, got a {item.kind}"
            )
        if item.kind == "class":
            count = self.pipe.transformer.config.num_classes
            class_ids([item.text], self.pipe.settings.classes, count)

    def key(self, item: Item) -> Hashable:
        # a prompt's padding depends on the longest of its batch, and rounding on the padding
        return item.alike, self.pipe.length_of(item.text)

    def _check_options(self, item: Item) -> None:
        """Raise ``ValueError`` for options of an ``item`` that this model does not take."""
        try:
            sampling, call = self._settled(item)
        except TypeError as error:
            raise ValueError(str(error)) from None
        self.pipe.measured(sampling, **call)

    def turns(self, item: Item) -> int:
        method = self.methods.of(item)
        refills = method.drafts and method.can_refill
        return TURNS if refills and self.programs is None else 1

    def run(self, items: Sequence[Item], rows: int = 0) -> list[Result]:
        method = self.methods.of(items[0])
        built = self._rows_of_programs(method, items[0])
        if built and len(items) > built:  # a call with more items would refill rows
            parts = (items[first : first + built] for first in range(0, len(items), built))
            return [result for part in parts for result in self.run(part, rows)]
        start = time.perf_counter()
        made = padded(items, built or 1)
        if built:
            rows = built
            out = self._compiled(made, rows)
        else:
            out = self._drawn(made, rows or len(items))
        seconds = (time.perf_counter() - start) * len(made) / len(items)  # copies are not for free
        facts = facts_of(method, out, made, rows, seconds)
        drawn = list(zip(items, out.images, out.records, strict=False))  # without copies
        return [
            Result(item, dict(facts), record=record, image=image) for item, image, record in drawn
        ]

    def _drawn(self, items: Sequence[Item], rows: int, **options: Any) -> Any:
        """The pipeline's output for ``items``, drawn ``rows`` at a time."""
        given = {"classes" if items[0].kind == "class" else "prompt": [i.text for i in items]}
        generators = [torch.Generator(self.pipe.device).manual_seed(item.seed) for item in items]
        options |= dict(generator=generators, method=self.methods.of(items[0]), batch_size=rows)
        with batch_invariant():
            return self.pipe(**given, **options, **self._options(items[0]))

    def _compiled(self, items: Sequence[Item], rows: int) -> Any:
        """As ``_drawn``, by programs of ``rows``. Raises ``UserWarning`` if they cannot be built,
        because pictures drawn without them would differ.
        """
        work = self._turn("auto", self.methods.of(items[0]), rows, items[0]).work
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", UNCOMPILED)
            out = self._drawn(items, rows, compiled=True)
        assert work is not None and all(out.compiled)
        work.observe(time.perf_counter() - start, len(items), quick=True)
        return out

    def _rows_of_programs(self, method: Any, item: Item) -> int:
        """Rows of the programs that draw pictures such as ``item`` by ``method``; 0: none do."""
        programs = self.programs
        if programs is None:
            return 0
        rows = programs.rows_to_be(label(method))

        def pays() -> bool:
            if self.spec.compiled is True:
                return True
            turn = self._turn("auto", method, rows, item)
            if turn.work is not None and turn.work.seconds.plain is None:
                self._drawn([item] * rows, rows, compiled="auto")  # timed, not kept
            return turn.pays(programs.job.left.get(item.method, 1))

        return programs.rows(label(method), pays)


def facts_of(
    method: Any, out: Any, items: Sequence[Item], rows: int, seconds: float
) -> dict[str, Any]:
    """Facts for the index: tokens and seconds an item, tau and certificate of its batch."""
    count = len(items)
    shares = {
        "tokens": round(out.stats.tokens / count),
        "tau": out.stats.tau,
        "seconds": seconds / count,
        "batch": min(rows or count, count),
    }
    return {"method": label(method), "certificate": out.certificate.as_dict(), "stats": shares}
