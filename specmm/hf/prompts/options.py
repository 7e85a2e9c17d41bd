"""Options of a call of a pipeline of questions or of text, and how ``help`` lists them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import torch

from specmm import methods
from specmm.choose.when_compiled import Compiled, check_compiled
from specmm.core.processors import Processor
from specmm.core.randomness import sample_generators
from specmm.extending.kinds import check_whole, texts_of
from specmm.extending.registry import OPTION, Registry, unknown
from specmm.hf.drafters.drafting import KINDS
from specmm.hf.prompts.messages import chats_of
from specmm.programs.compiled import NotCompiled
from specmm.structured import of_call

F = TypeVar("F", bound=Callable[..., Any])
OF_GENERATE = {  # names that generate's users look for, and what to do instead
    "do_sample": "give temperature, which is 0 for greedy and above 0 to sample",
    "eos_token_id": "give stop, or set model.generation_config.eos_token_id",
    "max_length": "give max_new_tokens, which leaves the prompt out",
    "max_time": "give stopping_criteria=[transformers.MaxTimeCriteria(seconds)]",
    "num_beams": "rounds of drafts have no beams, leave it out",
    "num_return_sequences": "give a list with the prompt so many times",
    "n": "give a list with the prompt so many times",
    "stop_strings": "give stop",
    "top_h": "give logits_processor=[transformers.TopHLogitsWarper(top_h)]",
    "return_dict": "outputs always have fields, leave it out",
}


OWN = ("temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens")  # generate's, too
# of what is sampled
FILTERS = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
CONFIG = "generation_config"


class IdleOption(UserWarning):
    """Warning about a sampling option that has no effect, because the call is greedy."""


class ScoreOptions(TypedDict, total=False):
    """Further settings of transformers' generate that change scores."""

    min_p: Any
    typical_p: Any
    epsilon_cutoff: Any
    eta_cutoff: Any
    no_repeat_ngram_size: Any
    encoder_repetition_penalty: Any
    encoder_no_repeat_ngram_size: Any
    bad_words_ids: Any
    sequence_bias: Any
    suppress_tokens: Any
    begin_suppress_tokens: Any
    forced_bos_token_id: Any
    forced_eos_token_id: Any
    exponential_decay_length_penalty: Any
    min_length: Any
    min_new_tokens: Any
    renormalize_logits: Any
    remove_invalid_values: Any
    watermarking_config: Any


class GenerateOptions(ScoreOptions, total=False):
    """Further arguments of generate, and two of OpenAI's protocol."""

    presence_penalty: float
    frequency_penalty: float
    logits_processor: Any
    prefix_allowed_tokens_fn: Any
    stopping_criteria: Any
    generation_config: Any


SCORES = tuple(ScoreOptions.__annotations__)
GUARDS = ("renormalize_logits", "remove_invalid_values")
ALWAYS = tuple(name for name in SCORES if name not in (*FILTERS, *GUARDS))  # sampled or not
OTHERS = tuple(GenerateOptions.__annotations__)


class CallOptions(GenerateOptions, total=False):
    """The options of a call for type checkers; see :class:`Options` for their meanings."""

    max_new_tokens: int
    method: Any
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int | Sequence[int] | None
    generator: torch.Generator | Sequence[torch.Generator] | None
    chat: bool
    stop: str | Sequence[str]
    batch_size: int
    compiled: Compiled
    draw: bool
    drafter: Any
    tree: Any
    rule: Any
    grammar: Any
    messages: Any
    fps: float | None


