"""Published and our own LlamaGen and VQ files as modules, and back to files under the official
names.

Sizes come from a ``config.json`` beside the weights, or from the shapes of the weights, as far as
these tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm.checkpoints import LEFTOVERS, load_strict, read_checkpoint
from specmm.image_ar.files import count, read_config, save_module, shape_of
from specmm.image_ar.tokens.convert import from_lantern, is_lantern
from specmm.image_ar.tokens.gpt import PUBLISHED, GPTConfig, Transformer
from specmm.image_ar.tokens.vq import VQConfig, VQModel

VQ_LEFTOVERS = ("codebook_used",)  # the release's ring buffer of used codes


def load_gpt(
    path: str | Path,
    config: GPTConfig | None = None,
    *,
    n_head: int | None = None,
    block_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """The transformer in the file or folder ``path``, in evaluation mode, with weights in
    ``dtype``.

    Without ``config`` the sizes are those of ``config.json`` beside the weights, else of the
    weights; ``n_head`` and ``block_size`` (256 for 256 px, 576 for 384 px) are needed where neither
    tells. LANTERN's names are understood. Raises ``ValueError`` when sizes are missing and, naming
    them, when weights are missing, extra or misshapen.
    """
    state = read_checkpoint(path)
    if is_lantern(state):
        state = from_lantern({k: v for k, v in state.items() if "rotary_emb" not in k})
    config = config or read_config(path, GPTConfig)
    config = config or infer_gpt_config(state, n_head=n_head, block_size=block_size, source=path)
    model = Transformer(config)
    load_strict(model, state, LEFTOVERS, path)
    return model.to(dtype).eval()


def load_vq(
    path: str | Path, config: VQConfig | None = None, *, dtype: torch.dtype = torch.float32
) -> VQModel:
    """The image tokenizer in the file or folder ``path``, in evaluation mode; sizes and errors as
    ``load_gpt``.
    """
    state = read_checkpoint(path)
    model = VQModel(config or read_config(path, VQConfig) or infer_vq_config(state, path))
    load_strict(model, state, VQ_LEFTOVERS, path)
    return model.to(dtype).eval()


def save_gpt(model: Transformer, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` (official names; ``dtype`` such as bf16 halves it) and
    ``config.json``.
    """
    save_module(model, model.config, folder, dtype)


def save_vq(model: VQModel, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` and ``folder/config.json`` as ``save_gpt`` does."""
    save_module(model, model.config, folder, dtype)


def infer_gpt_config(
    state: Mapping[str, Tensor],
    *,
    n_head: int | None = None,
    block_size: int | None = None,
    source: str | Path = "",
) -> GPTConfig:
    """Sizes of a LlamaGen ``state`` by its shapes; ``n_head`` also by the published sizes.

    An old file's ``freqs_cis`` table [P + block_size, D/2, 2] tells both. Raises ``ValueError``
    naming what is needed.
    """
    vocab_size, dim = shape_of(state, "tok_embeddings.weight", source)
    ffn_dim = shape_of(state, "layers.0.feed_forward.w1.weight", source)[0]
    n_layer = count(state, r"layers\.(\d+)\.")
    prefix = _prefix_sizes(state, source)
    if "freqs_cis" in state:
        rows, half, _ = shape_of(state, "freqs_cis", source)
        n_head, block_size = (
            n_head or dim // (2 * half),
            block_size or rows - prefix.get("cls_token_num", 1),
        )
    n_head = n_head or next(
        (p["n_head"] for p in PUBLISHED.values() if (p["dim"], p["n_layer"]) == (dim, n_layer)),
        None,
    )
    if n_head is None or block_size is None:
        wanted = "n_head" if n_head is None else "block_size (256 for 256 px, 576 for 384 px)"
        raise ValueError(
            f"{wanted} must be given: {source} does not tell, pass it or put a config.json beside the file"
        )
    sizes: dict[str, Any] = dict(
        dim=dim, n_layer=n_layer, n_head=n_head, vocab_size=vocab_size, block_size=block_size
    )
    return _with_ffn(GPTConfig(**sizes, **prefix), ffn_dim)


def _prefix_sizes(state: Mapping[str, Tensor], source: str | Path) -> dict[str, Any]:
    """Sizes of the class or caption embedder."""
    if "cls_embedding.uncond_embedding" in state:
        tokens, width = shape_of(state, "cls_embedding.uncond_embedding", source)
        return {"model_type": "t2i", "cls_token_num": tokens, "caption_dim": width}
    return {"num_classes": shape_of(state, "cls_embedding.embedding_table.weight", source)[0] - 1}


def _with_ffn(config: GPTConfig, ffn_dim: int) -> GPTConfig:
    """``config`` with the feed-forward width ``ffn_dim``, said as LlamaGen's configurations say it."""
    if config.ffn_dim == ffn_dim:
        return config
    multiplier = (ffn_dim + 0.5) / int(8 * config.dim / 3)  # rounds down to ffn_dim
    return replace(config, multiple_of=1, ffn_dim_multiplier=multiplier)


def infer_vq_config(state: Mapping[str, Tensor], source: str | Path = "") -> VQConfig:
    """Sizes of a VQ ``state`` by its shapes; the codebook counts as normalised, as in all published
    ones.
    """
    size, width = shape_of(state, "quantize.embedding.weight", source)
    ch = shape_of(state, "encoder.conv_in.weight", source)[0]
    levels = count(state, r"encoder\.conv_blocks\.(\d+)\.")
    widths = [
        shape_of(state, f"encoder.conv_blocks.{i}.res.0.conv1.weight", source)[0]
        for i in range(levels)
    ]
    return VQConfig(
        codebook_size=size,
        codebook_embed_dim=width,
        ch=ch,
        ch_mult=tuple(w // ch for w in widths),
        num_res_blocks=count(state, r"encoder\.conv_blocks\.0\.res\.(\d+)\."),
        z_channels=shape_of(state, "encoder.conv_out.weight", source)[0],
    )
