"""Training of a VAR by teacher forcing, and the specialised training of CoDe's two models.

Of CoDe (arXiv 2411.17787): the drafter learns the true tokens of the coarse scales only; the
refiner learns the large model's distributions, first those of all scales, then those of the scales
it will draw. Shape letters: M pictures, B batch, L tokens of all scales, V vocabulary, K scales.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.training.pictures import labelled_batch
from specmm.core.randomness import seeded
from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import MultiScaleQuantizer
from specmm.recipes.loop import MUON, Losses, Run, fit

FIRST_STAGE = 0.5  # share of the refiner's steps that look at all scales

Loss = Callable[[VAR, Tensor, Tensor, Tensor, range], Tensor]


class Examples:
    """Tokens [M, 2, L] of pictures and their mirror images, labels [M], and the tokenizer's
    quantizer.
    """

    def __init__(
        self, tokens: Tensor, labels: Tensor, quantizer: MultiScaleQuantizer, nothing: int
    ) -> None:
        self.tokens = tokens
        self.labels = labels
        self.quantizer = quantizer
        self.nothing = nothing

    def batch(self, i: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Labels [B], some dropped, and tokens [B, L], half of them mirrored, of step ``i``."""
        return labelled_batch(self.tokens, self.labels, i, size, seed, self.nothing)

    @torch.no_grad()
    def inputs(self, tokens: Tensor, scales: int) -> Tensor:
        """What teacher forcing of the first ``scales`` scales of ``tokens`` [B, L] gives the
        transformer, [B, T, E].
        """
        if scales == 1:
            return self.quantizer.embedding.weight.new_zeros(
                len(tokens), 0, self.quantizer.embedding.embedding_dim
            )
        return self.quantizer.inputs(self.quantizer.schedule.split(tokens)[: scales - 1])


def token_loss(model: VAR, labels: Tensor, tokens: Tensor, inputs: Tensor, scales: range) -> Tensor:
    """Mean cross-entropy (nats a token) of the tokens of ``scales``."""
    first, stop = _span(model, scales)
    logits = model(labels, inputs)[:, first:]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, first:stop].flatten())


def distil_from(teacher: VAR) -> Loss:
    """Mean KL divergence (nats a token) of a model's distributions from ``teacher``'s, over the
    tokens of some scales.
    """

    def loss(model: VAR, labels: Tensor, tokens: Tensor, inputs: Tensor, scales: range) -> Tensor:
        first, _ = _span(model, scales)
        with torch.no_grad():
            wanted = teacher(labels, inputs)[:, first:].float().log_softmax(-1)
        made = model(labels, inputs)[:, first:].float().log_softmax(-1)
        return F.kl_div(made, wanted, log_target=True, reduction="none").sum(-1).mean()

    return loss


def _span(model: VAR, scales: range) -> tuple[int, int]:
    starts = model.config.schedule.starts
    return starts[scales.start], starts[scales.stop]


def train_var(
    examples: Examples,
    config: VARConfig,
    out: Path,
    *,
    steps: int,
    batch: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
    compiled: bool = True,
) -> VAR:
    """A model trained from nothing on all scales; resumes from ``out/checkpoint.pt``."""
    with seeded(seed):
        model = VAR(config)
    everything = range(len(config.schedule))
    return _train(
        model,
        examples,
        token_loss,
        lambda i: everything,
        out,
        steps,
        batch,
        lr,
        seed,
        compiled,
        MUON * lr,
    )


def train_drafter(
    large: VAR,
    examples: Examples,
    n: int,
    out: Path,
    *,
    steps: int,
    batch: int = 32,
    lr: float = 1e-4,
    seed: int = 0,
    compiled: bool = True,
) -> VAR:
    """A copy of ``large`` trained further on the ``n`` coarsest scales only, CoDe's specialised
    drafter.
    """
    return _train(
        copy.deepcopy(large),
        examples,
        token_loss,
        lambda i: range(n),
        out,
        steps,
        batch,
        lr,
        seed,
        compiled,
    )


def train_refiner(
    small: VAR,
    large: VAR,
    examples: Examples,
    n: int,
    out: Path,
    *,
    steps: int,
    batch: int = 32,
    lr: float = 3e-4,
    seed: int = 0,
    compiled: bool = True,
) -> VAR:
    """A copy of ``small`` that has learnt ``large``'s distributions on the scales from ``n`` on,
    CoDe's specialised refiner.
    """
    scales = len(small.config.schedule)
    turn = int(FIRST_STAGE * steps)

    def stage(i: int) -> range:
        return range(scales) if i < turn else range(n, scales)

    return _train(
        copy.deepcopy(small),
        examples,
        distil_from(large.eval()),
        stage,
        out,
        steps,
        batch,
        lr,
        seed,
        compiled,
    )


def _train(
    model: VAR,
    examples: Examples,
    loss: Loss,
    stage: Callable[[int], range],
    out: Path,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
    compiled: bool,
    muon: float = 0.0,
) -> VAR:
    """Minimise ``loss`` over the scales that ``stage`` names at each step."""
    loss = torch.compile(loss) if compiled else loss

    def step(i: int) -> Losses:
        labels, tokens = examples.batch(i, batch, seed)
        scales = stage(i)
        inputs = examples.inputs(tokens, scales.stop)
        with torch.autocast("cpu", torch.bfloat16):
            return {"loss": loss(model, labels, tokens, inputs, scales)}

    fit(model.train(), step, Run(out, steps, lr), muon=muon)
    return model.eval()
