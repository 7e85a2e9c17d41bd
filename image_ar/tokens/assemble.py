"""From a method to the three parts of the loop: target, drafter, rule.

Shape letters: V codebook size, K neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from specmm import methods
from specmm.autotune import Plan
from specmm.drafter import Drafter
from specmm.image_ar.tokens.drafters.block import BlockDrafter
from specmm.image_ar.tokens.drafters.eagle import Dynamic, EagleDrafter
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.processors import Processor
from specmm.shape.static import named, spine
from specmm.tree import TreeShape
from specmm.verify import GreedyMatch, Lantern, LanternPP, PointMass, Recursive, Rule, Traversal, neighbour_table

T = TypeVar("T")
DEFAULT_TREE = (3, 2, 2, 1, 1)


@dataclass
class Parts:
    """What methods may draw on: the drafters by kind, the codebook [V, E], trees by method that the model's maker
    recommends (children by level of a spine), the block drafter's measured acceptance by level and rank; and the
    plans made so far, by what they depend on.
    """

    drafters: dict[str, Any] = field(default_factory=dict)
    codebook: Tensor | None = None
    trees: dict[str, tuple[int, ...]] = field(default_factory=dict)
    acceptance: tuple[tuple[float, ...], ...] = ()
    plans: dict[Any, Plan] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)  # shapes and rules by what they depend on: calls share them

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
            raise ValueError(f"this model has no {kind!r} drafter (it has: {there}); train one or use method sjd or ar")
        return self.drafters[kind]


def tree_shape(
    tree: methods.Tree,
    method: str,
    parts: Parts,
    levels: int | None = None,
    device: torch.device | str = "cpu",
) -> TreeShape:
    """The shape an option names: a static tree's name, parents (from -1 on), children by level of a spine, or None
    for what the model recommends, cut to the ``levels`` its drafter has.
    """
    if isinstance(tree, str):
        return named(tree, device)
    if tree is not None and tree[:1] == (-1,):
        return TreeShape.from_parents(tree, device)
    return spine(tree if tree is not None else parts.trees.get(method, DEFAULT_TREE)[:levels], device)


class Assembly(NamedTuple):
    """The three parts of the loop; the target may be another view of the model than the one given."""

    target: LlamaGenTarget
    drafter: Drafter
    rule: Rule


def assemble(method: methods.Method, target: LlamaGenTarget, parts: Parts) -> Assembly:
    """The parts of a speculative ``method``; ``ar`` and ``auto`` are not, and are resolved before."""
    greedy = target.processor.greedy
    target.taps = ()  # a drafter says which it reads
    match method:
        case methods.SJD():
            drafter: Drafter = JacobiDrafter(target, method.window)
            return Assembly(target, drafter, GreedyMatch() if greedy else Recursive())
        case methods.Speculative():
            exact: Rule = Traversal() if method.rule == "traversal" else Recursive()
            return Assembly(target, _static(method, target, parts, greedy), GreedyMatch() if greedy else exact)
        case methods.Eagle():
            return Assembly(target, _dynamic(method, target, parts), GreedyMatch() if greedy else PointMass())
        case methods.Lantern() | methods.LanternPP():
            target = _softened(target)
            if isinstance(method, methods.Lantern) and method.drafter == "eagle":
                drafter = _dynamic(method, target, parts)
            else:
                drafter = _static(method, target, parts, greedy)
            rule = parts.once((method, greedy), lambda: _relaxed(method, parts, target, greedy))
            return Assembly(target, drafter, rule)
        case _:
            raise ValueError(f"method {method.name!r} drafts nothing")


def _softened(target: LlamaGenTarget) -> LlamaGenTarget:
    """At temperature 0 LANTERN relaxes the softmax of the raw logits and takes the mode of that."""
    if not target.processor.greedy:
        return target
    return target.with_processor(Processor())


def _relaxed(method: methods.Lantern | methods.LanternPP, parts: Parts, target: LlamaGenTarget, greedy: bool) -> Rule:
    table = _neighbours(parts, method.k, target)
    if isinstance(method, methods.Lantern):
        return Lantern(table, method.k, method.delta, method.residual, greedy)
    return LanternPP(table, method.k, method.lambda_, method.residual, greedy)


def _static(
    method: methods.Speculative | methods.Lantern | methods.LanternPP,
    target: LlamaGenTarget,
    parts: Parts,
    greedy: bool,
) -> Drafter:
    """A drafter of a fixed tree, sampled unless decoding is greedy."""
    head, tree = parts.head(method.drafter), getattr(method, "tree", None)
    levels = head.config.levels if method.drafter == "block" else None
    device = target.model.output.weight.device
    key = (tree, method.name, levels, device)
    shape = parts.once(key, lambda: tree_shape(tree, method.name, parts, levels, device))
    if method.drafter == "block":
        return BlockDrafter(head, target, shape, not greedy, getattr(method, "hindsight", 0.0))
    return EagleDrafter(head, target, shape, sampled=not greedy)


def _dynamic(method: methods.Eagle | methods.Lantern, target: LlamaGenTarget, parts: Parts) -> Drafter:
    """EAGLE-2's tree, a new shape every round."""
    return EagleDrafter(parts.head("eagle"), target, Dynamic(method.top_k, method.depth, method.total))


def _neighbours(parts: Parts, k: int, target: LlamaGenTarget) -> Tensor:
    """Nearest codes [V, k + 1] of every code, checked against the target's vocabulary."""
    size = target.model.config.vocab_size
    if parts.codebook is None or len(parts.codebook) != size:
        got = "none" if parts.codebook is None else f"{len(parts.codebook)} codes"
        raise ValueError(f"the neighbour table must be of the target's codebook of {size} codes, got {got}")
    if not 0 <= k < size - 1:
        raise ValueError(f"k must be in [0, {size - 2}] for a codebook of {size} codes, got {k}")
    return neighbour_table(parts.codebook.float(), k + 1)
