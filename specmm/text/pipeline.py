"""``TextPipeline``: text continued by a transformers causal language model, by any method,
certified.

Shape letters: B prompts of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm import methods
from specmm.autotune import Plan
from specmm.certificate import Certificate
from specmm.compiled import CompiledRound, prepare_compiler
from specmm.decode import Progress
from specmm.dtypes import choose_dtype
from specmm.hf.attention import use_tree_attention
from specmm.hf.drafting import Drafters, assemble, load_drafter
from specmm.hf.loading import find, find_target, load_target
from specmm.hf.parts import Assembly
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.running import Options, Pipeline, Prompts, Run, Said, check_continuous_batching
from specmm.hf.static import StaticVLMTarget
from specmm.hf.streaming import ending
from specmm.hf.target import VLMTarget
from specmm.prepacked import lay_weights
from specmm.processors import Processor
from specmm.stats import Stats
from specmm.turns import in_its_turn, turns_of


@dataclass
class TextOutput:
    """``texts`` [B] after the prompts, ``tokens`` [B] of ids (an end token included), ``stats``,
    ``certificate``, ``method``; of DiffuSpec also the ``trace`` of each row's controller: (drafted,
    accepted) by round.
    """

    texts: list[str]
    tokens: list[Tensor]
    stats: Stats
    certificate: Certificate
    method: str
    trace: list[list[tuple[int, int]]] = field(default_factory=list)


@dataclass
class Compiled:
    """A method's ``target`` and ``parts`` (None: plain decoding) with the programs that ``play``
    keeps of them.
    """

    target: StaticVLMTarget
    parts: Assembly | None
    play: CompiledRound
    drafter: Any  # what ``parts`` draft with
    busy: bool = False  # with a stream that has not ended: it owns the cache

    def alone(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """``steps`` of a run, which is not ``busy`` any more when they have ended or nobody wants
        the rest.
        """
        self.busy = True
        try:
            yield from steps
        finally:
            self.busy = False


class TextPipeline(Pipeline):
    """A causal language model, its tokenizer and its drafters after one call.

    Several threads may share one: calls are answered in the order they come, and streams take turns
    round by round.

    >>> pipe = TextPipeline.from_pretrained("pocket/coder", method="deer")
    >>> pipe("def add(a, b):", max_new_tokens=64).texts
    """

    planned = ("block", "deer")  # on the target's states; reading the text

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        method: str | methods.TextMethod = "ar",
        drafter: Any = None,
        folder: Path | None = None,
        name: str = "text",
    ) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.method: methods.TextMethod = methods.make(methods.TEXT, method)
        given = {} if drafter is None else {self.drafter_kind(self.method, drafter): drafter}
        self.drafters = Drafters(folder, name, model, given)
        self.plans: dict[Any, Plan] = {}
        self.made: dict[tuple[methods.TextMethod, Processor], Compiled] = {}

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | methods.TextMethod = "ar",
        drafter: str | Path | Any = None,
        torch_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> TextPipeline:
        """A pipeline of a folder, a pocket name or a hub id; the dtype defaults to this machine's
        fastest.

        ``drafter`` is a loaded one, or the folder, pocket name or hub id of the method's drafter
        where it is not beside the model.
        """
        resolved, folder = methods.make(methods.TEXT, method), find_target(name)
        model, tokenizer = load_target(folder, torch_dtype)
        model = model.to(
            device,
            torch_dtype or choose_dtype(sum(p.numel() for p in model.parameters()), device=device),
        )
        lay_weights(use_tree_attention(model))
        if isinstance(drafter, str | Path):
            place = find(drafter)
            drafter = load_drafter(cls.drafter_kind(resolved, place), place, model)
        return cls(model, tokenizer, resolved, drafter, folder, str(name))

    @in_its_turn(lambda pipe: pipe.model)
    def __call__(
        self, prompts: str | Sequence[str], streamer: Any = None, **options: Any
    ) -> TextOutput:
        """Continue one prompt or a batch of them, whatever their lengths.

        ``options`` are those of :class:`specmm.hf.running.Options`; ``chat`` is off unless given. A
        text depends on its own random stream, not on the batch, but for auto's plan and, where
        uniforms are drawn, blocks cut by ``sure``. ``streamer`` is told a single text's ids, as
        transformers' are, but not the prompt's: leave its ``skip_prompt`` off. Raises
        ``ValueError`` for prompts, options and methods that do not fit.
        """
        with ending(streamer):
            run, drafter = self._start(prompts, Options.of(options, chat=False))
            texts, tokens, end = run.finish(streamer)
        trace = [row.trace for row in getattr(drafter, "rows", []) if hasattr(row, "trace")]
        return TextOutput(texts, tokens, end.stats, run.certificate(end), run.method, trace)

    def stream(self, prompts: str | Sequence[str], **options: Any) -> Iterator[list[str]]:
        """The new text of every row after each round; joined they are the texts. Options as for a
        call.
        """
        for round_ in turns_of(self.model).each(self._rounds(prompts, options, False)):
            yield [said.text for said in round_]

    def rounds(self, prompts: str | Sequence[str], **options: Any) -> Iterator[list[Said]]:
        """As ``stream``, with the tokens of each round, and its accepted drafts set apart."""
        yield from turns_of(self.model).each(self._rounds(prompts, options, True))

    def _rounds(
        self, prompts: str | Sequence[str], options: dict[str, Any], apart: bool
    ) -> Iterator[list[Said]]:
        yield from self._start(prompts, Options.of(options, chat=False))[0].rounds(apart)

    def encode(self, prompts: str | Sequence[str], chat: bool = False) -> list[list[int]]:
        """Ids of each prompt, with ``chat`` in the model's template. Raises ``ValueError`` for an
        empty prompt.
        """
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        if not given or not all(given):
            raise ValueError("prompt must not be empty, got nothing to continue; give some text")
        if not chat:
            return [self.tokenizer(text)["input_ids"] for text in given]
        return [
            self.tokenizer(self.templated(text), add_special_tokens=False)["input_ids"]
            for text in given
        ]

    def templated(self, question: str) -> str:
        """``question`` in the model's chat template; raises ``ValueError`` where it has none."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{self.name} must have a chat template for chat, got none; leave chat out"
            )
        said = [{"role": "user", "content": question}]
        return str(
            self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        )

    def _start(self, prompts: str | Sequence[str], options: Options) -> tuple[Run, Any]:
        """Prepare a batch; nothing runs before the first round is asked for. The drafter, if any,
        comes with it.
        """
        method = (
            self.method if options.method is None else methods.make(methods.TEXT, options.method)
        )
        target = VLMTarget(self.model, options.processor, self.name)
        check_continuous_batching(method, options.batch_size)
        ids = self.encode(prompts, options.chat)
        room, cpu = options.max_new_tokens, torch.device("cpu")
        asked = Prompts(
            lambda some: VLMPrompt(padded(ids[some], cpu), room), len(ids), options.batch_size
        )
        prompt = asked.first(target)
        method, name = self.chosen(method, target, prompt)
        if options.compiled and not (made := self._compiled(method, options)).busy:
            run = self._run(name, made.target, prompt, options, made.parts, asked, made.play)
            return replace(run, steps=made.alone(run.steps)), None
        if not method.drafts:
            return self._run(name, target, prompt, options, None, asked), None
        parts = assemble(method, target, self.drafter(method.name), self.tokenizer)
        return self._run(name, target, prompt, options, parts, asked), parts.drafter

    def _compiled(self, method: methods.TextMethod, options: Options) -> Compiled:
        """What plays ``method``'s compiled rounds; calls with the same options share it."""
        check_compiled(method, options)
        prepare_compiler(self.model.device)
        plain, key = not method.drafts, (method, options.processor)
        drafter, made = None if plain else self.drafter(method.name), self.made.get(key)
        if made is None or made.target.model is not self.model or made.drafter is not drafter:
            target = StaticVLMTarget(self.model, options.processor, self.name)
            parts = None if plain else assemble(method, target, drafter, self.tokenizer)
            made = self.made[key] = Compiled(
                target, parts, CompiledRound(True, target.device), drafter
            )
        return made


def check_compiled(method: methods.TextMethod, options: Options) -> None:
    """Raise ``ValueError`` for what compiled rounds do not serve."""
    if not method.static_shapes:
        raise ValueError(
            f"compiled=True needs ar or a block drafter's chains or fixed trees (rounds all alike), got {method}"
        )
    if options.stops or options.batch_size:
        raise ValueError(
            "compiled=True looks for end tokens only and answers all at once: give no stop or batch_size"
        )
