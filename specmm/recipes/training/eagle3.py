"""Training of an EAGLE-3 head, which learns from its own drafts (arXiv 2503.01840).

In step k of a rollout every slot reads the state that step k - 1 predicted for its place, and
attends what it will when it drafts: the target's states of the text before the root, and the slots
of the drafts since. All slots are rolled out at once.

Shape letters: B batch, L positions, M slots that count, F layers read, C width, v the head's
vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from specmm.hf.drafters.eagle3_head import Eagle3Config, Eagle3Head, layers_read
from specmm.hf.target import VLMTarget
from specmm.training import MUON, Losses, fit, seeded

DECAY = 0.8  # a step of the rollout counts this share of the one before
Head = Callable[[Tensor], Tensor]  # the target's, for the drafter's tokens: [..., C] to [..., v]


@dataclass(frozen=True)
class Seen:
    """What the target saw and thought: ``embeddings`` [B, L, C] of the next positions, ``context``
    [B, L, F·C] of the layers read, the last states ``hidden`` [B, L, C], and which slots count,
    ``mask`` [B, L].
    """

    embeddings: Tensor
    context: Tensor
    hidden: Tensor
    mask: Tensor

    @torch.inference_mode(False)
    def to(self, device: torch.device | str, dtype: torch.dtype) -> Seen:
        """A copy that may be learnt from, on ``device``, its states in ``dtype``."""
        return Seen(
            self.embeddings.to(device, dtype, copy=True),
            self.context.to(device, dtype, copy=True),
            self.hidden.to(device, dtype, copy=True),
            self.mask.to(device, copy=True),
        )


def build_eagle3(
    target: VLMTarget,
    layers: int = 1,
    inner: int = 0,
    ids: Tensor | None = None,
    read: tuple[int, ...] = (),
) -> Eagle3Head:
    """A head of ``layers`` for ``target`` that reads its layers ``read`` (low, middle, high).

    ``inner`` is the width of its feed-forward layers where it is not the target's, ``ids`` [v] the
    target's tokens that it drafts (None: all). Its vocabulary begins with the target's rows.
    """
    chosen = read or layers_read(len(target.family.layers))
    sizes = _sizes(target, layers, inner)
    vocabulary = int(sizes.vocab_size)
    with seeded(0):
        tokens = vocabulary if ids is None else len(ids)
        head = Eagle3Head(Eagle3Config(sizes, chosen, tokens, picture_embeddings=True))
        for weight in head.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, 0, 0.04 if sizes.hidden_size < 512 else 0.02)
    if ids is not None:
        head.set_ids(ids.cpu())
    rows = target.family.head.weight.detach()
    head.lm_head.weight.data.copy_(rows if head.ids is None else rows[head.ids.to(rows.device)])
    return head.to(target.device)


def _sizes(target: VLMTarget, layers: int, inner: int) -> Any:
    config = target.family.config
    heads = config.num_attention_heads
    kind: Any = LlamaConfig
    return kind(
        vocab_size=target.family.vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=inner or target.family.inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=target.family.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=1e-6,
        attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def train_eagle3(
    target: VLMTarget,
    head: Eagle3Head,
    draw: Callable[[int], Seen],
    out: Path,
    *,
    steps: int,
    lr: float,
    rollout: int = 4,
    slots: int = 0,
    decay: float = DECAY,
) -> None:
    """Train ``head`` in place on what ``draw`` gives for each step; resumes from ``out``.

    At most so many ``slots`` count in a step (0: all), drawn at random: a large vocabulary costs
    more than the head's layers.
    """
    target.model.requires_grad_(False)
    output = target.family.logits_of(head.ids)

    def step(i: int) -> Losses:
        seen = draw(i)
        if slots:
            seen = dataclasses.replace(seen, mask=some_of(seen.mask, slots, i))
        with torch.autocast(target.device.type, torch.bfloat16):
            return rollout_loss(head, output, seen, rollout, decay)

    fit(head, step, out=out, steps=steps, lr=lr, clip=0.5, muon=MUON * lr)
    head.eval()


def some_of(mask: Tensor, count: int, seed: int) -> Tensor:
    """``mask`` [B, L] with at most ``count`` of its places, drawn at random."""
    noise = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)).to(mask.device)
    order = noise.masked_fill(~mask, 2).flatten().argsort()[:count]
    chosen = torch.zeros_like(mask).flatten()
    chosen[order] = True
    return chosen.view_as(mask) & mask


def rollout_loss(
    head: Eagle3Head, output: Head, seen: Seen, rollout: int, decay: float = DECAY
) -> Losses:
    """Cross-entropy with the target's distributions over the head's tokens, over all steps.

    Beside it the overlaps Σ min(p, q) of the first and of the last step, with which a draft there
    is accepted.
    """
    with torch.no_grad():
        probs = output(seen.hidden.roll(-1, 1)[seen.mask]).float().softmax(-1)  # [M, v]
    length = seen.embeddings.shape[1]
    past = DynamicCache()
    hidden = head.mixed(seen.context)
    found = []
    for k in range(rollout):
        bias = rollout_bias(length, k).to(hidden)
        states = head(head.slots(seen.embeddings, hidden), None, bias, past)
        drafted = head.logits(states[seen.mask]).float().log_softmax(-1)
        overlap = torch.minimum(probs, drafted.detach().exp()).sum(-1).mean()
        found.append((-(probs * drafted).sum(-1).mean(), overlap))
        hidden = F.pad(states[:, :-1], (0, 0, 1, 0))
    weights = [decay**k for k in range(rollout)]
    losses = [w * surprise for w, (surprise, _) in zip(weights, found, strict=True)]
    loss = torch.stack(losses).sum() / sum(weights)
    return {"loss": loss, "overlap": found[0][1], "overlap_last": found[-1][1]}


def rollout_bias(length: int, step: int) -> Tensor:
    """Additive mask [1, 1, L, (step + 1)·L] of the slots in a ``step`` of the rollout.

    Slot p began at place p - step: it sees the first step's slots up to there, and of each later
    step the one slot of its own path.
    """
    query = torch.arange(length)[:, None]
    place = torch.arange(length)
    seen = [place <= query - step]
    seen += [place == query - step + i for i in range(1, step + 1)]
    bias = torch.zeros(length, (step + 1) * length)
    return bias.masked_fill_(~torch.cat(seen, dim=1), float("-inf"))[None, None]
