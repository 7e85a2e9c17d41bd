"""A plain step, and a round of drafting and verifying, of any target: milliseconds and memory.

Steps and rounds are those of the real loops, with all that lies between and no wait but their own:
the clock is read before and after all of them. Draft and verify are timed by themselves, each
waited for. The weights being random, drafts are rarely kept: what tau
tokens a round would give is for the report to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch

from benchmarks.common import Row
from benchmarks.gpu.parts import Bench
from benchmarks.gpu.timing import measure
from specmm.core.decode import (
    Play,
    Progress,
    decide,
    decode,
    decode_plain,
    one_round,
    without_drafts,
)
from specmm.core.drafter import DeferredDrafter, Drafter, Feedback, committed
from specmm.core.randomness import Uniforms, categorical
from specmm.core.stats import Clock
from specmm.core.target import Target
from specmm.loading.hardware import attention_of_any_length
from specmm.programs.graphs import GraphRound
from specmm.verify.rule import Rule

WARM = 3  # rounds of the loop that do not count: graphs are captured in them
WARM_WHOLE = 6  # the same where whole rounds are captured
PLAIN = "plain"
ROUND = "whole round"  # the mode in which drafting, scoring and acceptance are one graph


@dataclass
class Asked:
    """What is continued: the prompt of a target's kind, of ``batch`` rows, and ``length`` tokens
    that there is room for.
    """

    prompt: Any
    batch: int
    length: int
    device: torch.device

    @property
    def uniforms(self) -> Uniforms:
        """Numbers that begin anew."""
        return Uniforms(
            [torch.Generator(self.device).manual_seed(row) for row in range(self.batch)]
        )


def plain_row(bench: Bench, target: Target, asked: Asked) -> Row:
    """A step of plain decoding."""
    repeats = bench.repeats
    with bench.memory() as memory:
        steps = decode_plain(target, asked.prompt, asked.length, asked.uniforms)
        step = loop_seconds(bench.now, steps, repeats)
    return {
        "method": PLAIN,
        "nodes": 1,
        "depth": 0,
        "repeats": repeats,
        "round_ms": 1000 * step,
    } | {"draft_ms": 0.0, "verify_ms": 1000 * step, "host_share": 0.0, **memory}


def round_row(
    bench: Bench, name: str, target: Target, parts: tuple[Drafter, Rule], asked: Asked
) -> Row:
    """A round by ``name`` with the drafter and the rule of ``parts``."""
    repeats = bench.repeats
    drafter, rule = parts
    if isinstance(drafter, DeferredDrafter):  # it would begin with a round without drafts
        drafter = drafter.inner
    with bench.memory() as memory:
        alone = time_round(target, drafter, rule, asked.prompt, asked.uniforms, repeats)
        steps = decode(target, drafter, rule, asked.prompt, asked.length, asked.uniforms)
        seconds = loop_seconds(bench.now, steps, repeats)
    models = alone.draft + alone.verify
    return _row(name, drafter, repeats, seconds) | {
        "draft_ms": 1000 * alone.draft,
        "verify_ms": 1000 * alone.verify,
        "host_share": max(0.0, 1 - models / seconds),
        **memory,
    }


def captured_row(
    bench: Bench, name: str, target: Target, parts: tuple[Drafter, Rule], asked: Asked
) -> Row:
    """A round by ``name`` as one graph, of a ``target`` of static shapes; a CPU merely calls it."""
    repeats = bench.repeats
    drafter, rule = parts
    if isinstance(drafter, DeferredDrafter):
        drafter = drafter.inner
    captured = GraphRound()
    play: Play = captured if bench.on_gpu else one_round
    with bench.memory() as memory:
        given = target, drafter, rule, asked.prompt, asked.length, asked.uniforms
        seconds = loop_seconds(bench.now, decode(*given, play=play), repeats, WARM_WHOLE)
    if bench.on_gpu and captured.recorded is None:
        raise ValueError("the round could not be captured")
    return _row(name, drafter, repeats, seconds) | memory


def captured_plain_row(bench: Bench, target: Target, asked: Asked) -> Row:
    """Plain decoding as graphs: rounds without drafts."""
    return captured_row(bench, PLAIN, target, without_drafts(), asked)


def _row(name: str, drafter: Drafter, repeats: int, seconds: float) -> Row:
    """What is known of every round."""
    sizes = {"nodes": drafter.max_nodes, "depth": drafter.max_depth}
    return {"method": name, **sizes, "repeats": repeats, "round_ms": 1000 * seconds}


def loop_seconds(
    now: Callable[[], float], steps: Iterator[Progress], repeats: int, warm: int = WARM
) -> float:
    """Mean seconds of ``repeats`` of the loop's ``steps``, after ``warm`` that do not count.

    ``now`` waits for the device, once at each end: in between the host may run ahead.
    """
    gone = sum(1 for _ in islice(steps, 1 + warm))  # the first has the prefill
    start = now()
    count = sum(1 for _ in islice(steps, repeats))
    end = now()
    if not count:
        raise ValueError(f"the loop must have more than {1 + warm} rounds, got {gone}")
    return (end - start) / count


class RoundSeconds(NamedTuple):
    """Median seconds of drafting, of scoring, and of deciding and committing."""

    draft: float
    verify: float
    host: float


@torch.inference_mode()
@attention_of_any_length()
def time_round(
    target: Target, drafter: Drafter, rule: Rule, prompt: Any, uniforms: Uniforms, repeats: int = 7
) -> RoundSeconds:
    """Seconds of one round after ``prompt``; needs room for ``repeats`` + 2 tokens of answer."""
    output = target.prefill(prompt, drafter.max_nodes)
    feedback = Feedback(output, categorical(output.probs[:, -1], uniforms.draw(1)[:, 0]))
    drafter.begin(feedback, Clock())
    tree = drafter.propose(feedback, uniforms)
    output = target.score(tree)
    result = decide(rule, tree, output.probs, uniforms)
    # every repetition commits one token, so that none overflows
    result.kept = torch.ones_like(result.kept)
    feedback = Feedback(output, result.next_token, tree, result, committed(tree, result))

    def decide_and_commit() -> None:
        decide(rule, tree, output.probs, uniforms)
        target.commit(result)

    return RoundSeconds(
        draft=measure(lambda: drafter.propose(feedback, uniforms), repeats, warmup=2),
        verify=measure(lambda: target.score(tree), repeats, warmup=2),
        host=measure(decide_and_commit, repeats, warmup=2),
    )
