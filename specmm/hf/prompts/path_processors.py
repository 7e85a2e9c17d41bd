"""Applies transformers' logits processors and stopping criteria to paths of draft trees. Each gets
the same calls as from generate, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from specmm.core.processors import History
from specmm.core.sorting import likeliest
from specmm.core.tree import DraftTree, paths
from specmm.hf.prompts.copies import copied, state_of
from specmm.hf.prompts.options import SCORES, Options
from specmm.hf.prompts.penalties import Penalties
from specmm.structured import Constrained, GrammarProcessor, Matchers
from specmm.verify.exact import one_hot

Heard: TypeAlias = dict[tuple[int, ...], Any]  # processors, by the sequence they have seen
Place: TypeAlias = tuple[int, int]  # a row and a node

WARPERS = ("Epsilon", "MinP", "Temperature", "TopK", "TopP", "Typical")
SCORES_ONLY = tuple(getattr(transformers, f"{name}LogitsWarper") for name in WARPERS)
XGRAMMAR = "xgrammar.contrib.hf"


class PathProcessor:
    """transformers' logits processors, applied to every path of a tree as to a separate sequence.

    Processors that only read the scores are called once for all nodes, other processors along the
    paths, and never below a token that is not allowed. A processor that may have a memory gets one
    token more in each call, as from generate: each node has its own copy of its parent's processor,
    and a row continues with the copy of the last accepted node. The processors of a single greedy
    row see only accepted tokens, once and in order, and need no copies. Sequences come in batches
    of B, each in its own row, since the memory may be by row (the part of its prompt to ignore, for
    instance). Raises ``ValueError`` for classifier-free guidance and, if rounds have ``drafts``,
    for processors whose memory cannot be copied or is shared, or that give two answers to the same
    sequence.
    """

    def __init__(
        self,
        processors: Any,
        input_ids: Tensor,
        sample: bool,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                raise ValueError(
                    "guidance_scale must be 1, got a processor that runs the model itself; leave "
                    "it out"
                )
        self.processors: Any = LogitsProcessorList(map(_by_ids, processors))
        self.input_ids = input_ids
        self.greedy = not sample
        self.settings = settings  # for certificates
        self.stateful = not all(isinstance(p, SCORES_ONLY) for p in processors)
        self.drafts = False  # whether rounds have drafts
        self._memory = any(map(_may_remember, self.processors))
        # processors that have seen a row's sequence, by the answer in it
        self.heard: list[Heard] = [{} for _ in input_ids]

    @property
    def remembering(self) -> bool:
        """Whether processors that may have a memory would see rejected drafts or several rows in
        turn; with a single greedy row they see only accepted tokens.
        """
        return self.drafts and self._memory and not (self.greedy and len(self.input_ids) == 1)

    def check_vocabulary(self, size: int) -> None:
        """Does nothing: transformers' processors check their options by the vocabulary."""

    def probs(
        self, logits: Tensor, history: History, tree: DraftTree | None, out: Tensor | None = None
    ) -> Tensor:
        """Distributions [B, N, V] of ``logits`` [B, N, V]."""
        logits = logits.float()
        scores = self._by_path(logits, history, tree) if self.stateful else self._at_once(logits)
        if self.greedy:
            return one_hot(likeliest(scores), scores)
        return scores.softmax(-1)

    def _at_once(self, logits: Tensor) -> Tensor:
        flat = logits.flatten(0, 1)
        return self.processors(self.input_ids[:1].expand(len(flat), -1), flat).view_as(logits)

    def _by_path(self, logits: Tensor, history: History, tree: DraftTree | None) -> Tensor:
        """Processed scores [B, N, V]; nodes that cannot be reached keep their ``logits``."""
        scores = logits.clone()
        rows = range(len(logits))
        answers = [history.answer(row) for row in rows]
        nodes = [paths(tree, row) for row in rows]
        # a row that has ended has no new answer: its processors remain
        told: list[Heard] = [
            {key: heard[key] for key in [tuple(answer)] if key in heard}
            for answer, heard in zip(answers, self.heard, strict=True)
        ]
        reached: list[set[int]] = [set() for _ in nodes]
        for group in _by_length(answers, nodes):
            alike: dict[tuple[int, ...], list[Place]] = {}  # nodes of one path, asked once
            for row, node in group:
                if self._may_come(scores[row], reached[row], *nodes[row][node]):
                    reached[row].add(node)
                    alike.setdefault((row, *nodes[row][node][1]), []).append((row, node))
            alive = [places[0] for places in alike.values()]
            for batch in [[place] for place in alive] if self.remembering else _in_rows(alive):
                # in rows that have none of this length left, another's
                places = [next((x for x in batch if x[0] == row), batch[0]) for row in rows]
                texts = [[*answers[row], *nodes[row][node][1]] for row, node in places]
                ids = torch.stack([self._sequence(*x) for x in zip(places, texts, strict=True)])
                picked = torch.stack([logits[place] for place in places])
                row = batch[0][0]
                processed = self._scores(ids, picked, tuple(texts[row]), told[row])
                for row, node in batch:
                    for place in alike[row, *nodes[row][node][1]]:
                        scores[place] = processed[row]
        if self.remembering:
            self.heard = told
            self._check(state_of(self.processors) == self._state)
        return scores

    def _scores(self, ids: Tensor, logits: Tensor, answer: tuple[int, ...], heard: Heard) -> Any:
        """Scores [B, V] after the sequences ``ids``, by processors that saw all earlier tokens."""
        if not self.remembering:
            return self.processors(ids, logits.clone())
        assert self._state, "as it is before the first call"
        heard[answer] = copied(heard[answer[:-1]] if answer else self.processors)
        processed = heard[answer](ids, logits.clone())
        same = zip(self.processors, heard[answer], strict=True)
        self._check(not any(a is b and _may_remember(a) for a, b in same))
        if not answer and not torch.equal(copied(self.processors)(ids, logits.clone()), processed):
            raise ValueError(
                "logits processors must give one answer to a sequence, got two from "
                f"{self._names}; do not draw random numbers in them, or give method='ar'"
            )
        return processed

    @cached_property
    def _state(self) -> object:
        """The memory of the processors, and the state that their copies share."""
        return state_of(self.processors)

    @property
    def _names(self) -> str:
        return ", ".join(type(p).__name__ for p in self.processors if _may_remember(p))

    def _check(self, apart: bool) -> None:
        """Raise ``ValueError`` unless copies keep their memories ``apart``."""
        if not apart:
            raise ValueError(
                "logits processors must keep what they remember in their attributes, which are "
                f"copied for drafts that are rejected, got it elsewhere in {self._names}; move it "
                "there, or give method='ar'"
            )

    def _sequence(self, place: Place, answer: list[int]) -> Tensor:
        """The sequence of ``place``'s row as in generate: the padded prompt and an ``answer``."""
        return torch.cat([self.input_ids[place[0]], self.input_ids.new_tensor(answer)])

    def _may_come(self, scores: Tensor, reached: set[int], parent: int, path: list[int]) -> bool:
        """Whether a row's node at the end of ``path`` can be reached by its ``scores`` [N, V]."""
        if parent < 0:
            return True
        if parent not in reached:
            return False
        row = scores[parent]
        return bool(row.argmax() == path[-1] if self.greedy else row[path[-1]] > -torch.inf)


