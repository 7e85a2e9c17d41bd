"""Tree and rule of the drafters that grow EAGLE-2's tree under greedy decoding, and a static tree
of recorded distributions under sampling.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from specmm import methods
from specmm.core.tree import TreeShape
from specmm.hf.drafters.drafting import Verification
from specmm.hf.models.target import VLMTarget
from specmm.methods.base import TreeName
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import Siblings, static_tree
from specmm.verify import Recursive, Rule

Grown: TypeAlias = methods.MTP | methods.Assistant
DRAWN = (2, 2, 1)  # the tree that is drawn where none is given


class Trees(NamedTuple):
    """A ``tree``, how it is ``drawn`` (whether sampled, and how siblings are), and its ``rule``."""

    tree: TreeShape | Dynamic
    drawn: tuple[bool, Siblings]
    rule: Rule


def trees_of(method: Grown, target: VLMTarget) -> Trees:
    """The tree, drawing and rule of ``method`` for ``target``; if drafts must be chains, default
    trees become chains.

    Raises ``ValueError`` for trees and rules that do not fit the target.
    """
    chains = target.family.chains_only
    if not method.tree and (target.processor.greedy or not method.sampled):
        width = 1 if chains else method.top_k
        total = method.depth + 2 if chains else method.total
        return Trees(Dynamic(width, method.depth, total), (False, "distinct"), Recursive())
    default = (1,) * len(DRAWN) if chains else DRAWN
    return Trees(*drawn_trees(method.rule, method.tree or default, target))


def drawn_trees(
    rule: str, tree: TreeName, target: VLMTarget
) -> tuple[TreeShape, tuple[bool, Siblings], Rule]:
    """A ``tree`` of fixed shape for a ``rule``; raises ``ValueError`` unless they fit together."""
    verification = Verification.of(rule, target)
    shape = static_tree(tree, target.device)
    target.check_tree(shape.width)
    return shape, verification.drawn, verification.rule


def check_unguided(method: Grown, target: VLMTarget) -> None:
    """Raise ``ValueError`` under guidance, whose unconditional rows these drafters cannot read."""
    if target.branches > 1:
        raise ValueError(
            f"cfg must be at most 1 for method {method.name!r}; leave it out, or use method ar"
        )
