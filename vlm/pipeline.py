"""``VQAPipeline``: answers about pictures from a transformers vision-language model, by any method, certified.

Shape letters: B questions of a batch, T tokens of an answer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm import methods
from specmm.autotune import Plan
from specmm.certificate import Certificate, of_rule
from specmm.decode import Progress, decode, decode_plain
from specmm.dtypes import choose_dtype
from specmm.processors import Processor
from specmm.randomness import Uniforms, sample_generators
from specmm.registry import unknown
from specmm.stats import Stats
from specmm.stopping import EndTokens
from specmm.verify import Rule
from specmm.vlm.asking import Pictures, Questions
from specmm.vlm.assemble import assemble
from specmm.vlm.loading import PLACES, find, load_drafter, load_model, load_processor
from specmm.vlm.prompt import VLMPrompt, on_device
from specmm.vlm.streaming import gains
from specmm.vlm.target import VLMTarget
from specmm.vlm.tuning import choose_method


@dataclass
class VQAOutput:
    """``answers`` [B], ``tokens`` [B] of ids (an end token included), ``stats``, ``certificate``, ``method``; of
    Speculative Verdict also the ``ruling``: who said what, and who was heard.
    """

    answers: list[str]
    tokens: list[Tensor]
    stats: Stats
    certificate: Certificate
    method: str
    ruling: Any = None


@dataclass(frozen=True)
class Options:
    """How to answer: ``temperature`` 0 is greedy, ``top_k`` 0, ``top_p`` 1 and ``repetition_penalty`` 1 are off.

    ``seed`` or ``generator`` (one for all, or one a question) make sampling repeatable. ``method`` None is the
    pipeline's. With ``chat`` off the questions are raw prompts with picture placeholders.
    """

    max_new_tokens: int = 64
    method: str | methods.VQAMethod | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    chat: bool = True

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """The options ``given`` by name; raises ``ValueError`` with a suggestion for one that is not known."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in given.keys() - set(known):
            raise unknown("option", name, known)
        return cls(**given)

    @property
    def processor(self) -> Processor:
        """From logits to laws."""
        return Processor(self.temperature, self.top_k, self.top_p, repetition_penalty=self.repetition_penalty)

    def uniforms(self, count: int, device: torch.device) -> Uniforms:
        """A stream for each of ``count`` questions."""
        if self.seed is not None and self.generator is not None:
            raise ValueError("give seed or generator, not both")
        seeded = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)
        return Uniforms(sample_generators(seeded or self.generator, count, device))


@dataclass
class _Run:
    """One batch being answered."""

    method: str
    steps: Iterator[Progress]
    rule: Rule | None

    def certificate(self, end: Progress) -> Certificate:
        """What the run may claim at its ``end``."""
        if self.rule is None:
            return Certificate("exact", "plain decoding of the target", 0.0)
        measured = float(end.measured)
        return of_rule(self.rule.name, self.rule.exact, float(end.excess) / measured if measured else None)


