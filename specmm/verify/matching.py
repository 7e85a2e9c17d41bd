"""Matching: each token of a text is drawn by its own uniform, and drafts equal to it are accepted.

Shape letters: B batch, N nodes, D deepest level, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specmm.core.randomness import UniformSource, categorical
from specmm.core.tree import DraftTree
from specmm.verify.exact import PointMass
from specmm.verify.rule import VerifyResult, selected


@dataclass(frozen=True)
class Matching(PointMass):
    """A draft is kept if it equals the token that plain decoding draws with its place's uniform.

    It accepts a point mass x with probability p(x), as :class:`PointMass` does, and takes only
    point masses. But :class:`PointMass` takes a uniform for each node, so a seed's tokens depend on
    the drafts; here they always equal plain decoding's. Siblings must be different tokens.
    """

    name: str = "matching"

    def result(self, tree: DraftTree, p: Tensor, uniforms: UniformSource) -> VerifyResult:
        """The round's outcome under the target's ``p`` [B, N, V]. ``uniforms`` belong to the next
        tokens; the round uses as many as it accepts tokens.
        """
        shape = tree.shape
        row_uniforms = uniforms.draw(shape.depth + 1)  # [B, D + 1]
        drawn = categorical(p, row_uniforms.gather(1, shape.depths.expand(len(p), -1)))  # [B, N]
        parents = shape.parents.clamp(min=0).expand_as(drawn)
        hit = drawn.gather(1, parents) == tree.tokens
        hit[:, 0] = True
        if tree.sizes is not None:
            hit &= shape.depths < tree.sizes[:, None]
        path, kept, last = selected(shape, hit)
        return VerifyResult(path, kept, drawn.gather(1, last[:, None])[:, 0])
