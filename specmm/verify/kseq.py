"""K-SEQ (SpecTr, Sun et al. 2023), and the bound on what any exact rule can keep.

K-SEQ tests siblings drawn independently from one distribution, each with the same odds.

Shape letters: B batch, P families, F families tested, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specmm.core.tree import DraftTree
from specmm.shape.trees import Siblings
from specmm.verify.exact import families_of, finished, normalised, take, trials
from specmm.verify.rule import Decisions


@dataclass(frozen=True)
class KSeq:
    """Accept with min(1, p / (rho q)).

    After k rejections the next token follows p - min(p / rho, q) (1 - (1 - beta)^k) / beta, where
    beta = sum min(q, p / rho) is the chance of one draft. Any rho from rho*, the root of
    1 - (1 - beta)^k = rho beta, to k keeps the target's distribution, and rho* accepts most.
    ``steps`` evaluations approach it from above, so the rule is exact however few they are.
    """

    exact: ClassVar[bool] = True
    siblings: ClassVar[Siblings] = "independent"
    steps: int = 8
    name: str = "k-seq"

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """See :class:`specmm.verify.rule.Rule`; siblings share the distribution of their rank 0.

        Raises ``ValueError`` for a tree without probs.
        """
        walk = families_of(tree.shape)
        if not walk.ranks:
            return finished(tree, p, [], p[:, :0])
        if tree.probs is None:
            raise ValueError("probs must hold the distribution of the siblings for K-SEQ, got None")
        target = p.index_select(1, walk.inner)
        tiny = torch.finfo(p.dtype).tiny
        drafts = list(trials(tree, walk))
        probs = tree.probs[:, :0] if drafts[0].probs is None else drafts[0].probs  # [B, P, V]
        rho = self.odds(target, probs, drafts[0].sizes)
        chances = []
        for trial in drafts:
            count = trial.token.shape[1]
            own = take(target[:, :count], trial.token)
            drawn = rho[:, :count] * take(probs[:, :count], trial.token)
            chances.append((own / drawn.clamp(min=tiny)).clamp(max=1))
        rest = normalised(_residual(target, probs, rho, drafts[0].sizes), target)
        if walk.real is None:
            return finished(tree, p, chances, rest)
        chances = [
            chance.masked_fill(~real, 0.0) for chance, real in zip(chances, walk.real, strict=True)
        ]
        return finished(tree, p, chances, torch.where(walk.real[0][..., None], rest, target))

    def odds(self, p: Tensor, q: Tensor, sizes: Tensor) -> Tensor:
        """rho [B, P], not below rho*, for ``sizes`` [1 or B, P] drafts of ``q`` [B, P, V].

        By false position with the Illinois correction.
        """
        high = sizes.clamp(min=1).to(p.dtype).expand(p.shape[:2])
        low = torch.ones_like(high)
        f_low = _surplus(p, q, low, sizes)
        f_high = _surplus(p, q, high, sizes)
        side = torch.zeros_like(high)  # +1 where the last point became ``high``, -1 where ``low``
        for _ in range(self.steps):
            gap = (f_high - f_low).clamp(min=torch.finfo(p.dtype).tiny)
            rho = high - (high - low) * (f_high / gap).clamp(0, 1)
            f = _surplus(p, q, rho, sizes)
            above = f >= 0
            # Illinois: the value at an end that stays twice counts half
            f_low = torch.where(above, f_low / (1 + side.clamp(min=0)), f)
            f_high = torch.where(above, f, f_high / (1 - side.clamp(max=0)))
            low = torch.where(above, low, rho)
            high = torch.where(above, rho, high)
            side = above.to(p.dtype) * 2 - 1
        return high


def _surplus(p: Tensor, q: Tensor, rho: Tensor, sizes: Tensor) -> Tensor:
    """rho beta - (1 - (1 - beta)^k) [B, P]: increasing in rho, zero at rho*."""
    beta = torch.minimum(p / rho[..., None], q).sum(-1)
    return rho * beta - 1 + (1 - beta).clamp(min=0) ** sizes


def _residual(p: Tensor, q: Tensor, rho: Tensor, sizes: Tensor) -> Tensor:
    """p - min(p / rho, q) (1 - (1 - beta)^k) / beta, [B, P, V]."""
    both = torch.minimum(p / rho[..., None], q)
    beta = both.sum(-1)
    scale = (1 - (1 - beta).clamp(min=0) ** sizes) / beta.clamp(min=torch.finfo(p.dtype).tiny)
    return (p - both * scale[..., None]).clamp_(min=0)


def ot_bound(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    """The largest probability [...] with which any exact rule keeps one of ``drafts`` samples.

    The samples of ``q`` [..., V] are independent, the target is ``p`` [..., V]. The bound, of
    optimal transport, is 1 + min over sets H of p(H) - q(H)^k (Hu et al. 2025); the best H takes
    tokens by ascending p / q. Computed in float64.
    """
    if drafts < 1:
        raise ValueError(f"drafts must be at least 1, got {drafts}")
    p = p.double()
    q = q.double()
    order = (p / q).nan_to_num(nan=torch.inf).argsort(-1)
    inside = p.gather(-1, order).cumsum(-1) - q.gather(-1, order).cumsum(-1) ** drafts
    return 1 + inside.amin(-1).clamp(max=0)
