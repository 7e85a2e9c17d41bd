"""The tokens each row has seen, for processors that depend on them: repetition penalty and
transformers' own.

A node of a draft tree has seen its row's committed tokens, its ancestors and itself.

Shape letters: B batch, S room for tokens, N nodes, M most tokens appended, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.tree import DraftTree


class History:
    """Committed tokens [B, S] of which each row's first ``lengths`` [B] count; the prompt's are
    among them.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor, room: int) -> None:
        self.tokens = torch.nn.functional.pad(
            tokens, (0, room + 1)
        )  # the last column takes what does not count
        self.lengths = lengths.clone()

    def take(self, row: int, other: History) -> None:
        """What the only row of ``other``, which must fit, has committed takes the place of
        ``row``'s.
        """
        self.tokens[row, : other.tokens.shape[1]] = other.tokens[0]
        self.lengths[row] = other.lengths[0]

    def append(self, tokens: Tensor, kept: Tensor) -> None:
        """Take in the first ``kept`` [B] of ``tokens`` [B, M]."""
        order = torch.arange(tokens.shape[1], device=tokens.device)
        where = torch.where(
            order < kept[:, None], self.lengths[:, None] + order, self.tokens.shape[1] - 1
        )
        self.tokens.scatter_(1, where, tokens)
        self.lengths += kept

    def seen(self, tree: DraftTree | None, vocabulary: int) -> Tensor:
        """Whether each node of ``tree`` has seen each token [B, N, V]; without a tree, what the row
        has, [B, 1, V].
        """
        row = self.tokens.new_zeros(len(self.tokens), vocabulary, dtype=torch.bool)
        valid = (
            torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]
        )
        valid &= self.tokens < vocabulary
        row.scatter_reduce_(1, self.tokens.where(valid, 0), valid, "amax")
        if tree is None:
            return row[:, None]
        own = tree.tokens[:, :, None]  # stands for nodes that are no ancestors
        path = torch.where(tree.shape.ancestors, tree.tokens[:, None], own)  # [B, N, N]
        return row[:, None].repeat(1, tree.shape.size, 1).scatter_(-1, path, True)

    def sequence(self, row: int) -> Tensor:
        """The committed tokens [S'] of a row."""
        return self.tokens[row, : int(self.lengths[row])]
