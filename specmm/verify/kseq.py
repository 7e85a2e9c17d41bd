"""K-SEQ (SpecTr, Sun et al. 2023): siblings drawn independently from one distribution, each tested
with the same odds.

Shape letters: B batch, P families, F families tested, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.tree import DraftTree
from specmm.verify.families import finished, normalised, plan, take, trials
from specmm.verify.rule import Decisions


@dataclass(frozen=True)
class KSeq:
    """Accept with min(1, p / (rho q)); after k rejections draw from p - min(p / rho, q) (1 - (1 -
    beta)^k) / beta.

    beta = sum min(q, p / rho) is the chance of one draft. Any rho from rho*, the root of 1 - (1 -
    beta)^k = rho beta, to k keeps the target's distribution, and rho* accepts most. ``steps``
    evaluations close in on it from above, so the rule is exact however few they are.
    """

    steps: int = 8
    name: str = "k-seq"
    exact: bool = True

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """Decisions for the target's processed distributions ``p`` [B, N, V]; siblings share the
        distribution of their rank 0.
        """
        walk = plan(tree.shape)
        if not walk.ranks:
            return finished(tree, p, [], p[:, :0])
        if tree.probs is None:
            raise ValueError("probs must hold the distribution of the siblings for K-SEQ, got None")
        target, tiny = p.index_select(1, walk.inner), torch.finfo(p.dtype).tiny
        drafts = list(trials(tree, walk))
        probs = tree.probs[:, :0] if drafts[0].probs is None else drafts[0].probs  # [B, P, V]
        rho = self.odds(target, probs, drafts[0].sizes)
        chances = []
        for trial in drafts:
            count = trial.token.shape[1]
            drawn = rho[:, :count] * take(probs[:, :count], trial.token)
            chances.append(
                (take(target[:, :count], trial.token) / drawn.clamp(min=tiny)).clamp(max=1)
            )
        rest = normalised(_residual(target, probs, rho, drafts[0].sizes), target)
        if walk.real is None:
            return finished(tree, p, chances, rest)
        chances = [
            chance.masked_fill(~real, 0.0) for chance, real in zip(chances, walk.real, strict=True)
        ]
        return finished(tree, p, chances, torch.where(walk.real[0][..., None], rest, target))

    def odds(self, p: Tensor, q: Tensor, sizes: Tensor) -> Tensor:
        """rho [B, P], not below rho*, for k = ``sizes`` [1 or B, P] drafts of ``q`` [B, P, V]:
        false position.
        """
        high = sizes.clamp(min=1).to(p.dtype).expand(p.shape[:2])
        low = torch.ones_like(high)
        f_low, f_high = _surplus(p, q, low, sizes), _surplus(p, q, high, sizes)
        side = torch.zeros_like(high)  # +1 where the last point became ``high``, -1 where ``low``
        for _ in range(self.steps):
            gap = (f_high - f_low).clamp(min=torch.finfo(p.dtype).tiny)
            rho = high - (high - low) * (f_high / gap).clamp(0, 1)
            f = _surplus(p, q, rho, sizes)
            above = f >= 0
            f_low = torch.where(
                above, f_low / (1 + side.clamp(min=0)), f
            )  # an end kept twice counts half: Illinois
            f_high = torch.where(above, f, f_high / (1 - side.clamp(max=0)))
            low, high = torch.where(above, low, rho), torch.where(above, rho, high)
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
