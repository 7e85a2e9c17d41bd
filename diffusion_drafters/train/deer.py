"""Training of a DEER drafter in two stages, with the target frozen.

Stage 1 hides a random share of each block and learns to fill it in, weighted by one over the share;
stage 2 hides the whole block, of random length R, and weighs position i by alpha to the power of R
- i: what stands next to the text counts most. Source: DEER (arXiv 2512.15176); the end mark that it
appends to truncated text is left out, since here blocks lie in the midst of a row, and
distributions are learnt where it learns tokens.

Shape letters: B batch, L tokens of a row, A anchors, K drafts of a block, V vocabulary, C width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from specmm.diffusion_drafters.models.bidirectional import QWEN_SIZES
from specmm.diffusion_drafters.models.causal import CausalPrefix, share
from specmm.diffusion_drafters.train.blocks import Anchors, probs_loss
from specmm.diffusion_drafters.train.rows import Batch, Rows
from specmm.diffusion_drafters.train.target import compile_layers
from specmm.hf.target import VLMTarget
from specmm.training import MUON, Losses, fit, seeded

ANCHORS = 16  # blocks a row
ALPHA = 1.02


def build_deer(
    target: VLMTarget, layers: int, block: int, mask: int, end: int | None, inner: int = 0
) -> CausalPrefix:
    """A drafter of ``layers`` for ``target``, with its embedding and head; they begin as the
    target's first ones.

    ``inner`` is the width of its feed-forward layers where it is not the target's. Raises
    ``ValueError`` for a target whose layers are not a Qwen2's or Llama's.
    """
    sizes = _sizes(target.family.config)
    sizes["max_position_embeddings"] += block
    sizes |= {"num_hidden_layers": layers, "intermediate_size": inner or sizes["intermediate_size"]}
    with seeded(0):
        model: Any = Qwen2ForCausalLM(Qwen2Config(**sizes))
    _begin_as(model.model.layers, target.family.layers)
    model.model.norm.load_state_dict(target.family.decoder.norm.state_dict())
    share(model, target.model)
    return CausalPrefix(model, mask, block, end, shared=True)


def _sizes(config: Any) -> dict[str, Any]:
    """Sizes and rotary base of a target; raises ``ValueError`` where it has not all that a Qwen2
    has.
    """
    base = (getattr(config, "rope_parameters", None) or {}).get(
        "rope_theta"
    )  # by kind of layer, where kinds differ
    sizes = {name: getattr(config, name, None) for name in QWEN_SIZES} | {"rope_theta": base}
    if missing := [name for name, size in sizes.items() if size is None]:
        raise ValueError(
            f"target must have a Qwen2's or Llama's layers, got {config.model_type!r} with no {missing[0]} for all; "
            "train a block drafter (dflash) instead"
        )
    del sizes["rope_theta"]
    return sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


@torch.no_grad()
def _begin_as(layers: Any, others: Any) -> None:
    """Copy what fits of ``others``' weights; a Llama has no biases, which then are 0."""
    for layer, other in zip(layers, others, strict=False):
        own, theirs = layer.state_dict(), other.state_dict()
        layer.load_state_dict(
            {k: v for k, v in theirs.items() if k in own and own[k].shape == v.shape}, strict=False
        )


def train_deer(
    target: VLMTarget,
    drafter: CausalPrefix,
    rows: Rows,
    out: Path,
    *,
    steps: int,
    batch: int = 8,
    lr: float = 2e-3,
    first_stage: float = 0.25,
    alpha: float = ALPHA,
    anchors: int = ANCHORS,
    seed: int = 0,
    compiled: bool = True,
) -> None:
    """Train ``drafter`` in place, its first ``first_stage`` of ``steps`` in stage 1; resumes from
    ``out``.
    """
    target.model.requires_grad_(False)  # embedding and head are among its weights
    compile_layers(drafter.model.model.layers, compiled)

    def step(i: int) -> Losses:
        data = rows.batch(i, batch, seed)
        with torch.autocast(target.device.type, torch.bfloat16):
            return deer_loss(
                drafter, target, data, anchors, i < first_stage * steps, alpha, seed * 1_000_003 + i
            )

    fit(_Own(drafter.model), step, out=out, steps=steps, lr=lr, muon=MUON * lr)
    drafter.model.eval()