class VQAPipeline:
    """A vision-language model, its processor and its drafters behind one call.

    >>> pipe = VQAPipeline.from_pretrained("pocket/llava", method="msd")
    >>> pipe("street.png", "How many bags are there?", max_new_tokens=64).answers
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        method: str | methods.VQAMethod = "ar",
        drafter: Any = None,
        folder: Path | None = None,
        name: str = "vlm",
    ) -> None:
        self.model, self.processor, self.folder, self.name = model.eval(), processor, folder, name
        self.method = methods.resolve_vqa(method)
        self.drafters: dict[str, Any] = {} if drafter is None else {_drafter_kind(self.method): drafter}
        self.plans: dict[Any, Plan] = {}  # of method auto, by what they depend on

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | methods.VQAMethod = "ar",
        drafter: str | Path | Any = None,
        torch_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> VQAPipeline:
        """A pipeline of a folder, a pocket name or a hub id; the dtype defaults to this machine's fastest.

        ``drafter`` is a loaded one, or the folder, pocket name or hub id of the method's drafter where it is not
        beside the model.
        """
        resolved, folder = methods.resolve_vqa(method), find(name)
        model = load_model(folder, torch_dtype)
        dtype = torch_dtype or choose_dtype(sum(p.numel() for p in model.parameters()))
        model = model.to(device, dtype)
        if isinstance(drafter, str | Path):
            drafter = load_drafter(_drafter_kind(resolved), find(drafter), model)
        return cls(model, load_processor(folder), resolved, drafter, folder, str(name))

    def __call__(
        self,
        images: Pictures | Sequence[Pictures],
        questions: str | Sequence[str],
        streamer: Any = None,
        **options: Any,
    ) -> VQAOutput:
        """Answer one question about a picture, several or none, or a list of questions about a list of those.

        ``options`` are those of :class:`Options`. An answer depends on its own random stream, not on the batch.
        ``streamer`` is told a single answer's ids, as transformers' streamers are. Raises ``ValueError`` for pictures,
        questions, options and methods that do not fit.
        """
        given = Options.of(options)
        if isinstance(method := self._method(given), methods.Verdict):
            return self._rule(method, images, questions, options)
        run = self._start(images, questions, given)
        *_, (end, _) = gains(run.steps, streamer)
        tokens = _committed(end)
        answers = [self.text(ids).strip() for ids in tokens]
        return VQAOutput(answers, tokens, end.stats, run.certificate(end), run.method)

    def stream(
        self, images: Pictures | Sequence[Pictures], questions: str | Sequence[str], **options: Any
    ) -> Iterator[list[str]]:
        """The new text of every answer after each round; joined they are the answers. Options as for a call."""
        run = self._start(images, questions, Options.of(options))
        said: list[str] = []
        for progress in run.steps:
            whole = [self.text(ids) for ids in _committed(progress)]
            yield [text[len(old) :] for text, old in zip(whole, said or [""] * len(whole), strict=True)]
            said = whole

    def text(self, ids: Tensor | list[int]) -> str:
        """The text of ``ids``, without a character whose bytes have not all come."""
        return str(self.processor.tokenizer.decode(ids, skip_special_tokens=True)).rstrip("\ufffd")

    def _method(self, options: Options) -> methods.VQAMethod:
        return self.method if options.method is None else methods.resolve_vqa(options.method)

    def _rule(self, method: methods.Verdict, images: Any, question: Any, options: dict[str, Any]) -> VQAOutput:
        """Speculative Verdict by the experts (pipelines) this pipeline was given, this model being the judge."""
        from specmm.vlm.verdict import SpeculativeVerdict

        if not isinstance(question, str):
            raise ValueError(f"method 'verdict' takes one question at a time, got {len(question)}")
        judge, experts = VQAPipeline(self.model, self.processor, name=self.name), self.drafter(method.name)
        asked = {k: v for k, v in options.items() if k != "method"}
        begin = time.perf_counter()
        ruling = SpeculativeVerdict(experts, judge, hear=min(method.keep, len(experts)))(images, question, **asked)
        ids = torch.tensor(self.processor.tokenizer.encode(ruling.answer, add_special_tokens=False))
        stats = Stats(tokens=len(ids), rounds=len(ids), seconds=time.perf_counter() - begin)
        claim = Certificate("heuristic", "the answer is the verdict model's once it has heard the others")
        return VQAOutput([ruling.answer], [ids], stats, claim, method.name, ruling)

    def _start(self, images: Any, questions: Any, options: Options) -> _Run:
        """Prepare a batch; nothing runs before the first round is asked for."""
        method = self._method(options)
        target = VLMTarget(self.model, options.processor, self.name)
        asked = Questions.of(images, questions, options.chat)
        inputs = on_device(asked.inputs(self.processor), target.device, self.model.dtype)
        prompt = VLMPrompt(inputs, options.max_new_tokens, asked)
        target.check(prompt)
        uniforms = options.uniforms(len(asked.texts), target.device)
        stop, length = EndTokens(self.ends(), target.device), options.max_new_tokens
        name = method.name
        if isinstance(method, methods.Auto):
            method = choose_method(target, self.drafter(_drafter_kind(method)), prompt, self.plans)
            name = f"auto: {method}"
        if isinstance(method, methods.AR):
            return _Run(name, decode_plain(target, prompt, length, uniforms, stop=stop), None)
        drafter, rule = assemble(method, target, self.drafter(method.name), self.processor.tokenizer)
        return _Run(name, decode(target, drafter, rule, prompt, length, uniforms, stop=stop), rule)

    def drafter(self, kind: str) -> Any:
        """What method ``kind`` drafts with, loaded from beside the model at first use; None where it needs nothing."""
        if kind in PLACES and kind not in self.drafters:
            folder = None if self.folder is None else self.folder / "drafters" / PLACES[kind]
            if folder is None or not folder.is_dir():
                raise ValueError(
                    f"method {kind!r} needs a drafter and {self.name} has none in drafters/{PLACES[kind]}; "
                    "give one with from_pretrained(…, drafter=…) or use prompt-lookup or ar"
                )
            self.drafters[kind] = load_drafter(kind, folder, self.model)
        return self.drafters.get(kind)

    def ends(self) -> list[int]:
        """The model's end tokens."""
        found = self.model.generation_config.eos_token_id
        found = self.model.config.get_text_config().eos_token_id if found is None else found
        return [found] if isinstance(found, int) else list(found or [])


def _committed(progress: Progress) -> list[Tensor]:
    """The ids of each row so far."""
    return [ids[:n].clone() for ids, n in zip(progress.tokens, progress.counts.tolist(), strict=True)]


def _drafter_kind(method: methods.VQAMethod) -> str:
    """The method whose drafter ``method`` uses: auto plans trees for MSD's."""
    return methods.MSD.name if isinstance(method, methods.Auto) else method.name
