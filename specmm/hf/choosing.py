"""Method ``auto`` where several drafters could serve: a race on the user's own prompt.

Each drafter's plan says which of its trees should be fastest here, or that none would pay. Where
more than one is left, or one that has no plan, all of them and plain decoding answer a little of
the prompt in turns. The fastest is taken if it gains more than the margin, so that it is never
slower than plain decoding beyond noise. Its answer is kept for prompts of as many rows.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specmm import methods
from specmm.autotune import Candidate, Measured, Plan
from specmm.decode import Progress, decode, decode_plain
from specmm.hf.drafting import KINDS, Assembly, Drafters, Method, assemble, choose, row_uniforms
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.watching import tell

LOGGER = logging.getLogger(__name__)
PASSES = 3
TOKENS = 32  # that each contender answers in a pass, at most
FEWEST = 8
SHARE = 0.5  # of the seconds of the whole answer, plainly decoded: longer races end after a pass
BEHIND = 0.7  # of the fastest's speed: a contender that is slower races no more
MARGIN = 1.05  # times as fast as plain decoding a drafter must be

Answer = Callable[[], Iterator[Progress]]


def kinds_of(registry: Sequence[str], drafters: Drafters) -> list[str]:
    """The methods of a ``registry`` that ``auto`` chooses among: those that contend or have a plan,
    and for which there is a drafter, and those whose drafter was given.
    """

    def ready(name: str) -> bool:
        kind = KINDS[name]
        offered = (bool(kind.plan) or kind.contends) and drafters.has(name)
        return bool(kind.make) and (offered or name in drafters.passed)

    return [name for name in KINDS if name in registry and ready(name)]


def chosen_of(
    kinds: Sequence[str],
    drafters: Drafters,
    target: VLMTarget,
    prompt: VLMPrompt,
    plans: dict[Any, Plan],
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[Method, str]:
    """The method that should be fastest here of all ``kinds``, and why; plans made are kept."""
    found: list[Method] = []
    for name in kinds:
        wanted: Method = methods.make(methods.GENERATE, name)
        if KINDS[name].plan:
            wanted = choose(target, drafters.get(name), prompt, plans, wanted)
        if wanted.drafts:
            found.append(wanted)
    planned = KINDS[found[0].name].plan if len(found) == 1 else ""
    if not found:
        return methods.AR(), f"no plan of {', '.join(kinds)} would gain"
    if planned:  # it was compared with plain decoding
        return found[0], f"by its plan, of {', '.join(kinds)}"
    greedy = target.processor.greedy
    key = ("race", *map(str, found), len(prompt.lengths), greedy, torch.get_num_threads())
    if key not in plans:
        begin = time.perf_counter()
        plans[key] = race(found, drafters, target, prompt, tokenizer)
        seconds = time.perf_counter() - begin
        taken = plans[key].draft_free or methods.AR()
        LOGGER.info("auto: %s, %s; raced in %.1f s", taken, plans[key].reason, seconds)
    return plans[key].draft_free or methods.AR(), plans[key].reason


def race(
    found: Sequence[Method],
    drafters: Drafters,
    target: VLMTarget,
    prompt: VLMPrompt,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Plan:
    """A plan whose ``draft_free`` is the fastest of the methods ``found``; None: plain decoding.

    It takes about as long as half of the answer would, plainly decoded, but a pass at least.
    """
    asked = prompt.max_new_tokens
    length = min(TOKENS, max(FEWEST, asked // PASSES))
    short = dataclasses.replace(prompt, max_new_tokens=length)
    try:
        target.check(short)
    except ValueError as error:
        return Plan(None, 1.0, 1.0, f"no room to race ({error})", draft_free=found[0])

    def plain() -> Iterator[Progress]:
        return decode_plain(target, short, length, row_uniforms(short))

    def drafted(own: VLMTarget, parts: Assembly) -> Iterator[Progress]:
        return decode(own, parts.drafter, parts.rule, short, length, row_uniforms(short))

    ready: dict[Method, Answer] = {}
    for method in found:
        own = copy.copy(target)  # drafters tell their target what they read
        if parts := fitting(method, drafters, own, tokenizer):
            ready[method] = partial(drafted, own, parts)
    speeds = raced([plain, *ready.values()], worth=SHARE * asked * len(prompt.lengths))
    gains = {method: speed / speeds[0] for method, speed in zip(ready, speeds[1:], strict=True)}
    return fastest(gains)


def fitting(
    method: Method, drafters: Drafters, target: VLMTarget, tokenizer: PreTrainedTokenizerBase | None
) -> Assembly | None:
    """Drafter and rule of ``method``; None where the drafter cannot be used with ``target``.

    Raises ``ValueError`` for one that cannot and that the caller has given.
    """
    try:
        return assemble(method, target, drafters.get(method.name), tokenizer)
    except ValueError as error:
        if method.name in drafters.passed:
            raise
        LOGGER.info("auto: without %s: %s", method.name, error)
        return None


def fastest(gains: Mapping[Method, float], margin: float = MARGIN) -> Plan:
    """The plan of the method whose speed is the most times that of plain decoding, if it exceeds
    the ``margin``.
    """
    if not gains:
        return Plan(None, 1.0, 1.0, "no drafter could be used")
    best = max(gains, key=lambda method: gains[method])
    said = ", ".join(f"{method} {gain:.2f}x" for method, gain in gains.items())
    raced = tuple(Candidate(method, gain) for method, gain in gains.items())
    if gains[best] <= margin:
        why = f"plain decoding was as fast as any: {said}"
        return Plan(None, 1.0, 1.0, why, candidates=raced)
    why = f"fastest in a race: {said}"
    return Plan(None, 1.0, gains[best], why, draft_free=best, candidates=raced)


def raced(
    contenders: Sequence[Answer], passes: int = PASSES, worth: float = math.inf
) -> list[float]:
    """Tokens a second of each, the median of its passes, in which they take turns.

    One that falls clearly behind the fastest races no more, not even to the end of its pass. The
    race is over when one is left, or when it has taken the seconds that the first contender needs
    for ``worth`` tokens.
    """
    begin = time.perf_counter()
    speeds: list[list[float]] = [[] for _ in contenders]
    racing = list(range(len(contenders)))
    best = 0.0
    done = 0
    for left in range(passes, 0, -1):
        for one in racing:
            speeds[one].append(_speed(contenders[one](), BEHIND * best))
            done += 1
            tell(Measured(done, done + left * len(racing)))
            best = max(map(statistics.median, filter(None, speeds)))
        racing = [one for one in racing if statistics.median(speeds[one]) >= BEHIND * best]
        spent = (time.perf_counter() - begin) * statistics.median(speeds[0])
        if len(racing) < 2 or spent >= worth:
            break
    return [statistics.median(found) for found in speeds]


def _speed(steps: Iterator[Progress], least: float = 0.0) -> float:
    """Tokens a second after the first round, which reads the prompt.

    ``steps`` are left when even all their tokens by now would make less than ``least`` a second.
    """
    first = next(steps)
    counts = first.counts
    before = int(counts.sum())
    whole = int(first.limits.sum()) - before
    begin = time.perf_counter()
    for progress in steps:
        counts = progress.counts
        if (time.perf_counter() - begin) * least > whole:
            break
    gained = int(counts.sum()) - before  # waits for a GPU
    return gained / max(time.perf_counter() - begin, 1e-9)
