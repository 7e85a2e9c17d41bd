"""Method ``auto`` where several drafters could serve: a race on the user's own prompt.

Each drafter's plan says which of its trees should be fastest here, or that none would pay. Where
more than one is left, or one that has no plan, all of them and plain decoding answer a little of
the prompt in turns. The fastest is taken if it gains more than the margin, so that it is never
slower than plain decoding beyond noise. Its answer is kept for prompts of as many rows.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specmm import methods
from specmm.autotune import Plan
from specmm.decode import Progress, decode, decode_plain
from specmm.hf.drafting import KINDS, Drafters, Method, assemble, choose, row_uniforms
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget

LOGGER = logging.getLogger(__name__)
PASSES = 3
TOKENS = 32  # that each contender answers in a pass
MARGIN = 1.05  # times as fast as plain decoding a drafter must be

Answer = Callable[[], Iterator[Progress]]


def kinds_of(registry: Sequence[str], drafters: Drafters) -> list[str]:
    """The methods of a ``registry`` that ``auto`` chooses among: those that contend or have a plan,
    and for which there is a drafter, and those whose drafter was given. One that needs no drafter
    is for models that have none.
    """

    def ready(name: str) -> bool:
        kind = KINDS[name]
        offered = (bool(kind.plan) or kind.contends) and drafters.has(name)
        return bool(kind.make) and (offered or name in drafters.passed)

    found = [name for name in KINDS if name in registry and ready(name)]
    return [name for name in found if not KINDS[name].drafterless] or found


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
        plans[key] = race(found, drafters, target, prompt, tokenizer)
        LOGGER.info("auto: %s", plans[key].reason)
    return plans[key].draft_free or methods.AR(), plans[key].reason


def race(
    found: Sequence[Method],
    drafters: Drafters,
    target: VLMTarget,
    prompt: VLMPrompt,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Plan:
    """A plan whose ``draft_free`` is the fastest of the methods ``found``; None: plain decoding."""
    short = dataclasses.replace(prompt, max_new_tokens=TOKENS)
    try:
        target.check(short)
    except ValueError as error:
        return Plan(None, 1.0, 1.0, f"no room to race ({error})", draft_free=found[0])

    def answer(method: Method) -> Answer:
        if not method.drafts:
            return lambda: decode_plain(target, short, TOKENS, row_uniforms(short))

        def drafted() -> Iterator[Progress]:
            parts = assemble(method, target, drafters.get(method.name), tokenizer)
            return decode(target, parts.drafter, parts.rule, short, TOKENS, row_uniforms(short))

        return drafted

    ready = [method for method in found if fits(method, drafters, target, tokenizer)]
    speeds = raced([answer(methods.AR()), *map(answer, ready)])
    gains = {method: speed / speeds[0] for method, speed in zip(ready, speeds[1:], strict=True)}
    return fastest(gains)


def fits(
    method: Method, drafters: Drafters, target: VLMTarget, tokenizer: PreTrainedTokenizerBase | None
) -> bool:
    """Whether the drafter of ``method`` can be used with ``target``.

    Raises ``ValueError`` for one that cannot and that the caller has given.
    """
    try:
        assemble(method, target, drafters.get(method.name), tokenizer)
    except ValueError as error:
        if method.name in drafters.passed:
            raise
        LOGGER.info("auto: without %s: %s", method.name, error)
        return False
    return True


def fastest(gains: Mapping[Method, float], margin: float = MARGIN) -> Plan:
    """The plan of the method whose speed is the most times that of plain decoding, if it exceeds
    the ``margin``.
    """
    if not gains:
        return Plan(None, 1.0, 1.0, "no drafter could be used")
    best = max(gains, key=lambda method: gains[method])
    said = ", ".join(f"{method} {gain:.2f}x" for method, gain in gains.items())
    if gains[best] <= margin:
        return Plan(None, 1.0, 1.0, f"plain decoding was as fast as any: {said}")
    return Plan(None, 1.0, gains[best], f"fastest in a race: {said}", draft_free=best)


def raced(contenders: Sequence[Answer], passes: int = PASSES) -> list[float]:
    """Tokens a second of each, the median of several passes in which they take turns."""
    speeds: list[list[float]] = [[] for _ in contenders]
    for _ in range(passes):
        for found, contender in zip(speeds, contenders, strict=True):
            found.append(_speed(contender()))
    return [statistics.median(found) for found in speeds]


def _speed(steps: Iterator[Progress]) -> float:
    """Tokens a second after the first round, which reads the prompt."""
    first = next(steps)
    before = int(first.counts.sum())
    begin = time.perf_counter()
    last = deque(steps, maxlen=1).pop()
    gained = int(last.counts.sum()) - before  # waits for a GPU
    return gained / max(time.perf_counter() - begin, 1e-9)
