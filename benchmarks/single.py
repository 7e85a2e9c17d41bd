"""One position: how often each rule keeps one of k drafts, on contexts of real generations.

Shape letters: M contexts, k drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Row
from specmm.core.randomness import Uniforms
from specmm.core.tree import DraftTree
from specmm.shape.trees import Siblings, draw_siblings, spine
from specmm.verify import (
    GreedyMultiDraft,
    Lantern,
    LanternPP,
    PointMass,
    Recursive,
    Rule,
    Traversal,
)
from specmm.verify.rule import Decisions

DRAWS = 8  # drafts are drawn so many times a context
DRAFTS = (1, 2, 4, 8)


class Recorder:
    """The given rule; records the target's and the drafter's probs at every root, M at most.

    Only every third of the first ``until`` rounds of a batch is recorded, in which no row can be
    finished yet.
    """

    name = "recorded"
    exact = True

    def __init__(self, rule: Rule, until: int, most: int = 512, every: int = 3) -> None:
        self.rule = rule
        self.until = until
        self.most = most
        self.every = every
        self.rounds = 0
        self.p: list[Tensor] = []
        self.q: list[Tensor] = []

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        """The rule's; a tree without drafts is the start of a batch."""
        if tree.probs is None or tree.shape.size == 1:
            self.rounds = 0
            return self.rule.decisions(tree, p, measure=measure)
        if self.rounds < self.until and self.rounds % self.every == 0:
            self.p.append(p[:, 0].clone())
            self.q.append(tree.probs[:, 1].clone())
        self.rounds += 1
        return self.rule.decisions(tree, p, measure=measure)

    def probs(self) -> tuple[Tensor, Tensor]:
        """p and q [M, V]."""
        return torch.cat(self.p)[: self.most], torch.cat(self.q)[: self.most]


def single_position(
    p: Tensor, q: Tensor, table: Tensor | None, drafts: Sequence[int] = DRAFTS
) -> list[Row]:
    """Mean acceptance by number of drafts and rule, with the bound of optimal transport.

    The bound is for independent drafts. ``p`` and ``q`` [M, V] are the target's and the drafter's
    distributions; ``table`` the nearest codes, for the relaxed rules.
    """
    overlap = float(torch.minimum(p, q).sum(-1).mean())
    rows = []
    for k in drafts:
        bound = float(ot_bound(p, q, k).mean())
        row: Row = {
            "drafts": k,
            "contexts": len(p),
            "overlap": overlap,
            "bound (independent drafts)": bound,
        }
        for name, kind, rule in _rules(table):
            if k > 1 or kind != "likeliest and one":
                row[name] = acceptance(rule, kind, p, q, k)
        rows.append(row)
    return rows


def ot_bound(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    """The largest probability [...] with which any exact rule keeps one of ``drafts`` samples.

    The samples of ``q`` [..., V] are independent, the target is ``p`` [..., V]. The bound, of
    optimal transport, is 1 + min over sets H of p(H) - q(H)^k (Hu et al. 2025); the best H takes
    tokens by ascending p / q. Computed in float64.
    """
    p = p.double()
    q = q.double()
    order = (p / q).nan_to_num(nan=torch.inf).argsort(-1)
    inside = p.gather(-1, order).cumsum(-1) - q.gather(-1, order).cumsum(-1) ** drafts
    return 1 + inside.amin(-1).clamp(max=0)


def _rules(table: Tensor | None) -> list[tuple[str, Siblings | None, Rule]]:
    found: list[tuple[str, Siblings | None, Rule]] = [
        ("point mass", None, PointMass()),
        ("recursive, with replacement", "independent", Recursive()),
        ("recursive, without replacement", "distinct", Recursive()),
        ("traversal", "distinct", Traversal()),
        ("greedy multi-draft", "likeliest and one", GreedyMultiDraft()),
    ]
    if table is not None:
        k = min(10, table.shape[1] - 1)
        found.append((f"lantern++ λ=2 k={k}", "distinct", LanternPP(table, k, 2.0)))
        wide = min(100, table.shape[1] - 1)
        found.append((f"lantern δ=0.1 k={wide}", "distinct", Lantern(table, wide, 0.1)))
        found.append((f"lantern δ=0.1 k={wide}, top k drafts", None, Lantern(table, wide, 0.1)))
    return found


@torch.inference_mode()
def acceptance(rule: Rule, kind: Siblings | None, p: Tensor, q: Tensor, k: int) -> float:
    """Mean chance that ``rule`` keeps one of ``k`` siblings from ``q`` [M, V], for target ``p``;
    of no ``kind`` are the likeliest tokens.
    """
    shape = spine((k,))
    probs_p = p[:, None].expand(-1, shape.size, -1)
    draws = 1 if kind is None else DRAWS
    total = 0.0
    for draw in range(draws):
        seed = torch.Generator().manual_seed(draw)
        uniforms = Uniforms(
            [
                torch.Generator().manual_seed(int(s))
                for s in torch.randint(2**40, (len(p),), generator=seed)
            ]
        )
        tokens, padded = q.topk(k).indices, None
        if kind is not None:
            drawn, probs = draw_siblings(q[:, None], k, uniforms, kind)
            tokens, padded = drawn[:, 0], F.pad(probs[:, 0], (0, 0, 1, 0))
        tokens = F.pad(tokens, (1, 0))
        chances = rule.decisions(DraftTree(tokens, shape, padded), probs_p).accept[:, 1:]
        total += float((1 - (1 - chances.double()).prod(-1)).mean())
    return total / draws
