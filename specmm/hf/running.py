"""What pipelines of questions and of text share: options of a call, a run as it goes, drafters
beside a model.

Shape letters: B rows of a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from specmm import methods
from specmm.autotune import Plan
from specmm.certificate import Certificate, of_rule
from specmm.continuous_batching import BatchingDrafter, Queue
from specmm.decode import EndTokens, Play, Progress, all_of, decode, decode_plain, one_round
from specmm.drafter import DeferredDrafter, Drafter, NoDrafts
from specmm.hf.drafting import Drafters, choose, preset_of, said_by
from specmm.hf.prompt import VLMPrompt
from specmm.hf.streaming import StopStrings, gains, stop_texts
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.randomness import Uniforms, sample_generators
from specmm.registry import unknown
from specmm.verify import Recursive, Rule


@dataclass(frozen=True)
class Options:
    """How to answer: ``temperature`` 0 is greedy, ``top_k`` 0, ``top_p`` 1 and
    ``repetition_penalty`` 1 are off.

    ``seed`` or ``generator`` (one for all, or one a row) make sampling repeatable. ``method`` None
    is the pipeline's. ``chat`` puts what is asked into the model's chat template; off, it is a raw
    prompt. An answer ends in front of the first of the texts ``stop``. With ``batch_size`` so many
    rows are answered at a time, and one that ends takes up the next, by methods that can refill; 0
    answers all at once. ``compiled`` runs steps and rounds of text as programs of
    ``torch.compile``, which are made at the first call of a method, batch and length.
    """

    max_new_tokens: int = 64
    method: Any = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    chat: bool = True
    stop: str | Sequence[str] = ()
    batch_size: int = 0
    compiled: bool = False

    @classmethod
    def of(cls, given: dict[str, Any], **defaults: Any) -> Options:
        """The options ``given`` by name; raises ``ValueError`` with a suggestion for one that is
        not known.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for name in given.keys() - set(known):
            raise unknown("option", name, known)
        found = cls(**{**defaults, **given})
        if found.batch_size < 0:
            raise ValueError(f"batch_size must be at least 0, got {found.batch_size}")
        return found

    @property
    def processor(self) -> Processor:
        """From logits to distributions."""
        return Processor(
            self.temperature, self.top_k, self.top_p, repetition_penalty=self.repetition_penalty
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer; raises ``ValueError`` for an empty one."""
        return stop_texts(self.stop)

    def generators(self, count: int, device: torch.device) -> list[torch.Generator]:
        """One for each of ``count`` rows; raises ``ValueError`` for numbers of seeds that do not
        match.
        """
        if self.seed is not None and self.generator is not None:
            raise ValueError("give seed or generator, not both")
        if isinstance(self.seed, Sequence):
            if len(self.seed) != count:
                raise ValueError(
                    f"seed must be one or one for each of the {count} rows, got {len(self.seed)}"
                )
            return [torch.Generator(device).manual_seed(seed) for seed in self.seed]
        seeded = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)
        return sample_generators(seeded or self.generator, count, device)


def check_continuous_batching(method: Any, batch_size: int) -> None:
    """Raise ``ValueError`` for a ``batch_size`` with a method whose rows cannot take up others."""
    if batch_size and not method.can_refill:
        kinds = [methods.make(methods.GENERATE, name) for name in methods.GENERATE]
        others = ", ".join(kind.name for kind in kinds if kind.can_refill)
        raise ValueError(
            f"batch_size must be 0 for method {method.name!r}, which answers all at once; or use one of {others}"
        )


@dataclass
class Prompts:
    """The ``count`` prompts of a call; ``of`` prepares some of them, ``batch_size`` are answered at
    a time (0: all).
    """

    of: Callable[[slice], VLMPrompt]  # on the CPU: those that wait need no room elsewhere
    count: int
    batch_size: int = 0

    def first(self, target: VLMTarget) -> VLMPrompt:
        """The prompts that rows begin with, and room for those that wait.

        Raises ``ValueError`` for prompts that ``target`` cannot hold.
        """
        rows = min(self.batch_size or self.count, self.count)
        if rows < self.count and target.family.turning_point is not None:
            raise ValueError(
                f"batch_size must be 0 for {target.name}, whose positions depend on a batch's longest text"
            )
        prompt = self.of(slice(rows))
        self.waiting = {i: self.of(slice(i, i + 1)) for i in range(rows, self.count)}
        prompt.longest = max((p.width for p in self.waiting.values()), default=0)
        for one in (prompt, *self.waiting.values()):
            target.check(one)
        return prompt.to(target.device, target.dtype)

    def queue(self, target: VLMTarget, generators: Sequence[torch.Generator]) -> Queue | None:
        """The prompts by number; None where all are answered at once."""

        def prompt(number: int) -> VLMPrompt:
            return self.waiting.pop(number).to(target.device, target.dtype)

        return Queue(prompt, generators, self.batch_size) if self.batch_size else None


@dataclass(frozen=True)
class Said:
    """What a round added: ``pieces`` of text, each with whether it is of accepted drafts, and how
    many ``tokens``.
    """

    pieces: list[tuple[str, bool]]
    tokens: int

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for text, _ in self.pieces)


@dataclass
class Run:
    """One batch being answered; ``text`` decodes ids, ``stops`` end answers, rows take up those of
    the ``queue``.

    ``settings`` are those the certificate is about.
    """

    method: str
    steps: Iterator[Progress]
    rule: Rule | None
    text: Callable[[Tensor], str]
    stops: StopStrings
    settings: Mapping[str, Any]
    queue: Queue | None = None

    def finish(self, streamer: Any = None) -> tuple[list[str], list[Tensor], Progress]:
        """Texts and ids of all rows, and the last progress; ``streamer`` is told the ids as they
        come.
        """
        if streamer is not None and self.queue is not None and len(self.queue.generators) > 1:
            raise ValueError(
                f"a streamer takes one answer at a time, got {len(self.queue.generators)} questions"
            )
        *_, (end, _) = gains(self.steps, streamer)
        tokens = committed(end) if self.queue is None else self.queue.tokens
        return [self.stops.cut(self.text(ids)) for ids in tokens], tokens, end

    def rounds(self, apart: bool = True) -> Iterator[list[Said]]:
        """What every row gained by each round, no text that may turn out to be the beginning of a
        stop.

        With ``apart`` accepted drafts are set apart from the target's own tokens.
        """
        if self.queue is not None:
            raise ValueError(
                "batch_size must be 0 for a stream, which shows all answers as they grow"
            )
        told: list[int] = []  # letters of each row
        counted: list[int] = []  # and tokens
        for progress in self.steps:
            rows, ended = committed(progress), (progress.counts >= progress.limits).tolist()
            told, counted = told or [0] * len(rows), counted or [0] * len(rows)
            if (made := [len(ids) for ids in rows]) == counted:
                continue  # the loop's last word, which adds the counts of the run
            gained = _gained(progress) if apart else [(0, 0)] * len(rows)
            found = []
            for row, ids in enumerate(rows):
                pieces = self._pieces(ids, ended[row], told[row], *gained[row])
                found.append(Said(pieces, made[row] - counted[row]))
                told[row] += len(found[-1].text)
            counted = made
            yield found

    def _pieces(
        self, ids: Tensor, ended: bool, told: int, taken: int, drafted: int
    ) -> list[tuple[str, bool]]:
        """The text of ``ids`` beyond its first ``told`` letters, parted where the last round's
        drafts begin and end.
        """
        whole = self.stops.cut(self.text(ids)) if ended else self.stops.sure(self.text(ids))
        first = len(ids) - taken
        ends = [len(self.text(ids[:n])) for n in (first, first + drafted)] if drafted else []
        bounds = [told, *(min(max(end, told), len(whole)) for end in ends), len(whole)]
        pieces = [(whole[a:b], i == 1 and drafted > 0) for i, (a, b) in enumerate(pairwise(bounds))]
        return [piece for piece in pieces if piece[0]]

    def certificate(self, end: Progress) -> Certificate:
        """What the run may claim at its ``end``."""
        if self.rule is None:
            return Certificate("exact", "plain decoding of the target", 0.0, self.settings)
        measured = float(end.measured)
        excess = float(end.excess) / measured if measured else None
        return of_rule(self.rule.name, self.rule.exact, excess).under(self.settings)


def _gained(progress: Progress) -> list[tuple[int, int]]:
    """By row, tokens of the last round and accepted drafts among them."""
    assert progress.gained is not None
    taken, kept = (part.tolist() for part in progress.gained)
    return [
        (t, min(t, k - 1)) for t, k in zip(taken, kept, strict=True)
    ]  # the last of all kept is the target's own


def end_tokens(model: Any) -> list[int]:
    """The end tokens of a transformers ``model``."""
    found = model.generation_config.eos_token_id
    found = model.config.get_text_config().eos_token_id if found is None else found
    return [found] if isinstance(found, int) else list(found or [])


def committed(progress: Progress) -> list[Tensor]:
    """The ids of each row so far."""
    return [
        ids[:n].clone() for ids, n in zip(progress.tokens, progress.counts.tolist(), strict=True)
    ]


class Pipeline:
    """What pipelines of questions and of text share.

    ``model``, ``tokenizer``, the ``drafters`` beside it, the ``plans`` made for method ``auto`` by
    what they depend on; ``planned``: the methods that ``auto`` chooses among, the best first.
    """

    model: Any
    tokenizer: Any
    drafters: Drafters
    plans: dict[Any, Plan]
    planned: ClassVar[tuple[str, ...]]

    def text(self, ids: Tensor | list[int]) -> str:
        """The text of ``ids``, without a character whose bytes have not all come."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).rstrip("\ufffd")

    def drafter(self, kind: str) -> Any:
        """What method ``kind`` drafts with, loaded from beside the model at first use; None where
        it needs nothing.
        """
        return self.drafters.get(kind)

    @classmethod
    def drafter_kind(cls, method: Any, drafter: Any = None) -> str:
        """The method whose ``drafter`` (a loaded one or a folder) ``method`` uses."""
        if method.name == methods.Draft.name:
            return str(method.drafter)
        if method.name != methods.Auto.name:
            return str(method.name)
        kind = said_by(drafter)
        return kind if kind in cls.planned else cls.planned[0]

    def chosen(self, method: Any, target: VLMTarget, prompt: VLMPrompt) -> tuple[Any, str]:
        """What runs for ``method``, and its name: ``auto`` plans for the best drafter there is."""
        if method.name == methods.Draft.name:
            return preset_of(method), method.name
        if method.name != methods.Auto.name:
            return method, method.name
        kinds = sorted(self.planned, key=lambda kind: kind not in self.drafters.given)
        kind = next((kind for kind in kinds if self.drafters.has(kind)), None)
        if kind is None:
            lacking = " or ".join(self.planned)
            return methods.AR(), f"auto: {methods.AR()}, for there is no {lacking} drafter"
        asked = methods.make(methods.GENERATE, kind)
        found = choose(target, self.drafter(kind), prompt, self.plans, asked)
        return found, f"auto: {found}"

    def ends(self) -> list[int]:
        """The model's end tokens."""
        return end_tokens(self.model)

    def _run(
        self,
        name: str,
        target: VLMTarget,
        prompt: VLMPrompt,
        options: Options,
        parts: tuple[Drafter, Rule] | None,
        asked: Prompts,
        play: Play = one_round,
    ) -> Run:
        """What was ``asked``, beginning with ``prompt``, to be answered with a drafter and a rule,
        or plainly without ``parts``; nothing runs yet. ``play`` is what plays a round.
        """
        generators, length = (
            options.generators(asked.count, self.model.device),
            options.max_new_tokens,
        )
        queue, uniforms = (
            asked.queue(target, generators),
            Uniforms(generators[: len(prompt.lengths)]),
        )
        stops, ends = (
            StopStrings(options.stops, self.text),
            EndTokens(self.ends(), self.model.device),
        )
        stop = all_of(ends, stops) if stops.texts else ends
        if parts is None and queue is None:
            steps = decode_plain(target, prompt, length, uniforms, stop=stop)
            return Run(name, steps, None, self.text, stops, options.processor.settings)
        drafter, rule = parts or (NoDrafts(), Recursive())
        inner = drafter.inner if isinstance(drafter, DeferredDrafter) else None
        if isinstance(inner, BatchingDrafter) and (
            queue is not None or not options.processor.greedy
        ):
            drafter = (
                inner  # a sample's uniforms must not depend on whether it is the first of its row
            )
        steps = decode(
            target, drafter, rule, prompt, length, uniforms, stop=stop, queue=queue, play=play
        )
        return Run(
            name,
            steps,
            rule if parts else None,
            self.text,
            stops,
            options.processor.settings,
            queue,
        )