@dataclass(frozen=True)
class Options:
    """How to answer: ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and
    ``repetition_penalty`` 1 are off. The penalty defaults to the checkpoint's
    ``generation_config``, as in generate.

    ``seed`` or ``generator`` (one a row, or the first row's: seeds of the others follow) make
    sampling repeatable. ``method`` None is the pipeline's. ``chat`` puts the prompt into the
    model's chat template; without it the prompt is raw. An answer ends before the first of the
    texts ``stop``. ``batch_size`` rows are answered at a time, and with methods that can refill a
    finished row takes the next prompt; 0 answers all at once. ``compiled`` runs rounds of text, and
    plain steps of answers about pictures, as programs of ``torch.compile``, which are made at the
    first call of a method, batch and length; "auto" makes them once they pay
    (:mod:`specmm.choose.when_compiled`), and never for streams. On a GPU rounds, also of questions
    about pictures, are CUDA graphs (:mod:`specmm.programs.graphs`). ``drafter``, ``tree`` and
    ``rule`` replace the method's: names, or your own objects (see :func:`specmm.register`). With
    ``draw`` a model that can draw puts pictures into its answers. Answers follow a ``grammar``
    (:mod:`specmm.structured`; a dict is a JSON schema).

    ``messages`` are a chat or a list of chats (:mod:`specmm.hf.prompts.messages`), given instead of
    prompts, pictures and videos: turns, system prompts and parts with pictures and videos. ``fps``
    is the rate of videos given as frames.

    ``more`` are settings of transformers' generate, given by name like all options: settings that
    change scores (``min_p``, ``no_repeat_ngram_size`` and the like; also ``presence_penalty`` and
    ``frequency_penalty``, see :class:`specmm.hf.prompts.penalties.Penalties`),
    ``logits_processor``, ``prefix_allowed_tokens_fn``, ``stopping_criteria`` and a
    ``generation_config``. With them all rows are answered at once, and never compiled.
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
    compiled: Compiled = False
    draw: bool = False
    drafter: Any = None
    tree: Any = None
    rule: Any = None
    grammar: Any = None
    messages: Any = None
    fps: float | None = None
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, call_options: Mapping[str, Any], **defaults: Any) -> Options:
        """The options of a call by name; raises ``ValueError`` for an unknown one."""
        call_options = _unpacked(call_options)
        names = [f.name for f in dataclasses.fields(cls) if f.name != "more"]
        more = {**defaults.pop("more", {})}
        for name in call_options.keys() - set(names):
            if name in OF_GENERATE:
                raise ValueError(f"unknown option {name!r} of generate; {OF_GENERATE[name]}")
            if name not in OTHERS:
                raise unknown("option", name, [*names, *OTHERS], OPTION)
            more[name] = call_options[name]
        known_options = {name: value for name, value in call_options.items() if name in names}
        more = {name: value for name, value in more.items() if value}  # 0 and the like are off
        options = cls(**{**defaults, **known_options}, more=more)
        if options.grammar is not None or more:
            options = options._constrained()
        if options.messages is not None:
            options = dataclasses.replace(options, messages=chats_of(options.messages), chat=True)
        check_whole(max_new_tokens=options.max_new_tokens, batch_size=options.batch_size)
        check_compiled(options.compiled)
        if options.batch_size < 0:
            raise ValueError(f"batch_size must be at least 0, got {options.batch_size}")
        return options

    def _constrained(self) -> Options:
        """A copy without the options that generate's settings and grammars rule out."""
        names = [*self.more, *(["grammar"] if self.grammar is not None else [])]
        if self.compiled is True:
            raise NotCompiled(
                f"compiled=True takes {', '.join(OWN[:-1])}, got {names[0]}; leave one out"
            )
        if self.draw:
            raise ValueError(f"draw=True takes no {names[0]}; leave one out")
        if self.more and self.batch_size:
            raise ValueError(
                f"batch_size must be 0 with {names[0]}, got {self.batch_size}; leave one out"
            )
        return dataclasses.replace(self, compiled=False)

    def chosen(self, registry: Registry, usual: Any) -> Any:
        """The method of these options or the ``usual`` one, with their drafter, tree and rule."""
        method = usual if self.method is None else self.method
        return methods.by_hand(registry, method, self.drafter, self.tree, self.rule)

    @property
    def processor(self) -> Processor:
        """The processor from logits to distributions."""
        penalty = self.repetition_penalty
        return Processor(self.temperature, self.top_k, self.top_p, repetition_penalty=penalty)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in use, for certificates."""
        settings: dict[str, Any] = dict(self.processor.settings)
        if self.grammar is not None:
            settings["grammar"] = str(of_call(self.grammar))
        if self.more:
            settings.pop("top_p_ties", None)  # generate's own processors are asked
        idle = FILTERS if self.processor.greedy else ()
        return settings | {name: _short(one) for name, one in self.more.items() if name not in idle}

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer; raises ``ValueError`` for an empty one."""
        return stop_texts(self.stop)

    def generators(self, count: int, device: torch.device) -> list[torch.Generator]:
        """A generator for each of ``count`` rows; ``ValueError`` for another number of seeds."""
        return sample_generators(count, device, self.generator, self.seed)