class _Own(torch.nn.Module):
    """The drafter's own weights only, for checkpoints that do not repeat the target's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers, self.norm = model.model.layers, model.model.norm


def deer_loss(
    drafter: CausalPrefix,
    target: VLMTarget,
    data: Batch,
    anchors: int,
    filling: bool,
    alpha: float,
    seed: int,
) -> Losses:
    """Loss of the rows' blocks and of the first drafts of all their positions; ``filling`` is stage
    1.
    """
    tokens, masks = data.tokens, drafter.block - 1
    (rows, length), device = tokens.shape, tokens.device
    drawn = Anchors.draw(rows, length, anchors, drafter.block, masks, seed)
    uniforms = torch.Generator().manual_seed(seed + 1)
    hidden, weights = _hide(rows, anchors, masks, uniforms, filling, alpha)
    behind = drawn.behind(masks, 1)  # places of the blocks' own positions [B, A, K - 1]
    true = tokens.gather(1, behind.flatten(1).to(device)).view(behind.shape)
    ids = torch.where(hidden.to(device), drafter.mask, true)
    present = None if filling else weights > 0
    states = _forward(drafter, tokens, ids, drawn, present)  # [B, L + N, C]
    blocks = states[:, length:].unflatten(1, (anchors, masks))
    wanted = data.hidden.gather(
        1, behind.flatten(1)[..., None].to(device).expand(-1, -1, data.hidden.shape[-1])
    )
    found = probs_loss(blocks, wanted.view_as(blocks), weights.to(device), target.head)
    first = probs_loss(
        states[:, None, :length], data.hidden[:, None], torch.ones(1, device=device), target.head
    )
    share = 1 / drafter.block
    return {
        **found,
        "loss": share * first["loss"] + (1 - share) * found["loss"],
        "first": first["first"],
    }


def _hide(
    rows: int, anchors: int, masks: int, uniforms: torch.Generator, filling: bool, alpha: float
) -> tuple[Tensor, Tensor]:
    """Which positions [B, A, K - 1] are masks, and how much each counts."""
    shape = (rows, anchors, masks)
    if filling:
        share = torch.rand(rows, anchors, 1, generator=uniforms).clamp(min=0.1)
        hidden = torch.rand(shape, generator=uniforms) < share
        asked = F.pad(
            hidden[..., 1:], (0, 1), value=True
        )  # a row scores the token after it: is that one hidden?
        return hidden, asked / share
    reach = torch.randint(1, masks + 1, (rows, anchors, 1), generator=uniforms)  # R
    order = torch.arange(masks)
    return torch.ones(shape, dtype=torch.bool), (alpha ** (reach - 1 - order)) * (order < reach)


def _forward(
    drafter: CausalPrefix, tokens: Tensor, ids: Tensor, drawn: Anchors, present: Tensor | None
) -> Tensor:
    """States [B, L + N, C] of the rows, read causally, and of their blocks of ``ids`` [B, A, K -
    1].
    """
    (rows, length), device = tokens.shape, tokens.device
    order = torch.arange(length, device=device)
    blocks = drawn.bias(length, 0, present).to(device)
    text = torch.full((length, blocks.shape[-1]), float("-inf"), device=device)
    text[:, :length].masked_fill_(order <= order[:, None], 0)
    bias = torch.cat([text.expand(rows, 1, -1, -1), blocks], dim=2)
    positions = torch.cat(
        [order.expand(rows, -1), drawn.behind(drawn.size, 1).flatten(1).to(device)], dim=1
    )
    read = drafter.model.model(
        input_ids=torch.cat([tokens, ids.flatten(1)], dim=1),
        attention_mask=bias,
        position_ids=positions,
        use_cache=False,
    )
    return read.last_hidden_state
