"""A head's rows of the tokens that may come at all.

A model that draws in the vocabulary of its words (Emu3: 184,622 entries, 32,769 of pictures) scores
all of them at every step, and most never may come.

Shape letters: C width, V vocabulary, W tokens that may come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specmm.core.derived import Derived, fact
from specmm.hf.models.families import rows_of

LEAST = 1024  # rows saved, below which nothing is gained


class RestrictedHead(nn.Module):
    """Logits [..., V] of states [..., C] by the rows ``ids`` [W] of ``head`` alone; the others' are
    the least number there is.
    """

    def __init__(self, head: nn.Linear, ids: Tensor) -> None:
        super().__init__()
        self.few = rows_of(head, ids)
        self.ids = ids
        self.vocabulary = head.out_features

    @property
    def weight(self) -> Tensor:
        """Its rows [W, C]."""
        return self.few.weight

    def forward(self, states: Tensor) -> Tensor:
        few = self.few(states.to(self.weight.dtype))
        shape = (*few.shape[:-1], self.vocabulary)
        return few.new_full(shape, torch.finfo(few.dtype).min).index_copy_(-1, self.ids, few)


def restricted(head: Any, may_come: Tensor) -> Any:
    """``head``, or its rows of the tokens that ``may_come`` [V] where that saves most of them.

    Calls with the same weights share the rows.
    """
    count = int(may_come.sum())
    if type(head) is not nn.Linear or head.out_features - count < max(LEAST, count):
        return head  # a quantised one packs its rows
    weight = head.weight
    if weight.is_meta:  # accelerate brings the weight when the head runs
        return head
    ids = may_come.nonzero()[:, 0].to(weight.device)
    made: Derived[RestrictedHead] = fact(head, ("rows", tuple(ids.tolist())), Derived)
    return made.of(list(head.parameters()), lambda: RestrictedHead(head, ids))