def own_settings(model: Any) -> dict[str, Any]:
    """The options in the ``model``'s ``generation_config`` that apply to greedy and sampled
    answers: repetition penalty, stop texts, and ``more``.
    """
    config = model.generation_config
    penalty = getattr(config, "repetition_penalty", None)
    more = {name: getattr(config, name, None) for name in ALWAYS}
    return dict(
        repetition_penalty=1.0 if penalty is None else float(penalty),
        stop=tuple(texts_of("stop", getattr(config, "stop_strings", None) or ())),
        more={name: value for name, value in more.items() if value},
    )


def idle_options(call_options: Mapping[str, Any], method: Any) -> list[str]:
    """Names of ``call_options`` that have no effect because decoding is greedy. A ``method`` of
    several models still uses its seed, to break ties.
    """
    call_options = _unpacked(call_options)
    if call_options.get("temperature"):
        return []
    kind = KINDS.get(getattr(method, "name", method))
    seeds = () if kind is not None and kind.judge else ("seed", "generator")
    drawn = [name for name in seeds if call_options.get(name) is not None]
    return [name for name in FILTERS if call_options.get(name) not in (None, 0, 1)] + drawn


def _short(value: Any) -> Any:
    """A setting as a short text."""
    if isinstance(value, bool | int | float | str):
        return value
    items = value if isinstance(value, list | tuple) else [value]
    named = (getattr(x, "__name__", type(x).__name__) for x in items if not isinstance(x, int))
    return "+".join(dict.fromkeys(named)) or f"of {len(items)}"


def _unpacked(call_options: Mapping[str, Any]) -> dict[str, Any]:
    """``call_options`` with a ``generation_config`` among them replaced by its settings."""
    unpacked = dict(call_options)
    config = unpacked.pop(CONFIG, None)
    if config is None:
        return unpacked
    settings = config if isinstance(config, Mapping) else config.to_diff_dict()
    usual = {name: settings[name] for name in (*OWN, *SCORES) if settings.get(name) is not None}
    if settings.get("do_sample") is not True:
        usual["temperature"] = 0.0
    elif "temperature" not in usual:
        usual["temperature"] = 1.0
    if settings.get("stop_strings"):
        usual["stop"] = settings["stop_strings"]
    return usual | unpacked


def stop_texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings as a tuple; raises ``ValueError`` for an empty one."""
    texts = tuple(texts_of("stop", stop))
    if not all(texts):
        raise ValueError("stop must be non-empty texts, got an empty one; leave it out")
    return texts


def lists_options(**defaults: object) -> Callable[[F], F]:
    """Decorate a function that takes a call's ``**options``, so that ``help`` lists them.

    ``defaults`` are defaults that differ for this function.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named_only = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        listed = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(field.name, field.default),
                annotation=field.type,
            )
            for field in dataclasses.fields(Options)
            if field.name != "more"
        ]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any)
            for name in OTHERS
        ]
        function.__signature__ = signature.replace(parameters=[*named_only, *listed, *more])  # type: ignore[attr-defined]
        return function

    return decorate
