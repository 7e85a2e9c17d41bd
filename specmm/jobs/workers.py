"""From items to results by a pipeline: pictures, answers to questions about pictures, texts after
prompts.

An item's generator is seeded by the item, and rounding does not depend on the batch
(``batch_invariant``), so neither does the result.

Shape letters: none.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from specmm import methods
from specmm.batch_invariant import batch_invariant
from specmm.jobs.items import Item
from specmm.jobs.spec import Spec
from specmm.jobs.store import Result
from specmm.registry import Registry, unknown
from specmm.runs.method_names import label, parse_method
from specmm.runs.models import Kind, Place, draws, methods_of, open_model
from specmm.stats import Certificate, Stats

TURNS = 4  # a killed job makes at most so many batches again


class Worker(Protocol):
    """Makes results of items; raises what the pipeline raises."""

    def check(self, item: Item) -> None:
        """Raise ``ValueError`` for an item that this model cannot make."""
        ...

    def key(self, item: Item) -> Hashable:
        """Items with the same key may be in one batch."""
        ...

    def turns(self, item: Item) -> int:
        """How many batches' worth of items like ``item`` one ``run`` takes: several where rows are
        taken over by waiting samples.
        """
        ...

    def run(self, items: Sequence[Item], rows: int = 0) -> list[Result]:
        """The results of ``items``, in their order, ``rows`` at a time (0: all at once)."""
        ...


def open_worker(spec: Spec, items: Sequence[Item], device: str = "cpu") -> Worker:
    """The worker of ``spec``'s model for the kinds of ``items``; raises ``ValueError`` where they
    do not fit.
    """
    kinds = {item.kind for item in items}
    if "question" in kinds and len(kinds) > 1:
        raise ValueError(
            "a job must hold questions, or classes and prompts, got both; make two jobs of it"
        )
    if "question" in kinds or ("prompt" in kinds and not draws(spec.model)):
        return AnswerWorker(spec, "question" in kinds, device)
    return ImageWorker(spec, device)


def kind_of_items(model: str, items: Sequence[Item]) -> Kind:
    """What ``model`` is to do with ``items``."""
    if items[0].kind == "question":
        return "questions"
    return "text" if items[0].kind == "prompt" and not draws(model) else "images"


class Methods:
    """The methods of a job by name, each looked up once; ``options`` belong to the job's own
    method.
    """

    def __init__(self, registry: Registry, spec: Spec) -> None:
        self.registry, self.own = registry, parse_method(registry, spec.method, spec.options)
        self._known: dict[str | None, Any] = {None: self.own}

    def of(self, item: Item) -> Any:
        """The item's method; raises ``ValueError`` for an unknown one, and for one that looks at
        the clock.
        """
        if item.method not in self._known:
            self._known[item.method] = parse_method(self.registry, str(item.method))
        found = self._known[item.method]
        if isinstance(found, methods.Auto):
            raise ValueError(
                "a job's method must not depend on measured seconds, got auto; name the one that specmm plan prints"
            )
        return found


class ImageWorker:
    """Pictures of classes or prompts. Rows of plain batches end together; those of drafts are taken
    over by waiting samples as they end.
    """

    def __init__(self, spec: Spec, device: str = "cpu", pipe: Any = None) -> None:
        from specmm.runs.pictures import check_sampling

        self.spec = spec
        self.methods = Methods(methods_of("images", spec.model), spec)
        place = Place.named(device, spec.dtype)
        self.pipe = pipe or open_model("images", spec.model, place, text_encoder=spec.text_encoder)
        check_sampling(self.pipe, spec.model, spec.sampling)

    def check(self, item: Item) -> None:
        """See :class:`Worker`; classes are checked here, so that a batch does not fail by one of
        them.
        """
        from specmm.image_ar.settings import class_ids

        planned = (
            getattr(self.methods.of(item), "n", 0) == -1
            and getattr(self.pipe.settings, "n", -1) == -1
        )
        if planned:
            raise ValueError(
                "a job's method must not depend on measured seconds, got code; give its n, as in -o n=8"
            )
        if item.kind == "class":
            class_ids(
                [item.text], self.pipe.settings.classes, self.pipe.transformer.config.num_classes
            )

    def key(self, item: Item) -> Hashable:
        """See :class:`Worker`."""
        return item.kind, item.method

    def turns(self, item: Item) -> int:
        """See :class:`Worker`."""
        method = self.methods.of(item)
        return TURNS if method.drafts and method.can_refill else 1

    def run(self, items: Sequence[Item], rows: int = 0) -> list[Result]:
        """See :class:`Worker`."""
        first, start, rows = items[0], time.perf_counter(), rows or len(items)
        method = self.methods.of(first)
        given = {"classes" if first.kind == "class" else "prompt": [i.text for i in items]}
        generators = [torch.Generator(self.pipe.device).manual_seed(item.seed) for item in items]
        with batch_invariant():
            out = self.pipe(
                **given, generator=generators, method=method, batch_size=rows, **self.spec.sampling
            )
        facts = _facts(
            label(method), out.certificate, out.stats, len(items), time.perf_counter() - start
        )
        facts["stats"]["batch"] = min(rows, len(items))
        return [
            Result(item, {**facts}, image=image)
            for item, image in zip(items, out.images, strict=True)
        ]


class AnswerWorker:
    """Answers to questions about pictures, or texts after prompts: transformers models. Rows are
    taken over by waiting samples, too.
    """

    def __init__(self, spec: Spec, questions: bool, device: str = "cpu", pipe: Any = None) -> None:
        from specmm.hf.running import Options

        kind: Kind = "questions" if questions else "text"
        self.spec, self.questions = spec, questions
        self.methods = Methods(methods_of(kind, spec.model), spec)
        Options.of(dict(spec.sampling))
        place = Place.named(device, spec.dtype)
        self.pipe = pipe or open_model(kind, spec.model, place, self.methods.own, spec.drafter)

    def check(self, item: Item) -> None:
        """See :class:`Worker`."""
        method = self.methods.of(item)
        if isinstance(method, methods.Verdict):
            raise unknown(
                "method of a job", "verdict", ("ar", "msd", "text-draft", "prompt-lookup")
            )
        if getattr(method, "sure", 0) and self.spec.sampling.get("temperature", 0):
            raise ValueError(
                f"a job's {method.name} must not be cut by sure at temperature above 0: leave sure out"
            )

    def key(self, item: Item) -> Hashable:
        """See :class:`Worker`."""
        return item.method, len(item.images)

    def turns(self, item: Item) -> int:
        """See :class:`Worker`."""
        from specmm.hf.families import Family

        turns = (
            Family.of(self.pipe.model).turning_point is not None
        )  # its positions depend on the batch's longest text
        return TURNS if self.methods.of(item).can_refill and not turns else 1

    def run(self, items: Sequence[Item], rows: int = 0) -> list[Result]:
        """See :class:`Worker`. Where rows are not taken over by waiting samples a batch ends with
        its longest answer.
        """
        method, start, rows = self.methods.of(items[0]), time.perf_counter(), rows or len(items)
        shown = ([i.pictures for i in items],) if self.questions else ()
        options = {
            "seed": [i.seed for i in items],
            "method": method,
            "batch_size": rows if method.can_refill else 0,
        }
        with batch_invariant():
            out = self.pipe(*shown, [i.text for i in items], **options, **self.spec.sampling)
        facts = _facts(
            label(method), out.certificate, out.stats, len(items), time.perf_counter() - start
        )
        facts["stats"]["batch"] = min(rows, len(items))
        answers = out.answers if self.questions else out.texts
        return [
            Result(item, {**facts, "stats": {**facts["stats"], "tokens": len(ids)}}, answer=answer)
            for item, answer, ids in zip(items, answers, out.tokens, strict=True)
        ]


def _facts(
    method: str, certificate: Certificate, stats: Stats, count: int, seconds: float
) -> dict[str, Any]:
    """For the index. Tokens and seconds are an item's share; ``tau`` and the certificate are its
    batch's.
    """
    shares = {
        "tokens": round(stats.tokens / count),
        "tau": stats.tau,
        "seconds": seconds / count,
        "batch": count,
    }
    return {"method": method, "certificate": certificate.as_dict(), "stats": shares}
