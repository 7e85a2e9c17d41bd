"""Published, trainer-made and our own VAR and VQVAE files as modules, and back to files under the
official names.

Sizes come from a ``config.json`` beside the weights, else from the shapes of the weights, as far as
these tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specmm.checkpoints import NESTING, State, load_strict, read_checkpoint
from specmm.image_ar.scales.scale_schedule import PATCHES_256
from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from specmm.image_ar.shared import count, read_config, save_module, shape_of

MASK = "attn_bias_for_masking"  # holds -inf by design
PUBLISHED_HEAD_DIM = 64
TRAINED = {
    VARConfig: ("var_wo_ddp", "var"),
    VQVAEConfig: ("vae_local", "vae_wo_ddp", "vae"),
}  # names in a trainer


def load_var(
    path: str | Path, config: VARConfig | None = None, *, dtype: torch.dtype = torch.float32
) -> VAR:
    """The transformer in the file or folder ``path``, in evaluation mode, with weights in
    ``dtype``.

    Without ``config`` the sizes are those of ``config.json`` beside the weights, else of the
    weights. A training checkpoint (``trainer.var_wo_ddp``) is understood. Raises ``ValueError``
    when sizes are missing and, naming them, when weights are missing, extra or misshapen.
    """
    state = _read(path, VARConfig)
    config = config or read_config(path, VARConfig) or infer_var_config(state, path)
    model = VAR(config)
    if MASK in state:
        state[MASK] = state[MASK].nan_to_num(neginf=0.0)
    load_strict(model, state, (), path)
    if not torch.equal(model.lvl_1L, config.schedule.levels):
        raise ValueError(
            f"{path} must hold the levels of patch_nums {config.patch_nums} in lvl_1L, got others"
        )
    model.reset_mask()
    return model.to(dtype).eval()


def load_vqvae(
    path: str | Path,
    config: VQVAEConfig | None = None,
    *,
    patch_nums: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> VQVAE:
    """The image tokenizer in ``path``, in evaluation mode; sizes and errors as ``load_var``.

    Its weights do not tell the sides of the scales: without ``patch_nums`` and ``config.json`` ten
    scales are those of 256 px (give ``PATCHES_512`` for 512 px: the published file is the same).
    """
    state = _read(path, VQVAEConfig)
    config = config or read_config(path, VQVAEConfig) or infer_vqvae_config(state, patch_nums, path)
    config = replace(config, patch_nums=patch_nums or config.patch_nums)
    model = VQVAE(config)
    load_strict(model, state, (), path)
    return model.to(dtype).eval()


def save_var(model: VAR, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` (official names; ``dtype`` such as bf16 halves it) and
    ``config.json``.
    """
    save_module(model, model.config, folder, dtype)


def save_vqvae(model: VQVAE, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` and ``folder/config.json`` as ``save_var`` does."""
    save_module(model, model.config, folder, dtype)


def _read(path: str | Path, kind: type[VARConfig] | type[VQVAEConfig]) -> State:
    """The tensors of ``path``; of a training checkpoint those under ``trainer`` and one of
    ``kind``'s names.
    """
    state = read_checkpoint(path, ("trainer", *TRAINED[kind], *NESTING))
    for name in TRAINED[kind]:
        start = f"trainer.{name}."
        if any(key.startswith(start) for key in state):
            return {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
    return state


def infer_var_config(state: Mapping[str, Tensor], source: str | Path = "") -> VARConfig:
    """Sizes of a VAR ``state`` by its shapes and its levels; heads of 64 where attn_l2_norm does
    not tell them.
    """
    width, codes = shape_of(state, "word_embed.weight", source)
    depth = count(state, r"blocks\.(\d+)\.")
    shape_of(state, "lvl_1L", source)
    counts = state["lvl_1L"].flatten().bincount().tolist()
    l2_norm = "blocks.0.attn.scale_mul_1H11" in state
    heads = (
        state["blocks.0.attn.scale_mul_1H11"].shape[1] if l2_norm else width // PUBLISHED_HEAD_DIM
    )
    if not heads:
        raise ValueError(
            f"num_heads must be given: {source} does not tell, pass a config or put config.json beside it"
        )
    return VARConfig(
        depth=depth,
        embed_dim=width,
        num_heads=heads,
        mlp_ratio=shape_of(state, "blocks.0.ffn.fc1.weight", source)[0] / width,
        vocab_size=shape_of(state, "head.weight", source)[0],
        z_channels=codes,
        num_classes=shape_of(state, "class_emb.weight", source)[0] - 1,
        patch_nums=tuple(round(n**0.5) for n in counts),
        shared_aln="shared_ada_lin.1.weight" in state,
        attn_l2_norm=l2_norm,
    )


def infer_vqvae_config(
    state: Mapping[str, Tensor], patch_nums: tuple[int, ...] | None = None, source: str | Path = ""
) -> VQVAEConfig:
    """Sizes of a VQVAE ``state`` by its shapes; ``patch_nums`` must be given unless there are ten
    scales.
    """
    vocab_size, width = shape_of(state, "quantize.embedding.weight", source)
    scales = shape_of(state, "quantize.ema_vocab_hit_SV", source)[0]
    sides = patch_nums or (PATCHES_256 if scales == len(PATCHES_256) else ())
    if len(sides) != scales:
        raise ValueError(
            f"patch_nums must be the sides of the {scales} scales of {source}, got {patch_nums}"
        )
    ch = shape_of(state, "encoder.conv_in.weight", source)[0]
    levels = count(state, r"encoder\.down\.(\d+)\.")
    widths = [
        shape_of(state, f"encoder.down.{i}.block.0.conv1.weight", source)[0] for i in range(levels)
    ]
    one = "quantize.quant_resi.qresi.weight" in state
    shared = 1 if one else count(state, r"quantize\.quant_resi\.qresi_ls\.(\d+)")
    return VQVAEConfig(
        vocab_size=vocab_size,
        z_channels=width,
        ch=ch,
        ch_mult=tuple(w // ch for w in widths),
        num_res_blocks=count(state, r"encoder\.down\.0\.block\.(\d+)\."),
        patch_nums=tuple(sides),
        share_quant_resi=shared,
        quant_conv_ks=shape_of(state, "quant_conv.weight", source)[-1],
    )
