"""The comparisons of ``specmm bench``: methods of a model of any kind, or a third-party drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmm import methods
from specmm.choose.threads import settled
from specmm.extending.outside import of_others
from specmm.image_ar.pipeline import family_of
from specmm.methods.making import parse_methods
from specmm.runs.race import Quickest, batches, facts_of, measure, raced, summary, usual, with_plain
from specmm.runs.run import Kind, Place, default_method, draws, kinds_of, open_model


@dataclass(frozen=True)
class Bench:
    """``runs`` of ``batch`` inputs each of ``model`` by ``contenders`` as text, None: the usual.

    ``drafter`` is a folder or a third-party drafter's name; with ``compiled`` all methods that can
    be compiled are.
    """

    model: str
    contenders: str | None
    drafter: str | None
    place: Place
    batch: int
    runs: int
    seed: int
    compiled: bool = False

    def pictures(self, prompts: Sequence[str], size: dict[str, Any]) -> list[dict[str, Any]]:
        """A row for each method that draws ``prompts``, or classes, in this ``size``."""
        theirs = self._own()
        family = family_of(self.model)
        pipe = open_model(
            "images", self.model, self.place, drafter=None if theirs else self.drafter
        )
        if self.contenders is not None:
            chosen = parse_methods(family.methods, self.contenders)
        elif theirs:
            chosen = [methods.by_hand(family.methods, methods.AR(), self.drafter)]
        else:
            chosen = pipe.runnable(parse_methods(family.methods, family.compared))
        arguments = (self.batch, self.runs, self.seed, prompts, self.compiled)
        rows = measure(pipe, self.model, chosen, *arguments, **size)
        return [{**row, "kind": "images"} for row in rows]

    def texts(
        self, asked: Sequence[Any], max_new_tokens: int = 64, temperature: float = 0.0
    ) -> list[dict[str, Any]]:
        """A row for each method that continues or answers what is ``asked`` (:func:`asked_of`)."""
        self._own()
        kind: Kind = "text" if isinstance(asked[0], str) else "questions"
        usually = default_method(kind, self.drafter)
        pipe = open_model(kind, self.model, self.place, usually, self.drafter)
        if self.contenders is not None:
            chosen = parse_methods(pipe.registry, self.contenders)
        else:
            chosen = usual(pipe) if self.drafter is None else [pipe.method]

        def answer(method: Any, rows: Sequence[Any], seed: int, compiled: bool = False) -> Any:
            given = (list(rows),) if kind == "text" else tuple(map(list, zip(*rows, strict=True)))
            options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, temperature=temperature)
            options["seed"] = seed if temperature else None
            return pipe(*given, method=method, compiled=compiled, **options)

        call = Quickest(answer) if self.compiled else answer
        contenders = with_plain(chosen)
        pipe.kept.most = max(pipe.kept.most, len(contenders))  # in turn: none is made anew
        with settled(pipe.model):
            lanes = raced(call, contenders, batches(asked, self.batch, self.runs), self.seed)
            facts = facts_of(self.model, self.seed, pipe.model)
        facts |= {"kind": kind, "max_new_tokens": max_new_tokens, "temperature": temperature}
        facts["quality"] = {"log_likelihood": None}
        return [{**summary(lane, lanes[0], self.batch), **facts} for lane in lanes]

    def _own(self) -> bool:
        """Whether the drafter is a third-party one, which is measured with a method of its own.

        Raises ``ValueError`` if ``contenders`` are given, too: none of them would use it.
        """
        theirs = self.drafter is not None and of_others(self.drafter)
        if theirs and self.contenders is not None:
            raise ValueError(
                f"--drafter {self.drafter} is a method of its own; leave --methods out, or give "
                f"--methods {self.contenders},draft(drafter={self.drafter}) and no --drafter"
            )
        return theirs


def kind_of(model: str, questions: Sequence[str]) -> Kind:
    """The kind of output to measure ``model`` on: some that draw also answer ``questions``."""
    if questions:
        return "questions"
    return "images" if draws(model) else kinds_of(model)[-1]


def asked_of(
    model: str,
    kind: Kind,
    prompts: Sequence[str],
    questions: Sequence[str],
    images: Sequence[Path],
    size: Mapping[str, int],
) -> list[Any]:
    """Prompts, or pairs of a picture (None: a question of text) and a question.

    Raises ``ValueError`` if prompts or questions are missing or of another kind.
    """
    if size:
        raise ValueError(f"--{next(iter(size))} is for drawn pictures; leave it out")
    if kind == "text":
        if not prompts or images:
            raise ValueError(f"{model} continues texts, give --prompt and no --image or --question")
        return list(prompts)
    if questions and prompts:
        raise ValueError("give --prompt to continue texts or --question to ask, not both")
    if not questions:
        raise ValueError(
            f"{model} answers questions, give --question, and --image where it is about a picture"
        )
    if len(images) not in (0, 1, len(questions)):
        raise ValueError(
            f"--image must be given once, or once for each of the {len(questions)} questions, got "
            f"{len(images)}"
        )
    shown: list[Any] = list(images) if len(images) > 1 else [*images, None][:1] * len(questions)
    return list(zip(shown, questions, strict=True))
