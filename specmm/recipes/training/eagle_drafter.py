"""Training of LlamaGen's EAGLE head against its target, on the fly: no feature files.

Shape letters: M pictures, B batch, T tokens of a picture, N places, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import Transformer
from specmm.recipes.training.block_drafter import Seen, seen_by, varied
from specmm.recipes.training.encoding import CLASS_DROPOUT
from specmm.training import Losses, Run, batch_rows, fit, seeded, share

PROBS_WEIGHT = 0.1  # of EAGLE's cross-entropy beside its SmoothL1


def train_eagle(
    target: Transformer,
    tokens: Tensor,
    labels: Tensor,
    run: Run,
    *,
    batch: int = 16,
    noise: float = 0.2,
    weight_decay: float = 0.01,
    ffn_dim: int | None = None,
    seed: int = 0,
    compiled: bool = True,
) -> EagleHead:
    """Train on ``tokens`` [M, 2, T] (both mirrorings) with ``labels`` [M].

    The head reads the target's hidden states, shifted by uniform noise in ±``noise`` · 256 / T, and
    learns the next one and the distribution that the target's output head makes of it, as EAGLE
    (arXiv 2401.15077) and LANTERN (2410.03355) train it. Token embeddings are the target's and stay
    so. Raises ``ValueError`` for a target that is not class-conditional.
    """
    if target.config.model_type != "c2i":
        raise ValueError(f"target must be class-conditional (c2i), got {target.config.model_type}")
    with seeded(seed):
        head = EagleHead(EagleConfig(target.config, ffn_dim))
    target = target.eval().requires_grad_(False)
    head.embed_tokens.load_state_dict(target.tok_embeddings.state_dict())
    head.embed_tokens.requires_grad_(False)
    length = target.config.block_size

    def loss_of(classes: Tensor, pictures: Tensor, shift: Tensor) -> Losses:
        return eagle_loss(head, seen_by(target, classes, pictures, ()), target.output, shift)

    made = torch.compile(loss_of) if compiled else loss_of

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        rows = batch_rows(i, batch, len(tokens), seed)
        mirrored, dropped = varied(batch, CLASS_DROPOUT, generator)
        shape = (batch, length - 1, target.config.dim)
        shift = (torch.rand(shape, generator=generator) - 0.5) * noise * 512 / length
        rows, mirrored, dropped, shift = map(share, (rows, mirrored, dropped, shift))
        classes = labels[rows].masked_fill(dropped, target.config.num_classes)
        with torch.autocast("cpu", torch.bfloat16):
            return made(classes, tokens[rows, mirrored], shift)

    fit(head, step, run, weight_decay=weight_decay)
    return head


def eagle_loss(
    head: EagleHead, seen: Seen, output: Callable[[Tensor], Tensor], shift: Tensor
) -> Losses:
    """Loss and its parts (SmoothL1 of the states, soft cross-entropy) for pictures that the target
    has ``seen``, with ``shift`` [B, T - 1, C] added to the hidden states read.

    ``output`` gives logits [B, N, V] of states [B, N, C]. ``overlap`` is the mean of Σ min(p, q):
    how likely a single draft is accepted.
    """
    hidden = seen.hidden
    probs = seen.logits[:, 1:].float().softmax(-1)  # [B, T - 1, V]
    predicted = head(seen.embedded[:, :-1], hidden[:, :-1] + shift)
    drafted = output(predicted).float().log_softmax(-1)
    regression = F.smooth_l1_loss(predicted.float(), hidden[:, 1:].float())
    cross_entropy = -(probs * drafted).sum(-1).mean()
    overlap = torch.minimum(probs, drafted.detach().exp()).sum(-1).mean()
    return {
        "loss": regression + PROBS_WEIGHT * cross_entropy,
        "smooth_l1": regression,
        "cross_entropy": cross_entropy,
        "overlap": overlap,
    }
