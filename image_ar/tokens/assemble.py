"""From a method to the three parts of the loop: target, drafter, rule.

Shape letters: V codebook size, K neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from specmm import methods
from specmm.autotune import Plan
from specmm.drafter import Drafter
from specmm.image_ar.tokens.drafters.block import BlockDrafter
from specmm.image_ar.tokens.drafters.eagle import EagleDrafter
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.processors import Processor
from specmm.registry import parse_spec, unknown
from specmm.shape.trees import make_tree, static_tree
from specmm.verify import GreedyMatch, Rule, neighbour_table
from specmm.verify.rule import RuleKind, make_rule, rule_kind

T = TypeVar("T")
DEFAULT_TREE = (3, 2, 2, 1, 1)


@dataclass
class Parts:
    """What methods may draw on: the drafters by kind, the codebook [V, E], trees by method that the
    model's maker recommends (children by level of a spine), the block drafter's measured acceptance
    by level and rank; and the plans made so far, by what they depend on.
    """

    drafters: dict[str, Any] = field(default_factory=dict)
    codebook: Tensor | None = None
    trees: dict[str, tuple[int, ...]] = field(default_factory=dict)
    acceptance: tuple[tuple[float, ...], ...] = ()
    plans: dict[Any, Plan] = field(default_factory=dict)
    made: dict[Any, Any] = field(
        default_factory=dict
    )  # shapes and rules by what they depend on: calls share them

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What ``make`` gives, made at the first call with ``key``."""
        if key not in self.made:
            self.made[key] = make()
        found: T = self.made[key]
        return found

    def head(self, kind: str) -> Any:
        """The drafter called ``kind``; raises ``ValueError`` when the model has none."""
        if kind not in self.drafters:
            there = ", ".join(sorted(self.drafters)) or "none"
            raise ValueError(
                f"this model has no {kind!r} drafter (it has: {there}); train one or use method sjd or ar"
            )
        return self.drafters[kind]


class Assembly(NamedTuple):
    """The three parts of the loop; the target may be another view of the model than the one given."""

    target: LlamaGenTarget
    drafter: Drafter
    rule: Rule


def assemble(method: methods.Method, target: LlamaGenTarget, parts: Parts) -> Assembly:
    """The parts of a speculative ``method``; ``ar`` and ``auto`` are not, and are resolved before."""
    choice: methods.Choice | None = getattr(method, "choice", None)
    if choice is None:
        raise ValueError(f"method {method.name!r} drafts nothing")
    if choice.drafter not in DRAFTERS:
        raise unknown("drafter", choice.drafter, DRAFTERS)
    kind, greedy = rule_kind(choice.rule), target.processor.greedy
    target.aux_layers = ()  # a drafter says which it reads
    if kind.relaxed:
        target = _softened(target)
    sampled = kind.siblings is not None and not greedy
    drafter = DRAFTERS[choice.drafter](choice, method.name, target, parts, sampled)
    rule = parts.once(
        (choice.rule, greedy), lambda: _rule(choice.rule, kind, target, parts, greedy)
    )
    return Assembly(target, drafter, rule)


def _rule(spec: str, kind: RuleKind, target: LlamaGenTarget, parts: Parts, greedy: bool) -> Rule:
    if not kind.relaxed:
        return GreedyMatch() if greedy else make_rule(spec)
    k = int(parse_spec(spec)[2].get("k", kind.rule.k))
    return make_rule(spec, table=_neighbours(parts, k, target), greedy=greedy)


def _softened(target: LlamaGenTarget) -> LlamaGenTarget:
    """At temperature 0 LANTERN relaxes the softmax of the raw logits and takes the mode of that."""
    if not target.processor.greedy:
        return target
    return target.with_processor(Processor())


def _block(
    choice: methods.Choice, name: str, target: LlamaGenTarget, parts: Parts, sampled: bool
) -> Drafter:
    """The block drafter on a tree of fixed shape, cut to the levels it has."""
    head, device = parts.head("block"), target.model.output.weight.device
    tree = choice.tree or parts.trees.get(name, DEFAULT_TREE)[: head.config.levels]
    acceptance = parts.acceptance
    shape = parts.once((tree, device), lambda: static_tree(tree, device, acceptance))
    siblings = rule_kind(choice.rule).siblings or "distinct"
    return BlockDrafter(head, target, shape, sampled, choice.rejected_weight, siblings)


def _eagle(
    choice: methods.Choice, name: str, target: LlamaGenTarget, parts: Parts, sampled: bool
) -> Drafter:
    """EAGLE's head on a tree of fixed shape, or on one of another shape every round."""
    device = target.model.output.weight.device
    tree = make_tree(choice.tree or parts.trees.get(name, DEFAULT_TREE), device)
    siblings = rule_kind(choice.rule).siblings or "distinct"
    return EagleDrafter(parts.head("eagle"), target, tree, sampled, siblings)


def _jacobi(
    choice: methods.Choice, name: str, target: LlamaGenTarget, parts: Parts, sampled: bool
) -> Drafter:
    """The target itself, on a chain."""
    shape = static_tree(choice.tree or "chain(8)")
    if shape.width > 1:
        raise ValueError(f"drafter jacobi needs a chain, as chain(8), got {choice.tree}")
    return JacobiDrafter(target, shape.depth)


DRAFTERS = {"block": _block, "eagle": _eagle, "jacobi": _jacobi}


def _neighbours(parts: Parts, k: int, target: LlamaGenTarget) -> Tensor:
    """Nearest codes [V, k + 1] of every code, checked against the target's vocabulary."""
    size = target.model.config.vocab_size
    if parts.codebook is None or len(parts.codebook) != size:
        got = "none" if parts.codebook is None else f"{len(parts.codebook)} codes"
        raise ValueError(
            f"the neighbour table must be of the target's codebook of {size} codes, got {got}"
        )
    if not 0 <= k < size - 1:
        raise ValueError(f"k must be in [0, {size - 2}] for a codebook of {size} codes, got {k}")
    return neighbour_table(parts.codebook.float(), k + 1)
