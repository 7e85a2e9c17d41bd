"""Penalties of OpenAI's protocol for tokens that an answer already holds.

Shape letters: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from specmm.extending.kinds import check_numbers


class Penalties(LogitsProcessor):
    """Lowers the scores of an answer's tokens by ``presence``, and by ``frequency`` for each
    occurrence; negative penalties raise them. The prompt's tokens do not count.

    Defined as in https://platform.openai.com/docs/api-reference/chat and vLLM. The ids of a call
    must begin with the prompt's. Raises ``ValueError`` unless both lie between -2 and 2.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        check_numbers(presence_penalty=presence, frequency_penalty=frequency)
        for name, value in (("presence", presence), ("frequency", frequency)):
            if not -2 <= value <= 2:
                raise ValueError(f"{name}_penalty must be from -2 to 2, got {value}")
        self.presence = presence
        self.frequency = frequency
        self.width = 0  # the prompt's

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] after ``input_ids`` [B, L], by ``scores`` [B, V]."""
        self.width = self.width or input_ids.shape[1]
        answer = input_ids[:, self.width :]
        ones = torch.ones_like(answer, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, answer, ones)
        return scores - self.presence * (counts > 0) - self.frequency * counts
