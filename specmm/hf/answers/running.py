"""Base of the question and text pipelines: options of a call, and the running of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import EosTokenCriteria, StoppingCriteriaList

from specmm import methods
from specmm.choose.contest import SHARE, Record
from specmm.core.decode import (
    EndTokens,
    Play,
    all_of,
    decode,
    decode_plain,
    one_round,
    without_drafts,
)
from specmm.core.derived import placed, version
from specmm.core.drafter import BatchingDrafter, DeferredDrafter, looks_ahead
from specmm.core.randomness import Uniforms
from specmm.core.turns import in_its_turn
from specmm.extending.outside import of_others, with_own
from specmm.extending.registry import Registry
from specmm.hf.answers.choosing import choose, kinds_of, record_of
from specmm.hf.answers.run import Chosen, PromptBatch, Run
from specmm.hf.answers.shared_rounds import KeptRounds, Key, SharedRounds
from specmm.hf.drafters.drafting import (
    KINDS,
    Assembly,
    Drafters,
    Method,
    assemble,
    load_drafter,
    method_of,
    network_of,
    preset_of,
)
from specmm.hf.loading.adapters import base_of, split, with_adapter
from specmm.hf.loading.placing import Placing, is_quantised, moved
from specmm.hf.loading.pretrained import find, use_tree_attention
from specmm.hf.models.static import CapturedTarget, StaticVLMTarget
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.options import IdleOption, Options, idle_options, own_settings
from specmm.hf.prompts.path_processors import Criteria, PathProcessor, matchers_of, processors_of
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.hf.prompts.stop_strings import Continuations, Ids, StopStrings
from specmm.loading.hardware import Place, contiguous_state, prepack
from specmm.programs.compiled import NotCompiled, prepare_compiler
from specmm.programs.graphs import GraphRound, captures, round_program
from specmm.structured import Constrained, Matchers, SpelledDrafts, Spelling, of_call
from specmm.zoo import Source

USUAL = 4  # tokens a round of drafts, by which "auto" counts rounds
WORTH = 24  # rounds for which a graph is captured where "auto" decides: capturing takes some


def check_continuous_batching(method: Method, batch_size: int) -> None:
    """Raise ``ValueError`` for a ``batch_size`` with a method whose rows cannot restart."""
    if batch_size and not method.can_refill:
        kinds = [methods.make(methods.GENERATE, name) for name in methods.GENERATE]
        others = ", ".join(kind.name for kind in kinds if kind.can_refill)
        raise ValueError(
            f"batch_size must be 0 for method {method.name!r}, which answers all at once; or use "
            f"one of {others}"
        )


class Pipeline:
    """Base class of the question and text pipelines.

    ``model``; the PEFT model around it if it has an ``adapter``, else None; ``tokenizer``; the
    ``drafters`` loaded for it; ``records`` of method ``auto``'s measurements; programs and CUDA
    graphs ``kept`` for later calls; ``registry``: the pipeline's methods; ``usual``: options whose
    default differs in this pipeline.
    """

    model: Any
    adapter: Any
    tokenizer: Any
    drafters: Drafters
    records: dict[Any, Record]
    kept: KeptRounds
    registry: ClassVar[Registry]
    usual: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self, model: Any, tokenizer: Any, method: Any, drafter: Any, folder: Path | None, name: str
    ) -> None:
        self.model, self.adapter = split(model)
        self.tokenizer = tokenizer
        self.name = name
        method, drafter = with_own(self.registry, method, drafter)
        self.method = methods.make(self.registry, method)
        drafters = {} if drafter is None else {self.drafter_kind(self.method, drafter): drafter}
        self.drafters = Drafters(folder, name, self.model, drafters)
        self.records = {}
        self.kept = KeptRounds()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: Any = None,
        drafter: Any = None,
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        device_map: str | dict[str, Any] | None = None,
        quantization_config: Any = None,
        variant: str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        download: bool = False,
    ) -> Self:
        """A pipeline of a folder, a pocket name or a hub id, on this machine's best device and in
        its fastest dtype unless they are given; ``dtype`` is another name of ``torch_dtype``.

        ``drafter`` is a loaded drafter, its folder, pocket name or hub id if it is not beside the
        model, or your own object (see :func:`specmm.register`). ``method`` None is the drafter's
        own method, and plain decoding without a drafter. A folder that PEFT wrote stands for its
        base with the adapter. ``device_map``, ``quantization_config`` and ``variant`` are passed to
        transformers, for the model alone; ``revision`` and ``cache_dir`` apply to hub ids;
        ``download`` agrees to fetch more than a gigabyte.
        """
        method, drafter = with_own(cls.registry, method, drafter)
        resolved = methods.make(cls.registry, method or cls.default_method(drafter))
        requested = Place.named(device, dtype, torch_dtype, device_map)
        base, adapter = base_of(name)
        folder = cls._folder_of(base, Source(None, revision, cache_dir, download))
        placing = Placing.of(folder, requested, device_map, quantization_config, variant)
        model, reader = cls.placed(folder, placing)
        prepack(use_tree_attention(model))
        if isinstance(drafter, str | Path):
            path = find(drafter)
            drafter = load_drafter(cls.drafter_kind(resolved, path), path, model)
        model = with_adapter(model, adapter)
        return cls(model, reader, resolved, drafter, folder, str(name))

    @classmethod
    def _folder_of(cls, name: str | Path, source: Source) -> Path:
        """The folder of the model ``name``, perhaps fetched as the ``source`` says."""
        raise NotImplementedError

    @classmethod
    def placed(cls, folder: Path, placing: Placing) -> tuple[Any, Any]:
        """The model in ``folder``, placed but not prepacked, and its tokenizer or processor."""
        model, reader = cls._loaded(folder, placing)
        return placing.put(model), reader

    @classmethod
    def _loaded(cls, folder: Path, placing: Placing) -> tuple[Any, Any]:
        """The model in ``folder``, and its tokenizer or processor."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self.model.dtype

    @in_its_turn(lambda pipe: pipe.model)
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move model and drafters to a device or dtype, as ``torch.nn.Module.to``.

        A dtype does not change complex numbers.
        """
        parsed = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = parsed[0] or self.model.device, parsed[1] or self.model.dtype
        if is_quantised(self.model):
            self.model.to(*args, **kwargs)
        else:
            moved(self.model, device, dtype)
        use_tree_attention(self.model)
        self.drafters.to(device, dtype)
        self.records.clear()
        self.kept.found.clear()
        return self

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder for ``from_pretrained``: the model, or the adapter in it, its tokenizer or
        processor, and the drafters beside it. A drafter passed in by the user is not written.
        """
        folder = Path(folder)
        if self.adapter is None:
            state = None if is_quantised(self.model) else contiguous_state(self.model)
            self.model.save_pretrained(folder, state_dict=state)
        else:
            self.adapter.save_pretrained(str(folder))
        self.reader.save_pretrained(folder)
        self.drafters.save(folder)

    @property
    def reader(self) -> Any:
        """The tokenizer, or the processor that holds it."""
        return self.tokenizer

    def options(self, call_options: Mapping[str, Any]) -> Options:
        """The ``call_options``, by default with the checkpoint's own repetition penalty, stop texts
        and settings that change all scores. Raises ``ValueError`` as :meth:`Options.of`.
        """
        options = Options.of(call_options, **own_settings(self.model), **self.usual)
        if idle := idle_options(call_options, options.method or self.method):
            problem = f"{idle[0]} changes nothing at temperature 0; give a temperature to sample"
            warnings.warn(problem, IdleOption, stacklevel=2)
        return options

    def constrain(
        self, target: VLMTarget, method: Method, options: Options, prompt: VLMPrompt
    ) -> None:
        """Give ``target`` the processor for ``options`` with a grammar or generate's settings."""
        compiled = None
        if options.grammar is not None:
            vocabulary = target.family.vocabulary
            compiled = of_call(options.grammar).compiled(self.tokenizer, vocabulary, self.ends())
        if options.more:
            ids = prompt.at_left()[0]["input_ids"]
            processors = processors_of(self.model, options, ids, compiled)
            sample = not options.processor.greedy
            settings = options.settings
            target.processor = processor = PathProcessor(processors, ids, sample, settings)
            processor.drafts = method.drafts
        elif compiled is not None:
            matchers = Matchers([compiled])
            target.processor = Constrained(options.processor, options.settings, matchers)

    @cached_property
    def texts(self) -> Continuations:
        """The decoder from ids to text after a prompt."""
        return Continuations(self.tokenizer)

    def text(self, ids: Ids) -> str:
        """The text of ``ids`` alone, without an incomplete last character."""
        return self.texts.decode(ids)

    def stops(self, options: Options) -> StopStrings:
        """The object that ends and decodes answers; raises ``ValueError`` for pictures."""
        if options.draw:
            raise ValueError("draw=True is for VQAPipeline and models that draw; leave it out")
        texts = self.texts
        decode_text = self.text if options.chat else texts.behind
        return StopStrings(options.stops, texts.whole, decode_text, texts.tidied)

    def drafter(self, kind: str) -> Any:
        """The drafter of method ``kind``, loaded at first use; None if it needs none."""
        return self.drafters.get(kind)

    def asked(self, options: Options, prompts: Any, images: Any = None, videos: Any = None) -> Any:
        """The inputs of a call, which can be sliced into batches: ``prompts`` (texts or lists of
        ids) with their pictures and videos, or the chats of ``options``.
        """
        raise NotImplementedError

    def prompt(self, asked: Any, options: Options) -> VLMPrompt:
        """The model's inputs for what was :meth:`asked`."""
        raise NotImplementedError

    def read(self, prompts: Any, options: Options) -> VLMPrompt:
        """``prompts``, lists of their ids, or the chats of ``options``, as the model reads them."""
        if isinstance(prompts, list) and prompts and isinstance(prompts[0], list):
            return VLMPrompt({**padded(prompts)}, options.max_new_tokens)
        return self.prompt(self.asked(options, prompts), options)

    def target(self, method: Method, options: Options) -> VLMTarget:
        """The model as the target of a call."""
        kind = CapturedTarget if self.captures(options) else VLMTarget
        return kind(self.model, options.processor, self.name)

    def _prepared(self, options: Options, prompts: Any, *shown: Any) -> tuple[VLMTarget, VLMPrompt]:
        """The model as a target for prompts, and the prompts as one batch of its inputs."""
        target = VLMTarget(self.model, options.processor, self.name)
        prompt = self.prompt(self.asked(options, prompts, *shown), options)
        target.check(prompt)
        return target, prompt.to(target.device, target.dtype)

    @classmethod
    def default_method(cls, drafter: object) -> str:
        """The method used when none is named: the one that uses the ``drafter`` (loaded, or the
        name of its folder), or plain decoding if there is no drafter.

        Raises ``ValueError`` for a drafter that no method of this pipeline uses.
        """
        if drafter is None:
            return str(methods.AR.name)
        if of_others(drafter):
            return str(methods.Draft.name)
        found = find(drafter) if isinstance(drafter, str | Path) else drafter
        return cls.drafter_kind(methods.Auto(), found)

    @classmethod
    def drafter_kind(cls, method: Any, drafter: object = None) -> str:
        """The method whose ``drafter`` (a loaded one or a folder) ``method`` uses."""
        if method.name == methods.Draft.name:
            return method.name if of_others(method.drafter) else str(method.drafter)
        if method.name != methods.Auto.name:
            return str(method.name)
        kind = method_of(drafter)
        if kind not in KINDS or kind not in cls.registry:
            got = drafter if isinstance(drafter, Path) else f"a {type(drafter).__name__}"
            raise ValueError(
                "drafter must be for one of the methods "
                f"{', '.join(name for name in KINDS if name in cls.registry)}, got {got} for "
                f"method {kind or 'none'}; give another, or name the method"
            )
        return kind

    def chosen(
        self, method: Any, target: VLMTarget, prompt: VLMPrompt, share: float = SHARE
    ) -> Chosen:
        """The method that runs for ``method``: ``auto`` chooses among all available drafters, in
        trials that take a ``share`` of answers.
        """
        if isinstance(method, methods.Composed) and method.name not in KINDS:
            return Chosen(preset_of(method), method.name)
        if method.name != methods.Auto.name:
            return Chosen(method, method.name)
        kinds = kinds_of(list(self.registry), self.drafters)
        parts = (self.drafters, target)
        record = record_of(kinds, *parts, prompt, self.records, self.tokenizer, share)
        choice = choose(record, *parts, prompt, self.tokenizer, share)
        return Chosen(choice, f"auto: {methods.label(choice)} ({record.reason()})", record)

    def captures(self, options: Options) -> bool:
        """Whether ``options`` ask for graphs or leave the choice, and the model is on a GPU.

        Answers with pictures are not captured: the allowed tokens depend on earlier ones.
        """
        return bool(options.compiled) and not options.draw and captures(self.model.device)

    def play_of(self, method: Method, options: Options) -> Callable[[], Play] | None:
        """A maker of the programs or graphs that play rounds of ``method``; None if they are
        played plainly.

        Raises ``ValueError`` for rounds that cannot be compiled or captured, if that is asked for.
        """
        asked = options.compiled is True
        if not self.captures(options):
            if not asked:
                return None
            check_compiled(method, options)
            prepare_compiler(self.model.device)
            return partial(round_program, self.model.device)
        if options.stops and asked:
            raise NotCompiled(
                "compiled=True finds only end tokens, got stop texts, which are looked for "
                "between rounds; leave one of them out"
            )
        rounds = options.max_new_tokens // (USUAL if method.drafts else 1)
        if method.captured and not options.stops and (asked or rounds >= WORTH):
            return partial(GraphRound, quiet=not asked)
        if asked:
            raise NotCompiled(
                "compiled=True on a GPU needs ar, msd, eagle3 or a block drafter's chains or "
                f"fixed trees, whose rounds need no decision of the host, got {method}"
            )
        return None

    def ends(self) -> list[int]:
        """The model's end tokens."""
        generation = self.model.generation_config
        eos = None if generation is None else generation.eos_token_id
        eos = self.model.config.get_text_config().eos_token_id if eos is None else eos
        return [eos] if isinstance(eos, int) else list(eos or [])

    def parts_of(self, method: Method, target: VLMTarget) -> Assembly | None:
        """The drafter and rule of ``method``; None for plain decoding."""
        if not method.drafts:
            return None
        return assemble(method, target, self.drafter(method.name), self.tokenizer)

    def rounds_of(self, method: Method, target: VLMTarget, options: Options) -> SharedRounds:
        """Rounds of ``method`` on ``target``, or the programs or graphs of an earlier call with the
        same method and options, which have their own target.
        """
        device = self.model.device
        make = self.play_of(method, options)
        key = () if make is None else self._key(method, options)
        # beside a stream that goes on: to compile another program takes longer than a call
        if make is None or (not captures(device) and self.kept.busy(key)):
            self.kept.make_room(device, taken=False, more=False)
            return SharedRounds(target, self.parts_of(method, target), one_round)
        rounds = self.kept.take(key)
        self.kept.make_room(device, taken=rounds is not None, more=rounds is None)
        if rounds is None:
            if not captures(device):
                target = StaticVLMTarget(self.model, options.processor, self.name)
            rounds = SharedRounds(target, self.parts_of(method, target), make())
            self.kept.keep(key, rounds)
        return rounds

    def _key(self, method: Method, options: Options) -> Key:
        """The key of such rounds, as long as their networks stay as they are."""
        as_now = placed if captures(self.model.device) else version
        drafter = network_of(self.drafter(method.name) if method.drafts else None)
        networks = None if drafter is None else as_now(drafter), as_now(self.model)
        return methods.filed(method), options.processor, options.compiled, *networks

    def _start(self, options: Options, what: Any, *shown: Any, share: float = SHARE) -> Run:
        """Prepare a run that answers ``what`` was asked; only trials of ``auto``, which take a
        ``share`` of answers, run already.
        """
        method = options.chosen(self.registry, self.method)
        target = self.target(method, options)
        asked = self.asked(options, what, *shown)
        check_continuous_batching(method, options.batch_size)

        def prepared(some: slice) -> VLMPrompt:
            return self.prompt(asked[some], options)

        prompts = PromptBatch(prepared, len(asked), options.batch_size)
        prompt = prompts.first(target)
        chosen = self.chosen(method, target, prompt, share)
        self.constrain(target, chosen.method, options, prompt)
        shared = self.rounds_of(chosen.method, target, options)
        target, parts, play = shared.target, shared.parts, shared.play
        name = chosen.name
        length = options.max_new_tokens
        device = self.model.device
        generators = options.generators(prompts.count, device)
        queue = prompts.queue(target, generators)
        uniforms = Uniforms(generators[: len(prompt.lengths)])
        stops = self.stops(options)
        ends = EndTokens(self.ends(), device)
        stop = all_of(ends, stops) if stops.texts else ends
        settings = options.settings | target.noise
        told: dict[str, Any] = dict(
            prompt_tokens=prompts.lengths, longest=length, ends=frozenset(self.ends())
        )
        if criteria := options.more.get("stopping_criteria"):
            criteria_list = StoppingCriteriaList([*criteria, EosTokenCriteria(self.ends())])
            stop = all_of(stop, Criteria(criteria_list, prompt.at_left()[0]["input_ids"]))
        if parts is None and queue is None and not isinstance(play, GraphRound):
            steps = chosen.timed(decode_plain(target, prompt, length, uniforms, stop=stop))
            return Run(name, shared.alone(steps), None, stops, settings, play=play, **told)
        drafter, rule = parts or without_drafts()
        inner = drafter.inner if isinstance(drafter, DeferredDrafter) else None
        sampled = queue is not None or not target.processor.greedy
        if sampled and isinstance(inner, BatchingDrafter):
            # a deferred drafter skips a row's first round, so that a sample that takes over a
            # row would use other uniforms than one that begins with it
            drafter = inner
        matchers = matchers_of(target.processor)
        if parts and matchers and (target.processor.greedy or not looks_ahead(rule)):
            spelling = Spelling.of(matchers, self.tokenizer)
            drafter = SpelledDrafts(drafter, spelling, lambda row: target.history.answer(row))
        steps = decode(
            target, drafter, rule, prompt, length, uniforms, stop=stop, queue=queue, play=play
        )
        if queue is None:  # with a queue, rows restart within a run
            steps = chosen.timed(steps)
        ran = (rule, drafter) if parts else (None, None)
        common = (queue, ran[1], play)
        return Run(name, shared.alone(steps), ran[0], stops, settings, *common, **told)


def check_compiled(method: Method, options: Options) -> None:
    """Raise ``ValueError`` for methods and options that compiled rounds do not serve."""
    if not method.static_shapes:
        raise NotCompiled(
            "compiled=True needs ar or a block drafter's chains or fixed trees, whose rounds "
            f"have equal shapes, got {method}"
        )
    if options.stops or options.batch_size:
        raise NotCompiled(
            "compiled=True looks for end tokens only and answers all at once: give no stop or "
            "batch_size"
        )
