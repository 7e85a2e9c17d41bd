"""The worker of answers to questions about pictures, and of continued texts."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

from specmm.hf.models.families import Family
from specmm.hf.prompts.options import Options
from specmm.image_ar.records import made_by
from specmm.jobs.folder import Spec
from specmm.jobs.items import Item, digests_of
from specmm.jobs.results import Result
from specmm.jobs.workers import TURNS, JobMethods, check_timed, facts_of
from specmm.programs.batch_invariant import batch_invariant
from specmm.runs.run import Kind, Place, methods_of, open_model
from specmm.zoo.model_files import digest_of_models


class AnswerWorker:
    """Answers to questions about pictures, or texts after prompts, by transformers models.

    Rows that end take waiting items where the method can do that; else a batch lasts as long as its
    longest answer.
    """

    def __init__(self, spec: Spec, questions: bool, device: str = "auto", pipe: Any = None) -> None:
        kind: Kind = "questions" if questions else "text"
        self.spec = spec
        self.questions = questions
        self.methods = JobMethods(methods_of(kind, spec.model), spec)
        self.options = Options.of(dict(spec.sampling))
        names = {"model": spec.model, "drafter": spec.drafter}
        self.source = {name: value for name, value in names.items() if value is not None}
        self.files = digest_of_models(self.source.values())
        place = Place.named(device, spec.dtype)
        self.pipe = pipe or open_model(kind, spec.model, place, self.methods.own, spec.drafter)
        self.network = self.pipe.model
        self._check_drawing(self.methods.own, self.options.draw)

    def check(self, item: Item) -> None:
        method = self.methods.of(item)
        check_timed(method, method.timed)
        if not method.streams:
            known = [name for name in self.methods.registry if name != method.name]
            raise ValueError(
                f"a job's method must answer by itself, got {method.name}; "
                f"choose from: {', '.join(known)}"
            )
        if item.options:
            Options.of(self.spec.sampling | dict(item.options))
        self._check_drawing(method, self._draws(item))

    def _draws(self, item: Item) -> bool:
        """Whether the item's answer may hold pictures."""
        return self.options.draw if item.draw is None else item.draw

    def _check_drawing(self, method: Any, draw: bool) -> None:
        if draw and self.questions:  # for texts the call itself refuses it
            self.pipe.check_drawing(method, self.options.max_new_tokens)

    def key(self, item: Item) -> Hashable:
        return item.alike

    def turns(self, item: Item) -> int:
        # positions or pictures that depend on the batch leave no room for waiting items
        family = Family.of(self.pipe.model)
        fixed = family.turning_point is not None or family.reads_pictures_apart
        return TURNS if self.methods.of(item).can_refill and not fixed else 1

    def run(self, items: Sequence[Item], rows: int = 0) -> list[Result]:
        start = time.perf_counter()
        method = self.methods.of(items[0])
        shown = ([i.pictures for i in items],) if self.questions else ()
        options: dict[str, Any] = dict(method=method)
        sampling = self.spec.sampling | dict(items[0].options)
        if sampling.get("temperature"):
            options["seed"] = [item.seed for item in items]
        if any(item.videos for item in items):
            options["videos"] = [item.films for item in items]
        options["batch_size"] = (rows or len(items)) if method.can_refill else 0
        options |= sampling
        drawn = self._draws(items[0])
        if self.questions:
            options["draw"] = drawn
        with batch_invariant():
            out = self.pipe(*shown, [i.text for i in items], **options)
            maker = made_by(self.source, self.files, sampling, self.network)
        facts = facts_of(method, out, items, rows, time.perf_counter() - start)
        answers = out.answers if self.questions else out.texts
        pictures = out.pictures if drawn else [None] * len(items)
        made = zip(items, answers, out.tokens, out.taus, pictures, strict=True)
        return [
            Result(
                item,
                {**facts, "stats": {**facts["stats"], "tokens": len(tokens), "tau": tau}},
                {**maker, "inputs": digests_of(item)},
                answer=answer,
                pictures=shown,
            )
            for item, answer, tokens, tau, shown in made
        ]
