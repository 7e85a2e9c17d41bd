"""``specmm.custom_generate``: the same acceleration from inside ``model.generate(…,
custom_generate=…)``.

Shape letters: B batch, L padded prompt length, N tree nodes, T new tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from specmm import methods
from specmm.autotune import Plan
from specmm.decode import Progress, decode, decode_plain
from specmm.hf.drafting import assemble, choose, planned_by, preset_of
from specmm.hf.prompt import POSITIONS, VLMPrompt
from specmm.hf.streaming import ending, gains, stop_texts
from specmm.hf.target import VLMTarget
from specmm.processors import History, Processor
from specmm.randomness import Uniforms, sample_generators
from specmm.tree import DraftTree
from specmm.turns import in_its_turn

NOT_INPUTS = {"past_key_values", "logits_to_keep", "use_cache", "cache_position"}
NOT_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
PLAIN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
INSTEAD = {  # of options that make generate decode otherwise
    "assistant_model": "give custom_generate(drafter=…, method='text-draft')",
    "prompt_lookup_num_tokens": "give custom_generate(method='prompt-lookup')",
    "use_mtp": "use the method of a drafter that you have",
    "assistant_early_exit": "use the method of a drafter that you have",
    "penalty_alpha": "call generate without custom_generate",
    "dola_layers": "call generate without custom_generate",
    "constraints": "call generate without custom_generate",
    "force_words_ids": "call generate without custom_generate",
}
SCORES_ONLY = (
    EpsilonLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


def custom_generate(
    drafter: Any = None,
    method: str | methods.VQAMethod | methods.TextMethod = "prompt-lookup",
    tokenizer: Any = None,
    streamer: Any = None,
    generator: torch.Generator | None = None,
    stop: str | Sequence[str] = (),
) -> Callable[..., Tensor]:
    """A callable for transformers' ``model.generate(**inputs, custom_generate=…)``, batches
    included.

    Logits processors and stopping criteria are honoured, whatever they are: they are asked about
    each path of a tree. A ``streamer`` may be given here or to generate, for one row; it hears of
    the end of a run that fails, too. generate drops its ``tokenizer`` on the way to a callable, so
    give it here: it is the target's, for text drafters with another and for ``stop``, texts that
    end a row as generate's ``stop_strings`` do, which it replaces, for they cannot work with a
    callable. Sampling draws from ``generator``, never from torch's global state. Several threads
    may share a model: they are served in the order they come. Method ``auto`` plans for an MSD,
    DEER or block ``drafter``, once for each batch size. Raises ``ValueError`` for whatever makes
    generate decode otherwise than token by token (beams, an assistant, contrastive search and the
    like), for guidance, for ``inputs_embeds``, for dictionaries with scores, logits, attentions or
    hidden states, for ``stop`` without a tokenizer, and for auto with another drafter or none.
    """
    asked, plans = methods.make(methods.GENERATE, method), dict[Any, Plan]()
    planned = planned_by(drafter) if asked.name == methods.Auto.name else None
    ends = _stop_criteria(stop, tokenizer)

    @in_its_turn(lambda model: model)
    def run(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor:
        asked_of_generate = _locals_of_generate()
        told = _one_streamer(streamer, asked_of_generate.get("streamer"))
        with ending(told):
            _check(generation_config, asked_of_generate.get("assistant_model"), model_kwargs)
            if streamer is not None and len(input_ids) == 1:
                streamer.put(
                    input_ids.cpu()
                )  # as generate does with its own: streamers may skip it
            return answered(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                model_kwargs,
                told,
            )

    def answered(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        told: Any,
    ) -> Tensor:
        inputs = {k: v for k, v in model_kwargs.items() if k not in NOT_INPUTS and v is not None}
        if (
            inputs.get(POSITIONS) is not None and inputs[POSITIONS].ndim < 3
        ):  # those of text, which we count ourselves
            del inputs[POSITIONS]
        length = generation_config.max_length - input_ids.shape[1]
        target = VLMTarget(
            model, PathProcessor(logits_processor, input_ids, bool(generation_config.do_sample))
        )
        prompt = VLMPrompt({**inputs, "input_ids": input_ids}, length)
        uniforms = Uniforms(sample_generators(generator, len(input_ids), target.device))
        criteria = Criteria(StoppingCriteriaList([*stopping_criteria, *ends]), input_ids)
        chosen = preset_of(asked) if asked.name == methods.Draft.name else asked
        if (
            planned is not None
        ):  # measured without the processors, which may remember what they are asked
            plain = VLMTarget(model, Processor(float(bool(generation_config.do_sample))))
            chosen = choose(plain, drafter, prompt, plans, planned)
        if not chosen.drafts:
            steps = decode_plain(target, prompt, length, uniforms, stop=criteria)
        else:
            parts = assemble(chosen, target, drafter, tokenizer)
            steps = decode(
                target, parts.drafter, parts.rule, prompt, length, uniforms, stop=criteria
            )
        *_, (end, _) = gains(steps, told)
        return _joined(input_ids, end, criteria.width, generation_config)

    return run


def _stop_criteria(stop: str | Sequence[str], tokenizer: Any) -> list[StopStringCriteria]:
    """generate's own criterion for the texts ``stop``, if there are any."""
    texts = stop_texts(stop)
    if texts and tokenizer is None:
        raise ValueError(
            "stop needs the model's tokenizer, got none; give custom_generate(…, tokenizer=…), too"
        )
    return [StopStringCriteria(tokenizer, list(texts))] if texts else []


