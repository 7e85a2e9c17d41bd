"""Published and our own LlamaGen and VQ files as modules, and back to files under the official names.

Sizes come from a ``config.json`` beside the weights, or from the shapes of the weights, as far as these tell.
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

from specmm.checkpoints import LEFTOVERS, load_strict, read_checkpoint, weights_file
from specmm.image_ar.tokens.convert import from_lantern, is_lantern
from specmm.image_ar.tokens.gpt import PUBLISHED, GPTConfig, Transformer
from specmm.image_ar.tokens.vq import VQConfig, VQModel

Config = TypeVar("Config", GPTConfig, VQConfig)
VQ_LEFTOVERS = ("codebook_used",)  # the release's ring buffer of used codes


def load_gpt(
    path: str | Path,
    config: GPTConfig | None = None,
    *,
    n_head: int | None = None,
    block_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """The transformer in the file or folder ``path``, in evaluation mode, with weights in ``dtype``.

    Without ``config`` the sizes are those of ``config.json`` beside the weights, else of the weights; ``n_head`` and
    ``block_size`` (256 for 256 px, 576 for 384 px) are needed where neither tells. LANTERN's names are understood.
    Raises ``ValueError`` when sizes are missing and, naming them, when weights are missing, extra or misshapen.
    """
    state = read_checkpoint(path)
    if is_lantern(state):
        state = from_lantern({k: v for k, v in state.items() if "rotary_emb" not in k})
    config = config or read_config(path, GPTConfig)
    config = config or infer_gpt_config(state, n_head=n_head, block_size=block_size, source=path)
    model = Transformer(config)
    load_strict(model, state, LEFTOVERS, path)
    return model.to(dtype).eval()


def load_vq(path: str | Path, config: VQConfig | None = None, *, dtype: torch.dtype = torch.float32) -> VQModel:
    """The image tokenizer in the file or folder ``path``, in evaluation mode; sizes and errors as ``load_gpt``."""
    state = read_checkpoint(path)
    model = VQModel(config or read_config(path, VQConfig) or infer_vq_config(state, path))
    load_strict(model, state, VQ_LEFTOVERS, path)
    return model.to(dtype).eval()


def save_gpt(model: Transformer, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` (official names; ``dtype`` such as bf16 halves it) and ``config.json``."""
    _save(model, model.config, Path(folder), dtype)


def save_vq(model: VQModel, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` and ``folder/config.json`` as ``save_gpt`` does."""
    _save(model, model.config, Path(folder), dtype)


def _save(model: nn.Module, config: GPTConfig | VQConfig, folder: Path, dtype: torch.dtype | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model": type(config).__name__, **asdict(config)}, indent=2) + "\n")


def read_config(path: str | Path, kind: type[Config]) -> Config | None:
    """The ``kind`` of configuration in the ``config.json`` beside ``path``'s weights; None when there is none.

    A file of another program (LANTERN's, a hub's) has no ``model`` of ours in it and counts as none. Raises
    ``ValueError`` when it is ours and is not JSON, describes another kind of model or holds unknown names.
    """
    file = weights_file(path).with_name("config.json")
    if not file.is_file():
        return None
    try:
        sizes = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, got {error}") from error
    if not isinstance(sizes, dict) or sizes.get("model") not in (GPTConfig.__name__, VQConfig.__name__):
        return None
    if sizes.pop("model") != kind.__name__:
        raise ValueError(f"{file} must describe a {kind.__name__}, got another model's, point to the right folder")
    unknown = set(sizes) - {field.name for field in fields(kind)}
    if unknown:
        raise ValueError(f"{file} must hold sizes of {kind.__name__}, got {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()}
    return kind(**given)


def infer_gpt_config(
    state: Mapping[str, Tensor], *, n_head: int | None = None, block_size: int | None = None, source: str | Path = ""
) -> GPTConfig:
    """Sizes of a LlamaGen ``state`` by its shapes; ``n_head`` also by the published sizes.

    An old file's ``freqs_cis`` table [P + block_size, D/2, 2] tells both. Raises ``ValueError`` naming what is needed.
    """
    vocab_size, dim = _shape(state, "tok_embeddings.weight", source)
    ffn_dim = _shape(state, "layers.0.feed_forward.w1.weight", source)[0]
    n_layer = _count(state, r"layers\.(\d+)\.")
    prefix = _prefix_sizes(state, source)
    if "freqs_cis" in state:
        rows, half, _ = _shape(state, "freqs_cis", source)
        n_head, block_size = n_head or dim // (2 * half), block_size or rows - prefix.get("cls_token_num", 1)
    n_head = n_head or next(
        (p["n_head"] for p in PUBLISHED.values() if (p["dim"], p["n_layer"]) == (dim, n_layer)), None
    )
    if n_head is None or block_size is None:
        wanted = "n_head" if n_head is None else "block_size (256 for 256 px, 576 for 384 px)"
        raise ValueError(
            f"{wanted} must be given: {source} does not tell, pass it or put a config.json beside the file"
        )
    sizes: dict[str, Any] = dict(dim=dim, n_layer=n_layer, n_head=n_head, vocab_size=vocab_size, block_size=block_size)
    return _with_ffn(GPTConfig(**sizes, **prefix), ffn_dim)


def _prefix_sizes(state: Mapping[str, Tensor], source: str | Path) -> dict[str, Any]:
    """Sizes of the class or caption embedder."""
    if "cls_embedding.uncond_embedding" in state:
        tokens, width = _shape(state, "cls_embedding.uncond_embedding", source)
        return {"model_type": "t2i", "cls_token_num": tokens, "caption_dim": width}
    return {"num_classes": _shape(state, "cls_embedding.embedding_table.weight", source)[0] - 1}


def _with_ffn(config: GPTConfig, ffn_dim: int) -> GPTConfig:
    """``config`` with the feed-forward width ``ffn_dim``, said as LlamaGen's configurations say it."""
    if config.ffn_dim == ffn_dim:
        return config
    multiplier = (ffn_dim + 0.5) / int(8 * config.dim / 3)  # rounds down to ffn_dim
    return replace(config, multiple_of=1, ffn_dim_multiplier=multiplier)


def infer_vq_config(state: Mapping[str, Tensor], source: str | Path = "") -> VQConfig:
    """Sizes of a VQ ``state`` by its shapes; the codebook counts as normalised, as in all published ones."""
    size, width = _shape(state, "quantize.embedding.weight", source)
    ch = _shape(state, "encoder.conv_in.weight", source)[0]
    levels = _count(state, r"encoder\.conv_blocks\.(\d+)\.")
    widths = [_shape(state, f"encoder.conv_blocks.{i}.res.0.conv1.weight", source)[0] for i in range(levels)]
    return VQConfig(
        codebook_size=size,
        codebook_embed_dim=width,
        ch=ch,
        ch_mult=tuple(w // ch for w in widths),
        num_res_blocks=_count(state, r"encoder\.conv_blocks\.0\.res\.(\d+)\."),
        z_channels=_shape(state, "encoder.conv_out.weight", source)[0],
    )


def _shape(state: Mapping[str, Tensor], key: str, source: str | Path) -> torch.Size:
    if key not in state:
        raise ValueError(f"{source} must hold {key}, got a file without it: is it another model's?")
    return state[key].shape


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    """One more than the largest number that ``pattern`` finds at the start of a name."""
    found = (re.match(pattern, key) for key in state)
    return 1 + max((int(match[1]) for match in found if match), default=-1)