def processors_of(model: Any, options: Options, ids: Tensor, grammar: Any) -> Any:
    """transformers' logits processors for ``options`` of a call on prompts ``ids`` [B, L], with the
    constraint of a compiled ``grammar`` (None: none).
    """
    scores = {k: v for k, v in options.more.items() if k in SCORES}
    plain = options.processor
    if not plain.greedy:
        scores |= dict(do_sample=True, temperature=plain.temperature)
        scores |= dict(top_k=plain.top_k or None, top_p=plain.top_p)
    if plain.repetition_penalty != 1:
        scores["repetition_penalty"] = plain.repetition_penalty
    checkpoint = model.generation_config
    config = GenerationConfig(
        num_beams=1,
        num_return_sequences=1,
        max_length=ids.shape[1] + options.max_new_tokens,
        eos_token_id=checkpoint.eos_token_id,
        pad_token_id=checkpoint.pad_token_id,
        bos_token_id=checkpoint.bos_token_id,
    )
    config.update(**scores)
    model._prepare_special_tokens(config, True, device=model.device)
    own_processors = [*(options.more.get("logits_processor") or ())]
    penalties = [options.more.get(f"{name}_penalty", 0.0) for name in ("presence", "frequency")]
    if any(penalties):
        own_processors.append(Penalties(*penalties))
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=options.more.get("prefix_allowed_tokens_fn"),
        logits_processor=LogitsProcessorList(own_processors),
        device=model.device,
    )
    return processors if grammar is None else [GrammarProcessor(grammar), *processors]


def matchers_of(processor: Any) -> Matchers | None:
    """The matchers of ``processor``'s grammar, which know the allowed tokens, or None."""
    if isinstance(processor, Constrained):
        return processor.matchers
    processors = processor.processors if isinstance(processor, PathProcessor) else ()
    return next((p.matchers for p in processors if isinstance(p, GrammarProcessor)), None)


def _by_ids(processor: Any) -> Any:
    """``processor``, or for xgrammar's our equivalent, which depends only on the ids."""
    if type(processor).__module__ == XGRAMMAR and hasattr(processor, "compiled_grammars"):
        return GrammarProcessor(*processor.compiled_grammars)
    return processor


