"""Training of a MAR on the latents of its autoencoder.

Source: MAR (arXiv 2406.11838, section 3 and appendix B): random orders, a truncated normal share of
masked tokens, the diffusion loss at several timesteps a token, averaged weights. Shape letters: M
pictures, B batch, L tokens a picture, K of them masked, U timesteps a token, C token width, D
width.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from recipes.training.diffusion import diffusion_loss, noised
from specmm.core.randomness import seeded
from specmm.image_ar.continuous.diffusion import NoiseSchedule
from specmm.image_ar.continuous.mar import MAR, MARConfig, patchify, pick
from specmm.recipes.loop import MUON, Losses, Run, batch_rows, fit
from specmm.recipes.pictures import CLASS_DROPOUT

MASK_MEAN = 1.0  # of the share of tokens that are masked, cut at 1
MASK_STD = 0.25
MASK_LEAST = 0.7
TIMES = 4  # U
AVERAGE = 0.9995


class Averaged(nn.Module):
    """A model and the running average of its weights, which the checkpoint keeps together."""

    def __init__(self, model: MAR, decay: float = AVERAGE) -> None:
        super().__init__()
        self.model = model
        self.decay = decay
        self.average = copy.deepcopy(model).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights; early on it follows them closely."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(weight, share)


def train_mar(
    moments: Tensor,
    labels: Tensor,
    scale: float,
    config: MARConfig,
    out: Path,
    *,
    steps: int,
    batch: int = 32,
    lr: float = 8e-4,
    seed: int = 0,
    decay: float = AVERAGE,
    start: MAR | None = None,
) -> MAR:
    """Train on ``moments`` [M, 2, 2, c, h, h] (``encode_moments``), drawn anew at each use and
    multiplied by ``scale``.

    ``labels`` [M] are classes. Begins with the weights of ``start``, a model of the same
    ``config``, where one is given. Resumes from ``out/checkpoint.pt``; returns the averaged model.
    Raises ``ValueError`` for another ``start``.
    """
    if start is not None and start.config != config:
        raise ValueError(
            f"the model to start from must have the sizes {config}, got {start.config}"
        )
    with seeded(seed):
        both = Averaged(start or MAR(config), decay)
    schedule = NoiseSchedule.of("")

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        rows = batch_rows(i, batch, len(moments), seed)
        mirrored = torch.randint(2, (batch,), generator=generator)
        mean, log_var = moments[rows, mirrored].unbind(1)
        latents = mean + torch.exp(0.5 * log_var) * torch.randn(mean.shape, generator=generator)
        tokens = patchify(latents * scale, config.patch_size)
        both.update(i)
        return mar_loss(both.model, schedule, tokens, labels[rows], generator)

    fit(both, step, Run(out, steps, lr), weight_decay=0.02, muon=MUON * lr)
    both.update(steps)
    return both.average


def mar_loss(
    model: MAR,
    schedule: NoiseSchedule,
    tokens: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    times: int = TIMES,
) -> Losses:
    """The diffusion loss of masked ``tokens`` [B, L, C] of classes ``labels`` [B], and its two
    parts.

    ``schedule`` is the full one, of all timesteps.
    """
    batch, length, _ = tokens.shape
    dropped = torch.rand(batch, generator=generator) < CLASS_DROPOUT
    orders = torch.rand(batch, length, generator=generator).argsort(dim=1)
    masked = orders[:, : math.ceil(length * mask_share(generator))]
    known = orders[:, masked.shape[1] :]
    with torch.autocast(tokens.device.type, torch.bfloat16):
        own = model.embed_classes(labels)
        condition = (
            torch.where(dropped[:, None], model.embed_classes(None, batch), own)
            if dropped.any()
            else own
        )
        z = model(tokens, known, condition, masked)  # [B, K, D]
        clean = pick(tokens, masked).flatten(0, 1).repeat(times, 1)  # [U · B · K, C]
        t = torch.randint(len(schedule), (len(clean),), generator=generator)
        noise = torch.randn(clean.shape, generator=generator)
        x = noised(schedule, clean, t, noise)
        answer = model.head(x, t, z.flatten(0, 1).repeat(times, 1))
    mse, bound = diffusion_loss(schedule, answer.float(), clean, x, t, noise)
    return {"loss": (mse + bound).mean(), "mse": mse.mean(), "bound": bound.mean()}


def mask_share(generator: torch.Generator) -> float:
    """Share of tokens to mask: a normal number between MASK_LEAST and 1, by the inverse of its
    distribution.
    """
    low, high = (
        0.5 * (1 + math.erf((x - MASK_MEAN) / MASK_STD / math.sqrt(2))) for x in (MASK_LEAST, 1.0)
    )
    at = low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64)
    return min(1.0, MASK_MEAN + MASK_STD * float(torch.special.ndtri(at)))
