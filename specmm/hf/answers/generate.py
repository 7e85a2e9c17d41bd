"""``specmm.custom_generate``: the same acceleration from inside ``model.generate(…,
custom_generate=…)``.

Shape letters: B batch, L padded prompt length, N tree nodes, T new tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from specmm import methods
from specmm.choose.contest import Record
from specmm.core.decode import Progress, decode, decode_plain
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms, sample_generators
from specmm.core.stats import Certificate, Stats
from specmm.core.turns import in_its_turn
from specmm.extending.kinds import shown
from specmm.extending.outside import of_others, with_own
from specmm.extending.registry import maker_of
from specmm.hf.answers.choosing import choose, record_of
from specmm.hf.answers.given_cache import GivenCache
from specmm.hf.answers.run import ending, last_of
from specmm.hf.drafters.drafting import (
    Assembly,
    Drafters,
    Method,
    assemble,
    load_drafter,
    method_of,
    preset_of,
)
from specmm.hf.loading.pretrained import find
from specmm.hf.models.families import CACHES
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.options import FILTERS, SCORES, stop_texts
from specmm.hf.prompts.path_processors import Criteria, PathProcessor
from specmm.hf.prompts.prompt import POSITIONS, VLMPrompt
from specmm.verify.claims import run_claim

NOT_INPUTS = {*CACHES, "logits_to_keep", "use_cache", "cache_position"}
NOT_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
PLAIN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
OTHER_MODES = (
    *("penalty_alpha", "dola_layers", "constraints", "force_words_ids"),
    "assistant_early_exit",
)
INSTEAD = {  # advice for options by which generate does not decode token by token
    "assistant_model": "give custom_generate(drafter=…, method='text-draft')",
    "prompt_lookup_num_tokens": "give custom_generate(method='prompt-lookup')",
    "use_mtp": "give custom_generate(method='mtp')",
} | dict.fromkeys(OTHER_MODES, "call generate without custom_generate")
PICTURES = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")  # in a prompt


def custom_generate(
    drafter: object = None,
    method: str | Method | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    generator: torch.Generator | None = None,
    stop: str | Sequence[str] = (),
) -> Generating:
    """A callable for transformers' ``model.generate(**inputs, custom_generate=…)``, of any batch.

    Any logits processors and stopping criteria apply, to each path of a tree. A ``streamer`` may be
    given here or to generate, for one row; it is ended when a run fails, too. ``tokenizer``, which
    generate does not pass on, is the target's: for text drafters with another one and for ``stop``,
    texts that end a row as generate's ``stop_strings`` would. Sampling draws from ``generator``,
    never from torch's global state. Several threads may share a model. ``drafter`` is a loaded
    drafter, its folder (read at the first call), or your own object (see :func:`specmm.register`).
    ``last`` holds the last call's method, statistics and certificate. ``method`` None is the
    ``drafter``'s own method, or suffix decoding without a drafter; ``auto`` chooses between that
    method and plain decoding. Raises ``ValueError`` for settings under which generate does not
    decode token by token (beams, an assistant, contrastive search and the like), for guidance,
    processors whose memory cannot be copied, ``inputs_embeds``, positions other than the tokens'
    own, pictures read in chunks, dictionaries with scores, logits, attentions or hidden states, and
    ``stop`` without a tokenizer.

    A ``cache`` (``past_key_values``) of one row is continued, and filled as by generate, for the
    next turn of a chat; ``ValueError`` for a cache whose layers do not keep all tokens, for
    pictures after its tokens, and for drafters that read states of the whole prompt.
    """
    if drafter is not None and of_others(drafter):
        method, drafter = with_own(methods.GENERATE, method, drafter)
    drafter = find(drafter) if isinstance(drafter, str | Path) else drafter
    resolved: Method = methods.make(methods.GENERATE, method or _method_for(drafter))
    records: dict[Any, Record] = {}
    kind = _method_for(drafter) if resolved.name == methods.Auto.name else ""
    default = resolved.drafter if isinstance(resolved, methods.Draft) else resolved.name
    drafter_of = _drafters(drafter, kind or default)
    ends = _stop_criteria(stop, tokenizer)

    @in_its_turn(lambda model: model)
    def run(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        caller = _locals_of_generate()
        watcher = _one_streamer(streamer, caller.get("streamer"))
        with ending(watcher):
            _check(generation_config, caller.get("assistant_model"), model_kwargs)
            if streamer is not None and len(input_ids) == 1:
                streamer.put(input_ids.cpu())  # as generate does: streamers may skip the prompt
            positions_given = bool(caller.get("kwargs_has_position_ids"))
            cache = GivenCache(model_kwargs)
            if cache.tokens and not positions_given:  # generate's own begin where the cache ends
                model_kwargs.pop(POSITIONS, None)
            inputs = _inputs(model_kwargs, input_ids, positions_given) | {"input_ids": input_ids}
            sampled = bool(generation_config.do_sample)
            processor = PathProcessor(logits_processor, input_ids, sampled)
            target_with = cache.target(model)
            target = target_with(processor)
            prompt = VLMPrompt(inputs, generation_config.max_length - input_ids.shape[1])
            criteria = Criteria(StoppingCriteriaList([*stopping_criteria, *ends]), input_ids)
            parts = None
            chosen, record = choice(target_with, prompt, sampled)
            processor.drafts = chosen.drafts
            if chosen.drafts:
                parts = assemble(chosen, target, drafter_of(model), tokenizer)
            uniforms = Uniforms(sample_generators(len(input_ids), target.device, generator))
            steps = _steps(target, parts, prompt, uniforms, criteria)
            end = last_of(steps if record is None else record.called(chosen, steps), watcher)
            rule, drafts_with = (parts.rule, parts.drafter) if parts else (None, None)
            claim = run_claim(rule, end, drafts_with)
            settings = _settings(generation_config, logits_processor)
            claim = claim.under(settings | target.noise)
            generating.last = GenerateRun(str(chosen), end.stats, claim)
            cache.keep(target, end)
            return _padded_output(input_ids, end, criteria.width, generation_config, cache)

    def choice(
        target_with: Callable[[Processor], VLMTarget], prompt: VLMPrompt, sampled: bool
    ) -> tuple[Method, Record | None]:
        if not kind:
            preset = preset_of(resolved) if isinstance(resolved, methods.Composed) else resolved
            return preset, None
        plain = target_with(Processor(float(sampled)))  # processors may keep state
        own_drafter = {kind: drafter_of(plain.model)}
        parts = (Drafters(None, plain.name, plain.model, own_drafter), plain)
        record = record_of([kind], *parts, prompt, records, tokenizer)
        return choose(record, *parts, prompt, tokenizer), record

    generating = Generating(run)
    return generating


@dataclass(frozen=True)
class GenerateRun:
    """Report on a call of generate: the ``method`` that ran, its ``stats``, its ``certificate``."""

    method: str
    stats: Stats
    certificate: Certificate


@dataclass
class Generating:
    """The callable for generate; ``last`` reports its last call (in any thread)."""

    run: Callable[..., Any]
    last: GenerateRun | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :func:`custom_generate`."""
        return self.run(*args, **kwargs)


