"""What a round and a plain step take on this machine: the real target, drafter and rule on a real
prompt.

Shape letters: B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from specmm.autotune import Passes, Plan, measure, plan, until_stable
from specmm.decode import decide
from specmm.drafter import Drafter, Feedback, committed
from specmm.randomness import Uniforms, categorical
from specmm.shape.sequoia import Acceptance
from specmm.stats import Clock
from specmm.target import Target
from specmm.tree import TreeShape
from specmm.verify.rule import Rule


class RoundSeconds(NamedTuple):
    """Median seconds of drafting, of scoring, and of deciding and committing."""

    draft: float
    verify: float
    host: float


@torch.inference_mode()
def time_step(target: Target, prompt: Any, uniforms: Uniforms, repeats: int = 14) -> float:
    """Median seconds of a plain step after ``prompt``, the draw included; takes ``repeats`` + 3 of
    them.
    """
    token = categorical(target.prefill(prompt, 0).probs[:, -1], uniforms.draw(1)[:, 0])

    def step() -> None:
        nonlocal token
        token = categorical(target.step(token).probs[:, 0], uniforms.draw(1)[:, 0])

    return measure(step, repeats=repeats, warmup=3)


@torch.inference_mode()
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
    result.kept = torch.ones_like(
        result.kept
    )  # so that every repetition commits one token and none overflows
    feedback = Feedback(output, result.next_token, tree, result, committed(tree, result))

    def decide_and_commit() -> None:
        decide(rule, tree, output.probs, uniforms)
        target.commit(result)

    parts: list[Callable[[], object]] = [
        lambda: drafter.propose(feedback, uniforms),
        lambda: target.score(tree),
        decide_and_commit,
    ]
    return RoundSeconds(*(measure(part, repeats=repeats, warmup=2) for part in parts))


def planned(
    target: Target,
    drafter_of: Callable[[TreeShape], Drafter],
    shapes: Sequence[TreeShape],
    rule: Rule,
    prompt: Any,
    uniforms: Uniforms,
    acceptance: Acceptance,
    repeats: int = 4,
) -> Plan:
    """The plan of ``shapes`` by ``acceptance`` on measured seconds, which it holds.

    In each pass the plain step is timed before and after the rounds of all shapes; passes go on
    until the choice is stable (see :func:`specmm.autotune.until_stable`).
    """

    def one_pass(measured: Passes) -> None:
        before = time_step(target, prompt, uniforms, repeats)
        rounds = [
            (shape, time_round(target, drafter_of(shape), rule, prompt, uniforms, repeats))
            for shape in shapes
        ]
        after = time_step(target, prompt, uniforms, repeats)
        measured.add((before + after) / 2, rounds)

    return until_stable(one_pass, lambda costs: plan(costs, acceptance, shapes))
