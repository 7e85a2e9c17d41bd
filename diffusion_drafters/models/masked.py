"""Interface of diffusion language models for drafters: they fill in all masks at once.

``block_logits`` is the one forward of a draft, over [tokens | masks]; only the rows that score the
masks go through the head.

Shape letters: B batch, P prefix positions, L all positions, K masks (the block), C width, v the
drafter's vocabulary.
"""

from __future__ import annotations

from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor


class DiffusionLM(Protocol):
    """A masked diffusion model.

    It has ``vocabulary`` v, the ids ``mask`` and ``end`` (None: it has none), ``room`` in
    positions, and ``shift``: 1 where row i scores token i + 1 (Dream), 0 where it scores token i.
    """

    vocabulary: int
    mask: int
    end: int | None
    room: int
    shift: int

    def to(self, device: torch.device) -> Self:
        """Move the weights to ``device``."""

    def states(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """States [B, L, C] of ``tokens`` [B, L]; only ``valid`` [B, L] tokens are attended to."""

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., v] of ``states`` [..., C]."""


@torch.inference_mode()
def block_logits(
    model: DiffusionLM, tokens: Tensor, block: int, lengths: Tensor | None = None
) -> Tensor:
    """Logits [B, K, v] of the ``block`` = K positions after each row of ``tokens`` [B, P], float32.

    ``lengths`` [B] are the rows' lengths, if they differ; tokens after them are ignored. The mask
    is never proposed: its logit is -inf. Raises ``ValueError`` for an empty prefix or block, and if
    the model has no room for them.
    """
    prefix = tokens.shape[1]
    if prefix < 1 or block < 1:
        raise ValueError(
            f"prefix and block must hold at least one token each, got {prefix} and {block}"
        )
    if prefix + block > model.room:
        raise ValueError(
            f"prefix and block must fit the drafter's {model.room} positions, got {prefix} and "
            f"{block}; give a shorter prompt or block"
        )
    if lengths is None:
        first = prefix - model.shift
        ids = F.pad(tokens, (0, block), value=model.mask)
        states = model.states(ids)[:, first : first + block]
    else:
        masks = lengths[:, None] + torch.arange(block, device=tokens.device)  # [B, K]
        ids = F.pad(tokens, (0, block)).scatter(1, masks, model.mask)
        valid = torch.arange(ids.shape[1], device=ids.device) <= masks[:, -1:]
        states = model.states(ids, valid)
        states = states.gather(1, (masks - model.shift)[..., None].expand(-1, -1, states.shape[-1]))
    logits = model.head(states).float()
    logits[..., model.mask] = float("-inf")
    return logits


def check_mask(mask: object, vocabulary: int, end: int | None) -> int:
    """``mask``; ``ValueError`` if it is not one of ``vocabulary`` tokens, or is ``end``."""
    if type(mask) is not int or not 0 <= mask < vocabulary:
        raise ValueError(
            f"mask token must be one of the {vocabulary} of the model, got {mask!r}; give its id"
        )
    if mask == end:
        raise ValueError(
            f"mask token must not be the token that ends a text, got {mask} for both; "
            "give the mask's id"
        )
    return mask


def positions(valid: Tensor) -> Tensor:
    """Each token's position [B, L] among the valid ones of its row; 0 before the first."""
    return (valid.long().cumsum(1) - 1).clamp(min=0)
