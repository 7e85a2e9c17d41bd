"""Token recycling (arXiv 2408.08696): drafts the tokens that the target last found likeliest after
each token.

A row stores K successors for each token of the vocabulary: at first tokens that followed it in the
prompt, then the target's likeliest tokens at every scored node, accepted or not. A tree of fixed
shape is filled from them. Drafts are point masses, so any is exact.

Shape letters: B batch, N nodes, K tokens kept, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch

from specmm import methods
from specmm.core.drafter import Feedback
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.drafting import Assembly
from specmm.hf.models.target import VLMTarget
from specmm.shape.trees import static_tree
from specmm.verify import Recursive

# how often the target's token is the one of each rank, by which the default tree is made
ACCEPTANCE = (0.5, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)
DEPTH = 6
UNKNOWN = -1


class RecycleDrafter:
    """Trees of ``shape`` in which the node of rank r after a token is its r-th stored successor.

    Each row has its own table, so that no row depends on the others.
    """

    state: ClassVar[tuple[str, ...]] = ("after",)

    def __init__(self, target: VLMTarget, shape: TreeShape) -> None:
        self.target = target
        self.shape = shape
        self.max_nodes = shape.size
        self.max_depth = shape.depth
        depths = shape.depths[0].tolist()
        self.levels = [  # nodes, parents and ranks of each level
            (nodes, shape.parents[0, nodes], shape.ranks[0, nodes])
            for depth in range(1, shape.depth + 1)
            for nodes in [[n for n, d in enumerate(depths) if d == depth]]
        ]
        target.likeliest = max(1, shape.width)
        self.banned = torch.tensor(target.image_tokens, dtype=torch.int64, device=target.device)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Read the prompts."""
        self.clock = clock
        size = (len(feedback.token), self.target.family.vocabulary, self.target.likeliest)
        self.after = torch.empty(size, dtype=torch.int32, device=self.target.device)  # [B, V, K]
        for row, tokens in enumerate(self.target.prompt.rows()):
            self._read(row, tokens)

    def start_row(self, row: int) -> None:
        self._read(row, self.target.started.prompt.rows()[0])

    def _read(self, row: int, prompt: list[int]) -> None:
        """Store for ``row`` which tokens last followed each token of its ``prompt``."""
        self.after[row] = UNKNOWN
        if not self.target.family.shared:  # the prompt's ids are of other tokens
            return
        banned = frozenset(self.target.image_tokens)
        pairs = {a: b for a, b in pairwise(prompt) if not banned & {a, b}}
        tokens = torch.tensor(list(pairs), dtype=torch.int64, device=self.after.device)
        self.after[row, tokens, 0] = torch.tensor(
            list(pairs.values()), dtype=torch.int32, device=self.after.device
        )

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The tree after ``feedback.token``; unknown successors are the root's (any would do)."""
        with self.clock("draft"):
            self._learn(feedback)
            root = feedback.token[:, None]
            tokens = root.repeat(1, self.shape.size)
            row = torch.arange(len(root), device=root.device)[:, None]
            for nodes, parents, ranks in self.levels:
                children = self.after[row, tokens[:, parents], ranks].long()
                tokens[:, nodes] = torch.where(children == UNKNOWN, root, children)
        return DraftTree(tokens, self.shape)

    def _learn(self, feedback: Feedback) -> None:
        """Store the likeliest tokens at all nodes of the last round. Among nodes with the same
        token the last one counts, and accepted nodes before others.
        """
        best = feedback.output.likeliest
        if best is None or feedback.tree is None or feedback.result is None:
            return
        tokens = feedback.tree.tokens  # [B, N]
        path = feedback.result.path
        order = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        order += torch.zeros_like(order).scatter_add_(
            1, path.clamp(min=0), tokens.shape[1] * (path >= 0).long()
        )
        same = tokens[:, :, None] == tokens[:, None]  # [B, N, N]
        chosen = torch.where(same, order[:, None], -1).argmax(-1)  # [B, N]
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        best = best.masked_fill(torch.isin(best, self.banned), UNKNOWN)[row, chosen].int()
        goes_on = feedback.continued(torch.ones_like(same[..., 0]))
        self.after[row, tokens] = torch.where(goes_on[..., None], best, self.after[row, tokens])


def make(
    method: methods.Recycle, target: VLMTarget, drafter: object, tokenizer: object
) -> Assembly:
    """The parts of method ``recycle``; if drafts must be chains, the default tree is a chain.

    Raises ``ValueError`` for trees that do not fit the target.
    """
    usual = f"chain({DEPTH})" if target.family.chains_only else f"sequoia({method.total})"
    shape = static_tree(method.tree or usual, target.device, [ACCEPTANCE] * DEPTH)
    target.check_tree(shape.width)
    return Assembly(RecycleDrafter(target, shape), Recursive())
