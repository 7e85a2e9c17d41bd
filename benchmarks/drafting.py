"""Block drafters with siblings as other rules need them: independent, or top tokens and a sample.

Shape letters: B batch, P parents of a level, k siblings, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.core.randomness import Uniforms, categorical
from specmm.core.tree import TreeShape
from specmm.image_ar.tokens.drafters.block import BlockDrafter, BlockLevel
from specmm.shape.trees import sample_siblings, sample_siblings_iid


class IndependentDrafter(BlockDrafter):
    """Siblings drawn with replacement from one distribution (SpecInfer, SpecTr)."""

    def _draw(self, logits: Tensor, level: BlockLevel, uniforms: Uniforms) -> tuple[Tensor, Tensor]:
        probs = self.target.processor(logits)
        return _by_node(level, *draw_siblings("independent", probs, level.width, uniforms))


class GreedyDrafter(BlockDrafter):
    """The likeliest tokens and, at rank 0, one sample of the rest (greedy multi-draft)."""

    def _draw(self, logits: Tensor, level: BlockLevel, uniforms: Uniforms) -> tuple[Tensor, Tensor]:
        probs = self.target.processor(logits)
        return _by_node(level, *draw_siblings("greedy", probs, level.width, uniforms))


def _by_node(level: BlockLevel, tokens: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Nodes [B, n] of a level and their probs [B, n, V] from each parent's siblings [B, P, k]."""
    assert probs is not None
    tokens = tokens.flatten(1)
    probs = probs.flatten(1, 2)
    if level.pick is None:
        return tokens, probs
    return tokens.index_select(1, level.pick), probs.index_select(1, level.pick)


def draw_siblings(
    kind: str, dist: Tensor, k: int, uniforms: Uniforms
) -> tuple[Tensor, Tensor | None]:
    """Tokens [B, P, k] and their probs [B, P, k, V] (None: point masses), from ``dist`` [B, P, V].

    ``kind``: ``top``: the likeliest; ``without`` or ``independent``: samples without or with
    replacement; ``greedy``: a sample of what the k - 1 likeliest leave, then those.
    """
    parents = dist.shape[1]
    if kind == "top":
        return dist.topk(k).indices, None
    if kind == "independent":
        return sample_siblings_iid(dist, uniforms.draw(parents * k).view(-1, parents, k))
    if kind == "without":
        return sample_siblings(dist, k, uniforms.draw(dist[0].numel()).view(dist.shape))
    top = dist.topk(k - 1).indices
    rest = dist.scatter(-1, top, 0.0)
    rest = torch.where(
        rest.sum(-1, keepdim=True) > 0, rest, dist
    )  # nothing left: the sample repeats a chosen token
    rest = rest / rest.sum(-1, keepdim=True)
    sample = categorical(rest, uniforms.draw(parents))
    probs = dist.new_zeros(*dist.shape[:2], k, dist.shape[-1])
    probs[:, :, 0] = rest
    return torch.cat([sample[..., None], top], dim=-1), probs


def through_rank_one(widths: tuple[int, ...]) -> TreeShape:
    """A spine whose chain goes on below the likeliest token: rank 1 where there is one."""
    parents = [-1]
    node = 0
    for width in widths:
        first = len(parents)
        parents += [node] * width
        node = first + (width > 1)
    return TreeShape.from_parents(parents)


def widths_for(budget: int, levels: int, ratio: float) -> tuple[int, ...]:
    """Children by level of a spine of ``budget`` nodes, each ``ratio`` of the last, in ``levels``.

    Every level has at least one; 1 spreads the nodes evenly, less puts more of them on top.
    """
    depth = min(levels, budget)
    share = [ratio**d for d in range(depth)]
    spare = budget - depth
    widths = [1 + int(spare * s / sum(share)) for s in share]
    for d in range(budget - sum(widths)):
        widths[d % depth] += 1
    return tuple(widths)
