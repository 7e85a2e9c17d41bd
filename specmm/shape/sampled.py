"""Sampled siblings: k tokens per parent drawn from the draft law, and the law each was drawn from.

These are the drafts ratio rules need to be exact (recursive rejection, K-SEQ, traversal). Without replacement, sibling
j's law is q with its j - 1 elder siblings removed and renormalised (RSD, arXiv 2402.14160; Sequoia, 2402.12374); once
q is exhausted, it is uniform over the untried tokens.

Shape letters: B batch, P parents, k siblings, V vocabulary. Leading shapes are free: [..., V] serves as [B, P, V].
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from specmm.randomness import Dice, categorical

Siblings: TypeAlias = Literal["distinct", "independent", "likeliest and one"]


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


def draw_siblings(law: Tensor, k: int, uniforms: Dice, how: Siblings = "distinct") -> tuple[Tensor, Tensor]:
    """Tokens [B, P, k] drawn from ``law`` [B, P, V] and their laws [B, P, k, V], as a rule wants them.

    ``"distinct"`` as :func:`sample_siblings`, ``"independent"`` as :func:`sample_siblings_iid`,
    ``"likeliest and one"`` as :func:`likeliest_and_one`. A parent with one child takes one uniform.
    """
    parents = law.shape[1]
    if k == 1:
        return categorical(law, uniforms.draw(parents))[..., None], law[:, :, None]
    if how == "independent":
        return sample_siblings_iid(law, uniforms.draw(parents * k).view(-1, parents, k))
    if how == "likeliest and one":
        return likeliest_and_one(law, k, uniforms.draw(parents))
    return sample_siblings(law, k, uniforms.draw(law[0].numel()).view(law.shape))


def likeliest_and_one(law: Tensor, k: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token drawn outside the k - 1 likeliest of ``law`` [B, P, V], then those: [B, P, k].

    The laws [B, P, k, V] hold at rank 0 what is left of ``law`` without the likeliest, renormalised
    (uniform over the others where nothing is left); the rows of the others say nothing, for they
    are chosen (greedy multi-draft, Hu et al. 2025). ``uniforms`` [B, P] in [0, 1).
    """
    _check(law, k)
    likeliest = law.topk(k - 1).indices
    rest = law.scatter(-1, likeliest, 0.0)
    others = torch.ones_like(law).scatter_(-1, likeliest, 0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, others)
    rest = rest / rest.sum(-1, keepdim=True)
    one = categorical(rest, uniforms)
    laws = rest.unsqueeze(-2).expand(*law.shape[:-1], k, law.shape[-1])
    return torch.cat([one.unsqueeze(-1), likeliest], dim=-1), laws


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
