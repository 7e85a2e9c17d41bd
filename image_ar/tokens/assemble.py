"""From a method to the three parts of the loop: target, drafter, rule.

Shape letters: V codebook size, K neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specmm import methods
from specmm.autotune import Plan
from specmm.drafter import Drafter
from specmm.image_ar.tokens.drafters.block import BlockDrafter
from specmm.image_ar.tokens.drafters.eagle import Dynamic, EagleDrafter
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.shape.static import named, spine
from specmm.tree import TreeShape
from specmm.verify import GreedyMatch, Lantern, LanternPP, PointMass, Recursive, Rule, Traversal, neighbour_table

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

    def head(self, kind: str) -> Any:
        """The drafter called ``kind``; raises ``ValueError`` when the model has none."""
        if kind not in self.drafters:
            there = ", ".join(sorted(self.drafters)) or "none"
            raise ValueError(f"this model has no {kind!r} drafter (it has: {there}); train one or use method sjd or ar")
        return self.drafters[kind]


def tree_shape(tree: methods.Tree, method: str, parts: Parts) -> TreeShape:
    """The shape an option names: a static tree's name, parents (from -1 on), children by level of a spine, or None
    for what the model recommends.
    """
    if isinstance(tree, str):
        return named(tree)
    if tree is not None and tree[:1] == (-1,):
        return TreeShape.from_parents(tree)
    return spine(tree if tree is not None else parts.trees.get(method, DEFAULT_TREE))


def assemble(method: methods.Method, target: LlamaGenTarget, parts: Parts) -> tuple[Drafter, Rule]:
    """Drafter and rule of a speculative ``method``; ``ar`` and ``auto`` are not, and are resolved before."""
    greedy = target.processor.greedy
    match method:
        case methods.SJD():
            return JacobiDrafter(target, method.window), GreedyMatch() if greedy else Recursive()
        case methods.Speculative():
            exact: Rule = Traversal() if method.rule == "traversal" else Recursive()
            return _static(method, target, parts), GreedyMatch() if greedy else exact
        case methods.Eagle():
            return _dynamic(method, target, parts), GreedyMatch() if greedy else PointMass()
        case methods.Lantern():
            drafter = _dynamic(method, target, parts) if method.drafter == "eagle" else _static(method, target, parts)
            table = _neighbours(parts, method.k, target)
            return drafter, Lantern(table, method.k, method.delta, method.residual, greedy)
        case methods.LanternPP():
            table = _neighbours(parts, method.k, target)
            return _static(method, target, parts), LanternPP(table, method.k, method.lambda_, method.residual, greedy)
        case _:
            raise ValueError(f"method {method.name!r} drafts nothing")


def _static(method: methods.Speculative | methods.Lantern | methods.LanternPP, target: Any, parts: Parts) -> Drafter:
    """A drafter of a fixed tree, sampled unless decoding is greedy."""
    shape = tree_shape(getattr(method, "tree", None), method.name, parts)
    kind = BlockDrafter if method.drafter == "block" else EagleDrafter
    return kind(parts.head(method.drafter), target, shape, sampled=not target.processor.greedy)


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
