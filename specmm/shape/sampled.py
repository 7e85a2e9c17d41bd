"""Sampled siblings: k tokens per parent drawn from the draft distribution, and the distribution
each was drawn from.

These are the drafts ratio rules need to be exact (recursive rejection, K-SEQ, traversal). Without
replacement, sibling j's distribution is q with its j - 1 earlier sibling siblings removed and
renormalised (RSD, arXiv 2402.14160; Sequoia, 2402.12374); once q is exhausted, it is uniform over
the untried tokens.

Shape letters: B batch, P parents, k siblings, V vocabulary. Leading shapes are free: [..., V]
serves as [B, P, V].
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from specmm.randomness import UniformSource, categorical

Siblings: TypeAlias = Literal["distinct", "independent", "likeliest and one"]


def sample_siblings(probs: Tensor, k: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, P, k] drawn without replacement from ``probs`` [B, P, V], and each sibling's
    distribution [B, P, k, V].

    An exponential race (Efraimidis and Spirakis, 2006; Gumbel top-k is its logarithm): token x
    finishes at E_x / q(x), and the first k to finish are k draws without replacement in order.
    ``uniforms`` [B, P, V] in [0, 1) give the E_x; pass float64 ones where float32's steps of 2**-24
    are too coarse for the distribution.
    """
    if uniforms.shape != probs.shape:
        raise ValueError(
            f"uniforms must be {list(probs.shape)} like the distribution, got {list(uniforms.shape)}"
        )
    _check(probs, k)
    race = uniforms.log().neg_().sub_(_half_step(uniforms.dtype))
    keys = torch.where(
        probs > 0, probs / race, -race
    )  # zero-probability tokens run after all others, among equals
    tokens = keys.topk(k).indices
    return tokens, sibling_probs(probs, tokens)


def draw_siblings(
    probs: Tensor, k: int, uniforms: UniformSource, how: Siblings = "distinct"
) -> tuple[Tensor, Tensor]:
    """Tokens [B, P, k] drawn from ``probs`` [B, P, V] and their distributions [B, P, k, V], as a
    rule wants them.

    ``"distinct"`` as :func:`sample_siblings`, ``"independent"`` as :func:`sample_siblings_iid`,
    ``"likeliest and one"`` as :func:`likeliest_and_one`. A parent with one child takes one uniform.
    """
    parents = probs.shape[1]
    if k == 1:
        return categorical(probs, uniforms.draw(parents))[..., None], probs[:, :, None]
    if how == "independent":
        return sample_siblings_iid(probs, uniforms.draw(parents * k).view(-1, parents, k))
    if how == "likeliest and one":
        return likeliest_and_one(probs, k, uniforms.draw(parents))
    return sample_siblings(probs, k, uniforms.draw(probs[0].numel()).view(probs.shape))


def likeliest_and_one(dist: Tensor, k: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token drawn outside the k - 1 likeliest of ``probs`` [B, P, V], then those: [B, P, k].

    The distributions [B, P, k, V] hold at rank 0 what is left of ``probs`` without the likeliest,
    renormalised (uniform over the others where nothing is left); the rows of the others say
    nothing, for they are chosen (greedy multi-draft, Hu et al. 2025). ``uniforms`` [B, P] in [0,
    1).
    """
    _check(dist, k)
    likeliest = dist.topk(k - 1).indices
    rest = dist.scatter(-1, likeliest, 0.0)
    others = torch.ones_like(dist).scatter_(-1, likeliest, 0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, others)
    rest = rest / rest.sum(-1, keepdim=True)
    one = categorical(rest, uniforms)
    probs = rest.unsqueeze(-2).expand(*dist.shape[:-1], k, dist.shape[-1])
    return torch.cat([one.unsqueeze(-1), likeliest], dim=-1), probs


def sample_siblings_iid(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, P, k] drawn with replacement from ``probs`` [B, P, V] and their distributions, an
    expanded view [B, P, k, V].

    ``uniforms`` [B, P, k] in [0, 1), one a sibling (SpecInfer, SpecTr).
    """
    if uniforms.shape[:-1] != probs.shape[:-1]:
        raise ValueError(
            f"uniforms must be {list(probs.shape[:-1])} + [k], got {list(uniforms.shape)}"
        )
    normal = probs / probs.sum(-1, keepdim=True)
    return _invert(normal, uniforms), normal.unsqueeze(-2).expand(*uniforms.shape, probs.shape[-1])


def sibling_probs(dist: Tensor, tokens: Tensor) -> Tensor:
    """Distribution of each of ``tokens`` [B, P, k] given its earlier sibling siblings, [B, P, k,
    V], for draws without replacement.

    Needs tokens of positive probability to come before those of zero, as any draw without
    replacement has them.
    """
    k = tokens.shape[-1]
    exhausted = (dist.gather(-1, tokens) <= 0).to(
        dist.dtype
    )  # a token of zero probability shows that q was used up
    probs = dist.unsqueeze(-2) + exhausted.unsqueeze(-1)  # [B, P, k, V]
    for earlier in range(k - 1):
        younger = tokens[..., earlier, None, None].expand(*tokens.shape[:-1], k - 1 - earlier, 1)
        probs[..., earlier + 1 :, :].scatter_(-1, younger, 0)
    return probs.div_(probs.sum(-1, keepdim=True))


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Indices [..., k] by inverting the cumulative sum of ``probs`` [..., V] at ``uniforms`` [...,
    k].
    """
    cumulative = probs.cumsum(-1, dtype=torch.promote_types(probs.dtype, uniforms.dtype))
    wanted = uniforms * cumulative[..., -1:]
    return torch.searchsorted(cumulative, wanted, right=True).clamp_(max=probs.shape[-1] - 1)


def _half_step(dtype: torch.dtype) -> float:
    """Half a step of the uniforms: centres -log(u) on the values that u stands for; the largest u
    keeps it positive.
    """
    return torch.finfo(dtype).eps / 4


def _check(probs: Tensor, k: int) -> None:
    if not 1 <= k <= probs.shape[-1]:
        raise ValueError(f"k must be in [1, {probs.shape[-1]}] (the vocabulary), got {k}")
