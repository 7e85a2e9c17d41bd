"""Training of an EAGLE head for any target that draws pictures, on what it reads as it draws.

Shape letters: M pictures, B batch, T tokens of a picture, N places, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.image_ar.tokens.drafters.eagle import EagleHead
from specmm.image_ar.tokens.gpt import RotaryTable
from specmm.recipes.training.block_drafter import Seen, varied
from specmm.training import Losses, batch_rows, fit

PROBS_WEIGHT = 0.1  # of EAGLE's cross-entropy beside its SmoothL1

LossOf = Callable[[Tensor, Tensor, Tensor, Tensor], Losses]
"""What :func:`eagle_loss` gives for a step's pictures by their rows [B], whether they are mirrored
[B] (0 or 1), whether their condition is dropped [B], and a shift [B, T - 1, C].
"""


def fit_eagle(
    head: EagleHead,
    pictures: tuple[int, int],
    loss_of: LossOf,
    out: Path,
    *,
    steps: int,
    batch: int = 16,
    lr: float = 1e-4,
    noise: float = 0.2,
    weight_decay: float = 0.01,
    dropout: float = 0.0,
    seed: int = 0,
) -> None:
    """Train on ``pictures`` (their number M and T) by ``loss_of``; resumes from
    ``out/checkpoint.pt``.

    The states that the head reads are shifted by uniform noise in ±``noise`` · 256 / T. ``dropout``
    is the share of pictures shown without their condition.
    """
    count, length = pictures

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        shown = batch_rows(i, batch, count, seed), *varied(batch, dropout, generator)
        shape = (batch, length - 1, head.config.target.dim)
        shift = (torch.rand(shape, generator=generator) - 0.5) * noise * 512 / length
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(*shown, shift)

    fit(head, step, out=out, steps=steps, lr=lr, weight_decay=weight_decay)


def eagle_loss(
    head: EagleHead,
    seen: Seen,
    output: Callable[[Tensor, Tensor], Tensor],
    shift: Tensor,
    rotary: RotaryTable | None = None,
) -> Losses:
    """Loss and its parts (SmoothL1 of the states, soft cross-entropy) for pictures that the target
    has ``seen``, with ``shift`` [B, T - 1, C] added to the hidden states read.

    ``output`` gives logits [B, N, V] of states [B, N, C] and the numbers [1, N] of the tokens that
    they predict; ``rotary`` factors are those of pictures of this size. ``overlap`` is the mean of
    Σ min(p, q): how likely a single draft is accepted.
    """
    hidden = seen.hidden
    probs = seen.logits[:, 1:].float().softmax(-1)  # [B, T - 1, V]
    predicted = head(seen.embedded[:, :-1], hidden[:, :-1] + shift, rotary=rotary)
    order = torch.arange(1, hidden.shape[1], device=hidden.device)[None]
    drafted = output(predicted, order).float().log_softmax(-1)
    regression = F.smooth_l1_loss(predicted.float(), hidden[:, 1:].float())
    cross_entropy = -(probs * drafted).sum(-1).mean()
    overlap = torch.minimum(probs, drafted.detach().exp()).sum(-1).mean()
    return {
        "loss": regression + PROBS_WEIGHT * cross_entropy,
        "smooth_l1": regression,
        "cross_entropy": cross_entropy,
        "overlap": overlap,
    }