def _may_remember(processor: Any) -> bool:
    """Whether ``processor`` may remember earlier calls; transformers' own processors do not."""
    if isinstance(processor, GrammarProcessor | Penalties):
        return False
    of_transformers = type(processor).__module__.startswith("transformers.")
    odd = (PrefixConstrainedLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
    return not of_transformers or isinstance(processor, odd)


def _by_length(
    answers: list[list[int]], nodes: list[list[tuple[int, list[int]]]]
) -> Iterator[list[Place]]:
    """Rows and nodes by the length of their sequences, the shortest first."""
    by_length: dict[int, list[Place]] = {}
    for row, row_nodes in enumerate(nodes):
        for node, (_, path) in enumerate(row_nodes):
            by_length.setdefault(len(answers[row]) + len(path), []).append((row, node))
    for length in sorted(by_length):
        yield by_length[length]


def _in_rows(places: list[Place]) -> Iterator[list[Place]]:
    """``places`` in batches of at most one a row."""
    waiting: dict[int, list[int]] = {}
    for row, node in places:
        waiting.setdefault(row, []).append(node)
    while waiting:
        yield [(row, row_nodes.pop()) for row, row_nodes in waiting.items()]
        waiting = {row: row_nodes for row, row_nodes in waiting.items() if row_nodes}


class Criteria:
    """transformers' stopping criteria as a :class:`specmm.core.decode.Stop`, tried after every new
    token of every row.

    Rows that end are padded if one of the criteria has an end token. Otherwise they continue until
    the last of them ends, as in generate. Criteria that are not transformers' own may have a
    memory, so each row has its own copies, which see it at its place in the batch. Raises
    ``ValueError`` for a criterion that does not answer row by row, and for one with a memory
    outside its attributes.
    """

    def __init__(self, criteria: StoppingCriteriaList, input_ids: Tensor) -> None:
        self.input_ids = input_ids
        self.own = all(type(c).__module__.startswith("transformers.") for c in criteria)
        rows = range(len(input_ids))
        self.own |= len(input_ids) == 1  # a single row's criteria get generate's own calls
        self.criteria = [criteria if self.own else copied(criteria) for _ in rows]  # by row
        self._first = [] if self.own else list(criteria)  # copied from, never called
        self._state = state_of(self._first)
        self.together = not any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.ends: list[int | None] = [None] * len(input_ids)

    @property
    def width(self) -> int | None:
        """The length at which all rows end, if they end together; None if not, or not yet."""
        ends = [end for end in self.ends if end is not None]
        return max(ends) if self.together and len(ends) == len(self.ends) else None

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        bounds = zip(before.tolist(), after.tolist(), strict=True)
        for row, pair in enumerate(bounds):
            if self.ends[row] is None:
                ids = torch.cat([self.input_ids[row], tokens[row]])
                self.ends[row] = self._end(row, ids, *pair)
        if state_of(self._first) != self._state:
            names = ", ".join(type(criterion).__name__ for criterion in self._first)
            raise ValueError(
                "stopping criteria must keep what they remember in their attributes, of which each "
                f"row has a copy, got it elsewhere in {names}; move it there, or ask one prompt at "
                "a time"
            )
        ends = [self.width] * len(self.ends) if self.together else self.ends
        counts = torch.tensor([-1 if end is None else end for end in ends], device=after.device)
        done = (counts >= 0) & (counts <= after)
        return torch.where(done, counts.maximum(before), after), done

    def _end(self, row: int, ids: Tensor, before: int, after: int) -> int | None:
        """The first count above ``before``, up to ``after``, at which a row's ``ids`` are done."""
        width = self.input_ids.shape[1]
        rows = 1 if self.own else len(self.input_ids)
        for count in range(before + 1, after + 1):
            batch = ids[None, : width + count].expand(rows, -1)
            if self._stopped(row, batch)[row if rows > 1 else 0]:
                return count
        return None

    def _stopped(self, row: int, batch: Tensor) -> list[bool]:
        """Whether one of ``row``'s criteria ends each sequence of a ``batch`` [B, L + T]."""
        done = torch.zeros(len(batch), dtype=torch.bool, device=batch.device)
        for criterion in self.criteria[row]:
            ended = criterion(batch, None)
            if len(batch) > 1 and not (isinstance(ended, Tensor) and ended.ndim):
                raise ValueError(
                    f"stopping criteria must answer row by row for {len(batch)} rows, got one "
                    f"{type(ended).__name__} for all from {type(criterion).__name__}; return a "
                    "tensor of bools"
                )
            done = done | ended
        return done.tolist()
