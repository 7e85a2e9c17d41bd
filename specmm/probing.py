"""What a round and a plain step take on this machine: the real target, drafter and rule on a real prompt.

Shape letters: B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from specmm.autotune import Costs, measure
from specmm.drafter import Drafter, Feedback, committed
from specmm.randomness import Uniforms, categorical
from specmm.stats import Clock
from specmm.target import Target
from specmm.tree import TreeShape
from specmm.verify.rule import Rule, decide


class RoundSeconds(NamedTuple):
    """Median seconds of drafting, of scoring, and of deciding and committing."""

    draft: float
    verify: float
    host: float


@torch.inference_mode()
def time_step(target: Target, prompt: Any, uniforms: Uniforms, repeats: int = 14) -> float:
    """Median seconds of a plain step behind ``prompt``, the draw included; takes ``repeats`` + 3 of them."""
    token = categorical(target.prefill(prompt, 0).laws[:, -1], uniforms.draw(1)[:, 0])

    def step() -> None:
        nonlocal token
        token = categorical(target.step(token).laws[:, 0], uniforms.draw(1)[:, 0])

    return measure(step, repeats=repeats, warmup=3)


@torch.inference_mode()
def time_round(
    target: Target, drafter: Drafter, rule: Rule, prompt: Any, uniforms: Uniforms, repeats: int = 7
) -> RoundSeconds:
    """Seconds of one round behind ``prompt``; needs room for ``repeats`` + 2 tokens of answer."""
    output = target.prefill(prompt, drafter.max_nodes)
    feedback = Feedback(output, categorical(output.laws[:, -1], uniforms.draw(1)[:, 0]))
    drafter.begin(feedback, Clock())
    tree = drafter.propose(feedback, uniforms)
    output = target.score(tree)
    verdict = decide(rule, tree, output.laws, uniforms)
    verdict.kept = torch.ones_like(verdict.kept)  # so that every repetition commits one token and none overflows
    feedback = Feedback(output, verdict.next_token, tree, verdict, committed(tree, verdict))

    def settle() -> None:
        decide(rule, tree, output.laws, uniforms)
        target.commit(verdict)

    parts: list[Callable[[], object]] = [
        lambda: drafter.propose(feedback, uniforms),
        lambda: target.score(tree),
        settle,
    ]
    return RoundSeconds(*(measure(part, repeats=repeats, warmup=2) for part in parts))


def measure_costs(
    target: Target,
    drafter_of: Callable[[TreeShape], Drafter],
    shapes: Sequence[TreeShape],
    rule: Rule,
    prompt: Any,
    uniforms: Uniforms,
    repeats: int = 7,
) -> Costs:
    """Seconds of a plain step, and of rounds with each of ``shapes``: drafting by depth, scoring by nodes, the rest.

    The plain step is timed before and after the rounds and the lesser counts: what else runs on the machine for a
    moment would make it look slow, and drafting worth while.
    """
    before, draft, verify, host = time_step(target, prompt, uniforms, repeats), {}, {}, 0.0
    for shape in shapes:
        found = time_round(target, drafter_of(shape), rule, prompt, uniforms, repeats)
        draft[shape.depth], verify[shape.size], host = found
    return Costs(draft, verify, min(before, time_step(target, prompt, uniforms, repeats)), host)