def _settings(config: GenerationConfig, processors: LogitsProcessorList) -> dict[str, object]:
    """Generate's settings for certificates: those of ``config``, and the caller's processors."""
    changed = config.to_diff_dict()
    settings: dict[str, object] = {"temperature": 0.0}
    if config.do_sample:
        settings["temperature"] = 1.0 if config.temperature is None else config.temperature
    names = dict.fromkeys(["repetition_penalty", *FILTERS, *SCORES])
    named = [name for name in names if config.do_sample or name not in FILTERS]
    settings |= {name: changed[name] for name in named if changed.get(name) not in (None, 0, 1)}
    callers = [type(processor).__name__ for processor in processors if _is_callers(processor)]
    return settings | ({"logits_processor": "+".join(callers)} if callers else {})


def _is_callers(processor: object) -> bool:
    """Whether the caller of generate passed ``processor``, or the function that it wraps."""
    prefixed = isinstance(processor, transformers.PrefixConstrainedLogitsProcessor)
    return prefixed or maker_of(processor) != transformers.__name__


def _method_for(drafter: object) -> str:
    """The default method for ``drafter``; ``ValueError`` for a drafter of no known method."""
    name = methods.Suffix.name if drafter is None else method_of(drafter)
    if name not in methods.GENERATE:
        raise ValueError(
            f"the method for drafter {shown(drafter)} is unknown; give it, too, such as "
            "method='text-draft' for a language model"
        )
    return name


def _drafters(drafter: object, kind: Any) -> Callable[[PreTrainedModel], object]:
    """A function from a model to its drafter of ``kind``: ``drafter``, or read from its folder."""
    loaded: WeakKeyDictionary[PreTrainedModel, object] = WeakKeyDictionary()

    def find_for(model: PreTrainedModel) -> object:
        if not isinstance(drafter, Path):
            return drafter
        if model not in loaded:
            loaded[model] = load_drafter(kind, drafter, model)
        return loaded[model]

    return find_for