def _locals_of_generate() -> dict[str, Any]:
    """The arguments of the generate that called us: it does not hand on its streamer, nor its
    assistant.
    """
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def _one_streamer(ours: Any, theirs: Any) -> Any:
    if ours is not None and theirs is not None:
        for one in {id(ours): ours, id(theirs): theirs}.values():
            one.end()
        raise ValueError(
            "streamer must be given once, got one for generate and one for custom_generate; leave one out"
        )
    return theirs if ours is None else ours


def _check(config: GenerationConfig, assistant: Any, inputs: dict[str, Any]) -> None:
    """Raise ``ValueError`` for what generate would do and a callable of ours cannot."""
    if config.num_beams != 1:
        raise ValueError(f"num_beams must be 1 for speculative decoding, got {config.num_beams}")
    mode = config.get_generation_mode(assistant)
    if mode not in PLAIN:
        given = {name: getattr(config, name, None) for name in INSTEAD} | {
            "assistant_model": assistant
        }
        name = next(name for name in INSTEAD if given[name] is not None)
        raise ValueError(f"{name} must be off, got generation mode {mode.value!r}; {INSTEAD[name]}")
    if inputs.get("inputs_embeds") is not None:
        raise ValueError(
            "prompts must be input_ids, got inputs_embeds, whose tokens drafters cannot read; give ids"
        )
    asked = [name for name in NOT_OUTPUTS if getattr(config, name)]
    if (
        asked and config.return_dict_in_generate
    ):  # without a dictionary generate does not return them either
        raise ValueError(
            f"{asked[0]} must be off, got {getattr(config, asked[0])}: rounds score trees, so there is not one forward "
            "a token to return; leave it out, or score the sequences with one forward of the model"
        )


