"""Training of the EAGLE head against its target, on the fly: no feature files.

The head reads the target's hidden states with a little noise and learns the next one (SmoothL1) and
the distribution that the target's output head makes of it (soft cross-entropy), as EAGLE (arXiv
2401.15077) and LANTERN (2410.03355) train it. Shape letters: M pictures, B batch, T tokens of a
picture, C width, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.image_ar.tokens.drafters.eagle_head import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import Transformer
from specmm.image_ar.training import CLASS_DROPOUT
from specmm.training import Losses, batch_rows, fit, seeded

PROBS_WEIGHT = 0.1  # of the cross-entropy beside the SmoothL1


def train_eagle(
    target: Transformer,
    tokens: Tensor,
    labels: Tensor,
    out: Path,
    *,
    steps: int,
    ffn_dim: int | None = None,
    batch: int = 16,
    lr: float = 1e-4,
    noise: float = 0.2,
    weight_decay: float = 0.01,
    seed: int = 0,
    compiled: bool = True,
) -> EagleHead:
    """Train on ``tokens`` [M, 2, T] (both mirrorings) with ``labels`` [M]; resumes from
    ``out/checkpoint.pt``.

    Token embeddings are the target's and stay so. The noise on the hidden states is uniform in
    ±``noise`` · 256 / T. Raises ``ValueError`` for a target that is not class-conditional.
    """
    if target.config.model_type != "c2i":
        raise ValueError(f"target must be class-conditional (c2i), got {target.config.model_type}")
    with seeded(seed):
        head, target = (
            EagleHead(EagleConfig(target.config, ffn_dim)),
            target.eval().requires_grad_(False),
        )
    head.embed_tokens.load_state_dict(target.tok_embeddings.state_dict())
    head.embed_tokens.requires_grad_(False)
    loss_of = torch.compile(eagle_loss) if compiled else eagle_loss

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        rows = batch_rows(i, batch, len(tokens), seed)
        mirrored = torch.randint(2, (batch,), generator=generator)
        dropped = torch.rand(batch, generator=generator) < CLASS_DROPOUT
        classes = labels[rows].masked_fill(dropped, target.config.num_classes)
        shape = (batch, tokens.shape[-1] - 1, target.config.dim)
        shift = (torch.rand(shape, generator=generator) - 0.5) * noise * 512 / tokens.shape[-1]
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(target, head, classes, tokens[rows, mirrored], shift)

    fit(head, step, out=out, steps=steps, lr=lr, weight_decay=weight_decay)
    return head


def eagle_loss(
    target: Transformer, head: EagleHead, labels: Tensor, tokens: Tensor, shift: Tensor
) -> Losses:
    """Loss and its parts for ``tokens`` [B, T], with ``shift`` [B, T - 1, C] added to the hidden
    states read.

    ``overlap`` is the mean of Σ min(p, q): what a single draft would be accepted with.
    """
    with torch.no_grad():
        logits, hidden = target(target.embed(labels, tokens[:, :-1]))  # position i predicts token i
        probs = logits[:, 1:].float().softmax(-1)  # [B, T - 1, V]
    predicted = head(tokens[:, :-1], hidden[:, :-1] + shift)
    drafted = target.output(predicted).float().log_softmax(-1)
    regression = F.smooth_l1_loss(predicted.float(), hidden[:, 1:].float())
    cross_entropy = -(probs * drafted).sum(-1).mean()
    overlap = torch.minimum(probs, drafted.detach().exp()).sum(-1).mean()
    loss = regression + PROBS_WEIGHT * cross_entropy
    return {
        "loss": loss,
        "smooth_l1": regression,
        "cross_entropy": cross_entropy,
        "overlap": overlap,
    }
