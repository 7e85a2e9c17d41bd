"""Sampled siblings: k tokens per parent drawn from the draft law, and the law each was drawn from.

These are the drafts ratio rules need to be exact (recursive rejection, K-SEQ, traversal). Without replacement, sibling
j's law is q with its j - 1 elder siblings removed and renormalised (RSD, arXiv 2402.14160; Sequoia, 2402.12374); once
q is exhausted, it is uniform over the untried tokens.

Shape letters: B batch, P parents, k siblings, V vocabulary. Leading shapes are free: [..., V] serves as [B, P, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.randomness import Dice, categorical


def sample_siblings(law: Tensor, k: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, P, k] drawn without replacement from ``law`` [B, P, V], and each sibling's law [B, P, k, V].

    An exponential race (Efraimidis and Spirakis, 2006; Gumbel top-k is its logarithm): token x finishes at E_x / q(x),
    and the first k to finish are k draws without replacement in order. ``uniforms`` [B, P, V] in [0, 1) give the E_x;
    pass float64 ones where float32's steps of 2**-24 are too coarse for the law.
    """
    if uniforms.shape != law.shape:
        raise ValueError(f"uniforms must be {list(law.shape)} like the law, got {list(uniforms.shape)}")
    _check(law, k)
    race = uniforms.log().neg_().sub_(_half_step(uniforms.dtype))
    keys = torch.where(law > 0, law / race, -race)  # zero-probability tokens run after all others, among equals
    tokens = keys.topk(k).indices
    return tokens, sibling_laws(law, tokens)


def draw_siblings(law: Tensor, k: int, uniforms: Dice) -> tuple[Tensor, Tensor]:
    """As :func:`sample_siblings`, drawing the uniforms that it takes: one a parent where there is one child."""
    if k == 1:
        return categorical(law, uniforms.draw(law.shape[1]))[..., None], law[:, :, None]
    return sample_siblings(law, k, uniforms.draw(law[0].numel()).view(law.shape))


def sample_siblings_iid(law: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, P, k] drawn with replacement from ``law`` [B, P, V] and their laws, an expanded view [B, P, k, V].

    ``uniforms`` [B, P, k] in [0, 1), one a sibling (SpecInfer, SpecTr).
    """
    if uniforms.shape[:-1] != law.shape[:-1]:
        raise ValueError(f"uniforms must be {list(law.shape[:-1])} + [k], got {list(uniforms.shape)}")
    normal = law / law.sum(-1, keepdim=True)
    return _invert(normal, uniforms), normal.unsqueeze(-2).expand(*uniforms.shape, law.shape[-1])


def sibling_laws(law: Tensor, tokens: Tensor) -> Tensor:
    """Law of each of ``tokens`` [B, P, k] given its elder siblings, [B, P, k, V], for draws without replacement.

    Needs tokens of positive probability to come before those of zero, as any draw without replacement has them.
    """
    k = tokens.shape[-1]
    exhausted = (law.gather(-1, tokens) <= 0).to(law.dtype)  # a token of zero probability shows that q was used up
    laws = law.unsqueeze(-2) + exhausted.unsqueeze(-1)  # [B, P, k, V]
    for elder in range(k - 1):
        younger = tokens[..., elder, None, None].expand(*tokens.shape[:-1], k - 1 - elder, 1)
        laws[..., elder + 1 :, :].scatter_(-1, younger, 0)
    return laws.div_(laws.sum(-1, keepdim=True))


def _invert(law: Tensor, uniforms: Tensor) -> Tensor:
    """Indices [..., k] by inverting the cumulative sum of ``law`` [..., V] at ``uniforms`` [..., k]."""
    cumulative = law.cumsum(-1, dtype=torch.promote_types(law.dtype, uniforms.dtype))
    wanted = uniforms * cumulative[..., -1:]
    return torch.searchsorted(cumulative, wanted, right=True).clamp_(max=law.shape[-1] - 1)


def _half_step(dtype: torch.dtype) -> float:
    """Half a step of the uniforms: centres -log(u) on the values that u stands for; the largest u keeps it positive."""
    return torch.finfo(dtype).eps / 4


def _check(law: Tensor, k: int) -> None:
    if not 1 <= k <= law.shape[-1]:
        raise ValueError(f"k must be in [1, {law.shape[-1]}] (the vocabulary), got {k}")
