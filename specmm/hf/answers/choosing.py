"""Method ``auto`` of answers and texts: the fastest of all drafters there are, tried on the user's
own prompt (:mod:`specmm.choose.contest`).
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specmm import __version__, methods
from specmm.choose.contest import FEW, SHARE, Begin, Candidate, Record, clock_of
from specmm.choose.notes import Notes, sizes_of
from specmm.core.decode import Progress, decode, decode_plain
from specmm.extending.registry import named
from specmm.hf.drafters.drafting import KINDS, Drafters, Method, assemble, network_of, row_uniforms
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt

LARGE = sys.maxsize  # sorts drafters without a network of their own last
LOGGER = logging.getLogger(__name__)


def kinds_of(registry: Sequence[str], drafters: Drafters) -> list[str]:
    """The methods of a ``registry`` among which ``auto`` chooses: methods that contend and have a
    drafter, and methods whose drafter the caller passed in.
    """

    def ready(name: str) -> bool:
        kind = KINDS[name]
        offered = kind.contends and drafters.has(name)
        return bool(kind.make) and (offered or name in drafters.passed)

    return [name for name in KINDS if name in registry and ready(name)]


def candidates_of(
    kinds: Sequence[str],
    drafters: Drafters,
    target: VLMTarget,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[Candidate]:
    """Candidates for ``auto`` among ``kinds``: each method alone, or once for each tree its drafter
    suggests. Small drafters come first, and every method's first tree before any second tree.

    Raises ``ValueError`` if a drafter that the caller passed in does not fit.
    """
    candidates: list[tuple[int, list[Candidate]]] = []
    for name in kinds:
        method: Method = methods.make(methods.GENERATE, name)
        target_copy = copy.copy(target)  # drafters set on it which states they read
        try:
            drafter = drafters.get(name)
            assemble(method, target_copy, drafter, tokenizer)
            trees = KINDS[name].trees
            own_trees = named(trees)(target_copy, drafter, method) if trees else [Candidate(method)]
            network = network_of(drafter)
            size = sum(x.numel() for x in network.parameters()) if network else LARGE
            candidates.append((size, own_trees))
        except ValueError as error:
            if name in drafters.passed:
                raise
            LOGGER.info("auto: without %s: %s", name, error)
    in_turn = zip_longest(*(trees for _, trees in sorted(candidates, key=itemgetter(0))))
    return [candidate for turn in in_turn for candidate in turn if candidate is not None]


def record_of(
    kinds: Sequence[str],
    drafters: Drafters,
    target: VLMTarget,
    prompt: VLMPrompt,
    records: dict[Any, Record],
    tokenizer: PreTrainedTokenizerBase | None,
    share: float = SHARE,
) -> Record:
    """The measurements of ``kinds`` for as many rows as ``prompt``, from ``records`` or new.

    Drafters are loaded as its candidates only if calls are long enough for trials to pay.
    """
    rows = len(prompt.lengths)
    key = (*kinds, rows, target.processor.greedy, torch.get_num_threads())
    if key not in records:
        sizes = sizes_of(target.model)
        notes = Notes.of_machine("methods", (__version__, drafters.name, *sizes, *key))
        fresh = math.isinf(share)
        records[key] = Record((), rows, now=clock_of(target.device)).remember(notes, fresh)
    record = records[key]
    if not record.worthwhile(prompt.max_new_tokens, share):
        return record
    noted = "" if record.samples else record.known().partition("(")[0]
    if noted in kinds or (noted == methods.AR.name and record.complete):
        # the first call of a process reads one drafter; others wait until they may be tried
        kinds = [name for name in kinds if name == noted]
        record.candidates = candidates_of(kinds, drafters, target, tokenizer)
    elif noted or not (record.complete or record.looked):
        record.candidates = candidates_of(kinds, drafters, target, tokenizer)
        record.looked = True
    return record


def choose(
    record: Record,
    drafters: Drafters,
    target: VLMTarget,
    prompt: VLMPrompt,
    tokenizer: PreTrainedTokenizerBase | None,
    share: float = SHARE,
) -> Method:
    """The method that should be fastest to answer ``prompt``; trials take a ``share`` of answers.
    Without a bound (``share`` infinite) trials are whole answers.
    """
    limit = prompt.max_new_tokens
    few = limit if math.isinf(share) else min(FEW, limit)
    begin = begin_of(drafters, target, prompt, tokenizer)
    chosen: Method = record.choose(begin, min(limit, record.usual), few, share)
    return chosen


def begin_of(
    drafters: Drafters,
    target: VLMTarget,
    prompt: VLMPrompt,
    tokenizer: PreTrainedTokenizerBase | None,
    length: int | None = None,
) -> Begin:
    """A function that begins a run of any method after ``prompt``, with ``length`` new tokens
    (None: the prompt's number), each run on its own copy of the target.
    """
    tokens = prompt.max_new_tokens if length is None else length

    def begin(method: Any) -> Iterator[Progress]:
        target_copy = copy.copy(target)  # drafters set on it which states they read
        run = (prompt, tokens, row_uniforms(prompt))
        if not method.drafts:
            return decode_plain(target_copy, *run)
        drafter, rule = assemble(method, target_copy, drafters.get(method.name), tokenizer)
        return decode(target_copy, drafter, rule, *run)

    return begin
