"""Matching: each token of a text is drawn by a uniform of its own, and drafts equal to it are
accepted.

Shape letters: B batch, N nodes, D deepest level, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.core.randomness import UniformSource, categorical
from specmm.core.tree import DraftTree
from specmm.verify.exact import PointMass
from specmm.verify.rule import VerifyResult


@dataclass(frozen=True)
class Matching(PointMass):
    """A draft is kept if it is the token that plain decoding draws with the uniform of its place.

    It accepts a point mass x with probability p(x), as :class:`PointMass` does, and takes only
    point masses. But :class:`PointMass` takes a uniform for each node, so that a seed's tokens
    depend on the drafts; here they are always those of plain decoding. Siblings must be different
    tokens.
    """

    name: str = "matching"

    def result(self, tree: DraftTree, p: Tensor, uniforms: UniformSource) -> VerifyResult:
        """The round's outcome under the target's ``p`` [B, N, V]. ``uniforms`` are those of the
        tokens that come next, of which the round takes as many as it keeps.
        """
        shape = tree.shape
        own = uniforms.draw(shape.depth + 1)  # [B, D + 1]
        if shape.is_chain:
            return _along(tree, categorical(p, own))
        drawn = categorical(p, own.gather(1, shape.depths.expand(len(p), -1)))  # [B, N]
        parents = shape.parents.clamp(min=0).expand_as(drawn)
        right = drawn.gather(1, parents) == tree.tokens
        right[:, 0] = True
        if tree.sizes is not None:
            right &= shape.depths < tree.sizes[:, None]
        kept_nodes = ~(shape.ancestors & ~right[:, None]).any(-1)  # right, and all above it
        order = torch.where(kept_nodes, shape.depths, shape.depth + 1)
        path = torch.full_like(drawn[:, :1], -1).repeat(1, shape.depth + 2)
        nodes = torch.arange(shape.size, device=path.device).expand_as(order)
        path = path.scatter_(1, order, nodes)[:, : shape.depth + 1]
        kept = kept_nodes.sum(-1)
        last = path.gather(1, kept[:, None] - 1)
        return VerifyResult(path, kept, drawn.gather(1, last)[:, 0])


def _along(tree: DraftTree, drawn: Tensor) -> VerifyResult:
    """The outcome for a chain, after whose nodes the tokens ``drawn`` [B, N] come: in a fifth of
    the time.
    """
    depths = tree.shape.depths  # [1, N]
    right = drawn[:, :-1] == tree.tokens[:, 1:]
    if tree.sizes is not None:
        right &= depths[:, 1:] < tree.sizes[:, None]
    kept = right.cumprod(1).sum(1) + 1
    path = torch.where(depths < kept[:, None], depths, -1)
    return VerifyResult(path, kept, drawn.gather(1, kept[:, None] - 1)[:, 0])
