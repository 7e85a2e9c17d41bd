"""Restricts a head to the rows of the tokens that may ever be drawn.

A model whose picture tokens share a vocabulary with its words (Emu3: 32,769 of 184,622 entries)
scores all of them at every step, although most are never allowed.

Shape letters: C width, V vocabulary, W allowed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specmm.hf.models.families import FewRows, few_rows

LEAST = 1024  # saving fewer rows gains nothing


class RestrictedHead(FewRows):
    """Logits [..., V] of states [..., C] from the rows ``ids`` [W] of ``head`` only; all other
    logits are the dtype's lowest number.
    """

    def __init__(self, head: nn.Linear, ids: Tensor) -> None:
        super().__init__(head, ids)
        self.vocabulary = head.out_features

    @property
    def weight(self) -> Tensor:
        """The rows that it uses [W, C]."""
        return self.few.weight

    def forward(self, states: Tensor) -> Tensor:
        few = self.scored(states)
        shape = (*few.shape[:-1], self.vocabulary)
        return few.new_full(shape, torch.finfo(few.dtype).min).index_copy_(-1, self.ids, few)


def restricted(head: Any, may_come: Tensor) -> Any:
    """``head``, restricted to its rows for tokens that ``may_come`` [V] if that saves most rows.

    Calls with the same weights share the rows.
    """
    count = int(may_come.sum())
    if type(head) is not nn.Linear or head.out_features - count < max(LEAST, count):
        return head  # a quantised one packs its rows
    weight = head.weight
    if weight.is_meta:  # accelerate brings the weight when the head runs
        return head
    ids = may_come.nonzero()[:, 0].to(weight.device)
    return few_rows(RestrictedHead, head, ids)
