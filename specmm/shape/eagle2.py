"""EAGLE-2's dynamic tree (arXiv 2406.16858): expand by path probability, then rerank globally.

A drafter drives it, one forward a level::

    beam = start(log_q, k)                        # [B, V] after the root
    for _ in range(levels):
        beam = step(beam, drafter(beam.tokens))   # [B, k, V] after each beam node
    tree = finish(beam, root, total)

The tree is a deterministic function of the prefix: its drafts are point masses, and only a
point-mass rule is exact.

Shape letters: B batch, k beam width (also children per node), V vocabulary, M pool (all candidates
so far), N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.core.sorting import largest
from specmm.core.tree import DraftTree, TreeShape


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree: beams of ``top_k`` over ``depth`` + 1 levels, reranked to ``total`` nodes."""

    top_k: int = 10
    depth: int = 4
    total: int = 59

    def __post_init__(self) -> None:
        most = 1 + self.top_k + self.depth * self.top_k**2
        if self.top_k < 1 or self.depth < 0 or not 2 <= self.total <= most:
            raise ValueError(
                f"total must be in [2, {most}] for top_k {self.top_k} and depth {self.depth}, "
                f"got {self.total}"
            )


@dataclass
class Beam:
    """The drafting state after some levels.

    ``tokens``, ``scores`` [B, k]: the nodes to feed next and their path log-probabilities.
    ``index`` [B, k]: their place in the pool. ``origin`` [B, k]: which node of the previous beam is
    the parent (0 at first), to gather hidden states and caches. ``mask`` [B, k, k * levels]: which
    beam nodes fed so far each may attend, itself included. ``pool_*`` [B, M]: every candidate, its
    score, and the pool index of its parent (-1: the root).
    """

    tokens: Tensor
    scores: Tensor
    index: Tensor
    origin: Tensor
    mask: Tensor
    pool_tokens: Tensor
    pool_scores: Tensor
    pool_parents: Tensor
    levels: int = 1


def expand(scores: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Path scores and draft ids [B, k, k] of the k best children of each beam node.

    ``scores`` [B, k] are the nodes' own, ``logprobs`` [B, k, V] the draft's log-probabilities after
    each.
    """
    best, ids = _topk(logprobs, scores.shape[1])
    # clamped, so that rounding never lifts a child above its parent
    return best.clamp(max=0) + scores.unsqueeze(-1), ids


def start(logprobs: Tensor, k: int, d2t: Tensor | None = None) -> Beam:
    """The first level: the k most probable tokens of ``logprobs`` [B, V] after the root.

    ``d2t`` [V] maps a draft vocabulary: target id = draft id + d2t[draft id] (EAGLE-3).
    """
    best, ids = _topk(logprobs, k)
    tokens = _target_ids(ids, d2t)
    index = torch.arange(k, device=tokens.device).expand_as(tokens)
    mask = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
    none = torch.full_like(tokens, -1)
    return Beam(tokens, best, index, torch.zeros_like(tokens), mask, tokens, best, none)


def step(beam: Beam, logprobs: Tensor, d2t: Tensor | None = None) -> Beam:
    """One more level from ``logprobs`` [B, k, V] after the beam's nodes.

    All k * k children join the pool, the best k of them make the next beam.
    """
    k = beam.tokens.shape[1]
    if logprobs.shape[:2] != beam.tokens.shape:
        raise ValueError(
            f"logprobs must be [B, k, V] for a beam of {list(beam.tokens.shape)}, "
            f"got {list(logprobs.shape)}"
        )
    scores, ids = expand(beam.scores, logprobs)
    scores = scores.flatten(1)
    tokens = _target_ids(ids.flatten(1), d2t)
    best = scores.topk(k)
    origin = best.indices // k
    eye = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
    inherited = beam.mask.gather(1, origin.unsqueeze(-1).expand_as(beam.mask))
    return Beam(
        tokens=tokens.gather(1, best.indices),
        scores=best.values,
        index=best.indices + beam.pool_tokens.shape[1],
        origin=origin,
        mask=torch.cat([inherited, eye], dim=-1),
        pool_tokens=torch.cat([beam.pool_tokens, tokens], dim=1),
        pool_scores=torch.cat([beam.pool_scores, scores], dim=1),
        pool_parents=torch.cat([beam.pool_parents, beam.index.repeat_interleave(k, 1)], dim=1),
        levels=beam.levels + 1,
    )


def finish(beam: Beam, root: Tensor, total: int) -> DraftTree:
    """The tree of ``total`` nodes: ``root`` [B] and the ``total`` - 1 best of the pool."""
    bounds = {"depth": beam.levels, "width": beam.tokens.shape[1]}
    drafts, shape = rerank(beam.pool_scores, beam.pool_parents, beam.pool_tokens, total, **bounds)
    return DraftTree(torch.cat([root.unsqueeze(1), drafts], dim=1), shape)


def rerank(
    pool_scores: Tensor,
    pool_parents: Tensor,
    pool_tokens: Tensor,
    total: int,
    *,
    depth: int,
    width: int,
) -> tuple[Tensor, TreeShape]:
    """The best ``total`` - 1 of a pool [B, M]: tokens in pool order, and the shape with a root.

    Parents must precede their children in the pool and score at least as much. Ties go to the
    earlier candidate, so a node is never kept without its parent. ``depth`` and ``width`` are the
    pool's bounds.
    """
    count = total - 1
    if not 1 <= count <= pool_scores.shape[1]:
        raise ValueError(
            f"total must be in [2, {pool_scores.shape[1] + 1}] for this pool, got {total}"
        )
    order = pool_scores.sort(dim=1, descending=True, stable=True).indices
    best = order[:, :count].sort(dim=1).values
    parents = pool_parents.gather(1, best)
    nodes = torch.searchsorted(best, parents) + 1
    nodes = torch.where(parents < 0, 0, nodes)
    nodes = torch.nn.functional.pad(nodes, (1, 0), value=-1)
    shape = TreeShape(nodes, depth=min(depth, count), width=min(width, count))
    return pool_tokens.gather(1, best), shape


def _topk(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if not 1 <= k <= logprobs.shape[-1]:
        raise ValueError(
            f"beam width must be in [1, {logprobs.shape[-1]}] (the draft vocabulary), got {k}"
        )
    return largest(logprobs, k)


def _target_ids(ids: Tensor, d2t: Tensor | None) -> Tensor:
    return ids if d2t is None else ids + d2t[ids]