class PathProcessor:
    """transformers' logits processors, asked about every path of a tree as if it were a sequence of
    its own.

    Those that look at the scores only are called once for all nodes. The others see batches of B
    sequences of one length, each in its own row, for they may know something of a row (what to
    ignore of its prompt, say). Raises ``ValueError`` for classifier-free guidance.
    """

    def __init__(self, processors: Any, input_ids: Tensor, sample: bool) -> None:
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                raise ValueError(
                    "guidance_scale must be 1, got a processor that runs the model itself; leave it out"
                )
        self.processors, self.input_ids, self.greedy = processors, input_ids, not sample
        self.stateful = not all(isinstance(p, SCORES_ONLY) for p in processors)

    def check_vocabulary(self, size: int) -> None:
        """transformers' processors cut their options to the vocabulary by themselves."""

    def probs(
        self, logits: Tensor, history: History, tree: DraftTree | None, out: Tensor | None = None
    ) -> Tensor:
        """Distributions [B, N, V] of ``logits`` [B, N, V]."""
        logits = logits.float()
        scores = self._by_path(logits, history, tree) if self.stateful else self._at_once(logits)
        if self.greedy:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return scores.softmax(-1)

    def _at_once(self, logits: Tensor) -> Tensor:
        flat = logits.flatten(0, 1)
        return self.processors(self.input_ids[:1].expand(len(flat), -1), flat).view_as(logits)

    def _by_path(self, logits: Tensor, history: History, tree: DraftTree | None) -> Tensor:
        scores = torch.empty_like(logits)
        for batch in self._batches(history, tree):
            filler, _ = next(iter(batch.values()))
            ids = torch.stack([batch.get(row, (filler, 0))[0] for row in range(len(logits))])
            nodes = [batch.get(row, (filler, 0))[1] for row in range(len(logits))]
            found = self.processors(ids, logits[range(len(logits)), nodes])
            for row in batch:
                scores[row, nodes[row]] = found[row]
        return scores

    def _batches(
        self, history: History, tree: DraftTree | None
    ) -> Iterator[dict[int, tuple[Tensor, int]]]:
        """Sequences of one length, at most one a row, with the node each ends at; together all
        rows' nodes.
        """
        waiting: dict[int, dict[int, list[tuple[Tensor, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for row in range(len(self.input_ids)):
            before = self._before(history, row)
            for node, path in enumerate(_paths(tree, row, before)):
                ids = torch.cat([before, path])
                waiting[len(ids)][row].append((ids, node))
        for rows in waiting.values():
            while left := {row: found.pop() for row, found in rows.items() if found}:
                yield left

    def _before(self, history: History, row: int) -> Tensor:
        """The row as generate has it: its padded prompt and what it has committed."""
        if not hasattr(self, "prompts"):
            self.prompts = history.lengths.tolist()  # the first call is the prefill's
        return torch.cat([self.input_ids[row], history.sequence(row)[self.prompts[row] :]])


def _paths(tree: DraftTree | None, row: int, like: Tensor) -> list[Tensor]:
    """Tokens from the root to each node of a row's tree; one empty path without a tree."""
    if tree is None:
        return [like[:0]]
    ancestors = tree.shape.ancestors[row if len(tree.shape.parents) > 1 else 0]
    return [
        tree.tokens[row][on_path] for on_path in ancestors
    ]  # nodes are numbered from the root down


class Criteria:
    """transformers' stopping criteria as a :class:`specmm.stopping.Stop`, asked after every new
    token of every row.

    Rows that end are padded where one of the criteria knows an end token; where none does, generate
    lets them go on until the last of them ends, and so do we.
    """

    def __init__(self, criteria: StoppingCriteriaList, input_ids: Tensor) -> None:
        self.criteria, self.input_ids = criteria, input_ids
        self.together = not any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.ends: list[int | None] = [None] * len(input_ids)

    @property
    def width(self) -> int | None:
        """Where all rows end that end together; None where they do not, or not yet."""
        ends = [end for end in self.ends if end is not None]
        return max(ends) if self.together and len(ends) == len(self.ends) else None

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`specmm.stopping.Stop`."""
        bounds = zip(before.tolist(), after.tolist(), strict=True)
        for row, pair in enumerate(bounds):
            if self.ends[row] is None:
                self.ends[row] = self._end(torch.cat([self.input_ids[row], tokens[row]]), *pair)
        ends = [self.width] * len(self.ends) if self.together else self.ends
        counts = torch.tensor([-1 if end is None else end for end in ends], device=after.device)
        done = (counts >= 0) & (counts <= after)
        return torch.where(done, counts.maximum(before), after), done

    def _end(self, ids: Tensor, before: int, after: int) -> int | None:
        """The first of the counts above ``before`` up to ``after`` at which the sequence ``ids`` is
        done.
        """
        width = self.input_ids.shape[1]
        for count in range(before + 1, after + 1):
            if bool(self.criteria(ids[None, : width + count], None)[0]):
                return count
        return None


def _joined(input_ids: Tensor, end: Progress, width: int | None, config: GenerationConfig) -> Any:
    """Prompts and answers [B, L + T], padded as generate does; T is ``width``, or that of the
    longest answer.
    """
    width = int(end.counts.max()) if width is None else width
    column = torch.arange(width, device=input_ids.device)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    pad = next((int(token) for token in (config.pad_token_id, *ends) if token is not None), 0)
    answers = end.tokens[:, :width].masked_fill(column >= end.counts[:, None], pad)
    sequences: Any = torch.cat([input_ids, answers], dim=1)
    return (
        GenerateDecoderOnlyOutput(sequences=sequences)
        if config.return_dict_in_generate
        else sequences
    )
