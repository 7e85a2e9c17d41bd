"""Where a block drafter's chain ends early, since the drafter is unsure.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.shape.blocks import acceptance_bound
from specmm.tree import DraftTree, TreeShape

GAMMA = 0.1  # of AdaEDL's bound: the KL divergence to the target over the entropy of a draft


def ends(length: int) -> tuple[int, ...]:
    """Depths at which a chain of ``length`` drafts may end: few, so that the host waits for few."""
    return tuple(sorted({max(1, length // 5), max(1, length // 2), length}))


def _cut(chain: TreeShape) -> dict[int, TreeShape]:
    """The ``chain`` and those that end before it does, by depth."""
    shorter = ends(chain.depth)[:-1]
    made = {depth: TreeShape.chain(depth, chain.parents.device) for depth in shorter}
    return made | {chain.depth: chain}


class Gate:
    """Whether a chain goes on, by how sure the drafter is.

    A draft is reached and kept with a chance of about the product, over its level and those before,
    of AdaEDL's bound on the acceptance (Agrawal et al., arXiv 2410.18351). A chain ends, at one of
    the depths of :func:`ends`, in front of a draft for which that is below ``sure``. It looks at
    the distribution of the next token before that is drawn, so that decoding stays exact.

    A program cannot end midway: ``later`` is set while it drafts the whole chain, which is then
    ended (:meth:`ended`) in front of the same draft.
    """

    later = False

    def __init__(self, shape: TreeShape, sure: float) -> None:
        if shape.width != 1:
            raise ValueError(f"sure needs a chain, such as chain({shape.depth}), got a wider tree")
        self.sure = sure
        self.shapes = shape.once("ends", _cut)  # by depth
        self.last = max(ends(shape.depth)[:-1], default=0)

    def open(self) -> None:
        """A chain begins."""
        self.chance: Tensor | float = 1.0
        self.chances: list[Tensor] = []  # of going on after each of the depths but the last

    def shuts(self, dist: Tensor, depth: int) -> bool:
        """Whether the chain ends after ``depth`` drafts, in front of one of ``dist`` [1, 1, V]."""
        if depth > self.last:
            return False
        self.chance = self.chance * acceptance_bound(dist, GAMMA)
        if depth not in self.shapes:
            return False
        if self.later:
            self.chances.append(self.chance)
            return False
        return bool(self.chance < self.sure)

    def ended(self, tree: DraftTree) -> DraftTree:
        """The part of the whole chain ``tree``, drafted while ``later``, that is to be kept."""
        shut = (torch.stack(self.chances) < self.sure).flatten().tolist() if self.chances else []
        for shape, ends_here in zip(self.shapes.values(), shut, strict=False):
            if ends_here:
                probs = None if tree.probs is None else tree.probs[:, : shape.size]
                return DraftTree(tree.tokens[:, : shape.size], shape, probs)
        return tree