def _steps(
    target: VLMTarget, parts: Assembly | None, prompt: VLMPrompt, uniforms: Uniforms, stop: Criteria
) -> Iterator[Progress]:
    length = prompt.max_new_tokens
    if parts is None:
        return decode_plain(target, prompt, length, uniforms, stop=stop)
    return decode(target, parts.drafter, parts.rule, prompt, length, uniforms, stop=stop)


def _inputs(arguments: dict[str, Any], input_ids: Tensor, positions_given: bool) -> dict[str, Any]:
    """The arguments of generate that are model inputs beside the prompt's ids.

    Raises ``ValueError`` for text positions that do not simply count the prompt's tokens.
    """
    inputs = {k: v for k, v in arguments.items() if k not in NOT_INPUTS and v is not None}
    if POSITIONS in inputs and inputs[POSITIONS].ndim < 3:
        positions = inputs.pop(POSITIONS)  # of text: the target counts them itself
        mask = inputs.get("attention_mask", torch.ones_like(input_ids))
        counted = mask.cumsum(-1) - 1
        if positions_given and not bool(((positions == counted) | (mask == 0)).all()):
            raise ValueError(
                f"{POSITIONS} must count the prompt's tokens from 0, got other positions, which "
                "trees cannot continue; leave them out"
            )
    return inputs


def _stop_criteria(
    stop: str | Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> list[StopStringCriteria]:
    """The stopping criteria for the texts ``stop``; without a tokenizer ``ValueError``."""
    texts = stop_texts(stop)
    if not texts:
        return []
    if tokenizer is None:
        raise ValueError(
            "stop needs the model's tokenizer, got none; give custom_generate(…, tokenizer=…), too"
        )
    return [StopStringCriteria(tokenizer, list(texts))]


def _locals_of_generate() -> dict[str, Any]:
    """The arguments of the calling generate, which does not pass on its streamer or assistant."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def _one_streamer(ours: BaseStreamer | None, theirs: BaseStreamer | None) -> BaseStreamer | None:
    """The streamer given here or to generate; ``ValueError`` for both."""
    if ours is not None and theirs is not None:
        for streamer in {id(ours): ours, id(theirs): theirs}.values():
            streamer.end()
        raise ValueError(
            "streamer must be given once, got one for generate and one for custom_generate; leave "
            "one out"
        )
    return theirs if ours is None else ours


def _check(
    config: GenerationConfig, assistant: PreTrainedModel | None, inputs: dict[str, Any]
) -> None:
    """Raise ``ValueError`` for features of generate that custom generation cannot provide."""
    if config.num_beams != 1:
        raise ValueError(f"num_beams must be 1 for speculative decoding, got {config.num_beams}")
    mode = config.get_generation_mode(assistant)
    if mode not in PLAIN:
        settings = {name: getattr(config, name, None) for name in INSTEAD}
        settings["assistant_model"] = assistant
        name = next(name for name in INSTEAD if settings[name] is not None)
        raise ValueError(f"{name} must be off, got generation mode {mode.value!r}; {INSTEAD[name]}")
    if inputs.get("inputs_embeds") is not None:
        raise ValueError(
            "prompts must be input_ids, got inputs_embeds, whose tokens drafters cannot read; give "
            "ids"
        )
    images = sorted(name for name in inputs if name in PICTURES and inputs[name] is not None)
    if config.prefill_chunk_size is not None and images:
        raise ValueError(
            f"prefill_chunk_size must be off for prompts with {', '.join(images)}, which are read "
            f"whole, got {config.prefill_chunk_size}; leave it out"
        )
    outputs = [name for name in NOT_OUTPUTS if getattr(config, name)]
    if outputs and config.return_dict_in_generate:  # without a dictionary they are not returned
        raise ValueError(
            f"{outputs[0]} must be off, got {getattr(config, outputs[0])}: rounds score trees, so "
            "no forward belongs to one token; leave it out, or score the sequences with one "
            "forward of the model"
        )


def _padded_output(
    input_ids: Tensor, end: Progress, width: int | None, config: GenerationConfig, cache: GivenCache
) -> Any:
    """Prompts and answers [B, L + T], padded as generate does; T defaults to the longest answer."""
    width = int(end.counts.max()) if width is None else width
    column = torch.arange(width, device=input_ids.device)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    pad = next((int(token) for token in (config.pad_token_id, *ends) if token is not None), 0)
    answers = end.tokens[:, :width].masked_fill(column >= end.counts[:, None], pad)
    sequences: Any = torch.cat([input_ids, answers], dim=1)
    if config.return_dict_in_generate:
        output: Any = GenerateDecoderOnlyOutput(sequences=sequences)
        output[next(name for name in CACHES if hasattr(output, name))] = cache.cache
        return output
    return sequences
