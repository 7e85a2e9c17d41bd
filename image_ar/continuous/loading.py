"""Published and our own MAR and KL files as modules, and back to files under the official names.

``checkpoint-last.pth`` holds the averaged weights under ``model_ema`` (which are taken) beside the trained ones and the
command line's arguments; ``kl16.ckpt`` holds its weights under ``model``. Both are read without running code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specmm.checkpoints import (
    PICKLED,
    State,
    _read_pickle,
    _unnest,
    fingerprint,
    load_strict,
    read_checkpoint,
    read_json,
    weights_file,
)
from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig
from specmm.image_ar.continuous.mar import MAR, PUBLISHED, MARConfig

Config = TypeVar("Config", MARConfig, KLConfig)
EMA = "model_ema"
KL_LEFTOVERS = ("loss",)  # the discriminator of latent diffusion's training
CELL = 16  # pixels a token side of the published models


def load_mar(
    path: str | Path, config: MARConfig | None = None, *, heads: int | None = None, dtype: torch.dtype = torch.float32
) -> MAR:
    """The model in the file or folder ``path``, in evaluation mode, with weights in ``dtype``.

    Without ``config`` the sizes are those of ``config.json`` beside the weights, else of the weights; the attention
    ``heads`` are needed where neither tells. Raises ``ValueError`` when sizes are missing and, naming them, when
    weights are missing, extra or misshapen.
    """
    state = _averaged(path)
    model = MAR(config or read_config(path, MARConfig) or infer_mar_config(state, heads=heads, source=path))
    load_strict(model, state, source=path)
    return model.to(dtype).eval()


def load_kl(path: str | Path, config: KLConfig | None = None, *, dtype: torch.dtype = torch.float32) -> AutoencoderKL:
    """The autoencoder in the file or folder ``path``, in evaluation mode; sizes and errors as ``load_mar``."""
    state = read_checkpoint(path)
    model = AutoencoderKL(config or read_config(path, KLConfig) or infer_kl_config(state, path))
    load_strict(model, state, KL_LEFTOVERS, path)
    return model.to(dtype).eval()


def save_mar(model: MAR, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` (official names; ``dtype`` such as bf16 halves it) and ``config.json``."""
    _save(model, model.config, Path(folder), dtype)


def save_kl(model: AutoencoderKL, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` and ``folder/config.json`` as ``save_mar`` does."""
    _save(model, model.config, Path(folder), dtype)


def kl_fingerprint(model: AutoencoderKL) -> str:
    """Twelve hexadecimal digits that tell autoencoders apart, whatever their dtype."""
    return fingerprint(model.decoder.conv_in.weight, model.post_quant_conv.weight, model.quant_conv.weight)


def _averaged(path: str | Path) -> State:
    file = weights_file(path)
    if file.suffix not in PICKLED:
        return read_checkpoint(file)
    tree = _read_pickle(file)
    return _unnest(tree[EMA] if isinstance(tree, Mapping) and EMA in tree else tree, file)


def _save(model: nn.Module, config: MARConfig | KLConfig, folder: Path, dtype: torch.dtype | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model": type(config).__name__, **asdict(config)}, indent=2) + "\n")


def read_config(path: str | Path, kind: type[Config]) -> Config | None:
    """The ``kind`` of configuration in the ``config.json`` beside ``path``'s weights; None when there is none of ours.

    Raises ``ValueError`` when it describes another kind of model or holds unknown names.
    """
    file = weights_file(path).with_name("config.json")
    sizes = read_json(file) if file.is_file() else {}
    if "model" not in sizes:
        return None
    if sizes.pop("model") != kind.__name__:
        raise ValueError(f"{file} must describe a {kind.__name__}, got another model's, point to the right folder")
    unknown = set(sizes) - {field.name for field in fields(kind)}
    if unknown:
        raise ValueError(f"{file} must hold sizes of {kind.__name__}, got {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()}
    return kind(**given)


def infer_mar_config(state: Mapping[str, Tensor], *, heads: int | None = None, source: str | Path = "") -> MARConfig:
    """Sizes of a MAR ``state`` by its shapes, at 16 pixels a token; ``heads`` also by the published sizes."""
    sizes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        dim = _shape(state, f"{side}_norm.weight", source)[0]
        depth = _count(state, rf"{side}_blocks\.(\d+)\.")
        known = (p[f"{side}_num_heads"] for p in PUBLISHED.values() if p[f"{side}_embed_dim"] == dim)
        found = heads or next(known, None)
        if found is None:
            raise ValueError(f"heads must be given: {source} does not tell, pass it or put a config.json beside it")
        sizes |= {f"{side}_embed_dim": dim, f"{side}_depth": depth, f"{side}_num_heads": found}
    length = _shape(state, "diffusion_pos_embed_learned", source)[1]
    net = "diffloss.net"
    return MARConfig(
        img_size=round(length**0.5) * CELL,
        vae_stride=CELL,
        vae_embed_dim=_shape(state, "z_proj.weight", source)[1],
        mlp_ratio=_shape(state, "encoder_blocks.0.mlp.fc1.weight", source)[0] / sizes["encoder_embed_dim"],
        class_num=_shape(state, "class_emb.weight", source)[0],
        buffer_size=_shape(state, "encoder_pos_embed_learned", source)[1] - length,
        diffloss_d=_count(state, r"diffloss\.net\.res_blocks\.(\d+)\."),
        diffloss_w=_shape(state, f"{net}.input_proj.weight", source)[0],
        fake_latent="fake_latent" in state,
        **sizes,
    )


def infer_kl_config(state: Mapping[str, Tensor], source: str | Path = "") -> KLConfig:
    """Sizes of an autoencoder's ``state`` by its shapes; the scale is the published one."""
    ch = _shape(state, "encoder.conv_in.weight", source)[0]
    levels = _count(state, r"encoder\.down\.(\d+)\.")
    widths = [_shape(state, f"encoder.down.{i}.block.0.conv1.weight", source)[0] for i in range(levels)]
    with_attention = [i for i in range(levels) if f"encoder.down.{i}.attn.0.q.weight" in state]
    config = KLConfig(
        ch=ch,
        ch_mult=tuple(w // ch for w in widths),
        num_res_blocks=_count(state, r"encoder\.down\.0\.block\.(\d+)\."),
        z_channels=_shape(state, "post_quant_conv.weight", source)[0],
    )
    return replace(config, attn_resolutions=tuple(config.resolution // 2**i for i in with_attention))


def _shape(state: Mapping[str, Tensor], key: str, source: str | Path) -> torch.Size:
    if key not in state:
        raise ValueError(f"{source} must hold {key}, got a file without it: is it another model's?")
    return state[key].shape


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    """One more than the largest number that ``pattern`` finds at the start of a name."""
    found = (re.match(pattern, key) for key in state)
    return 1 + max((int(match[1]) for match in found if match), default=-1)
