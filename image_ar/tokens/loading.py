"""Reads LlamaGen's files, published or ours, and writes them under the official names.

Sizes come from a ``config.json`` beside the weights, or from the weights' shapes where these
determine them. LANTERN's files have Hugging Face's names of a Llama and separate queries, keys and
values; the order of rows and the rotary pairing are the same. Shape letters: C width, P prefix
positions, D head width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specmm.image_ar.autoencoder import VQConfig, VQModel
from specmm.image_ar.files import count, load_module, shape_of, stack_sizes
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import PUBLISHED, GPTConfig, Transformer
from specmm.loading.checkpoints import (
    FileError,
    State,
    check_fingerprint,
    fingerprint,
    load_strict,
    read_checkpoint,
    read_json,
    weights_file,
    write_checkpoint,
)
from specmm.loading.mapped import DtypeChoice, WithoutWeights, give_back

DrafterHead = BlockHead | EagleHead
VQ_LEFTOVERS = ("codebook_used",)  # the release's ring buffer of used codes
EAGLE_LEFTOVERS = ("rotary_emb", "freqs_cis")
EAGLE_GATE = "layers.0.mlp.gate_proj.weight"
TO_LANTERN = {
    "tok_embeddings": "model.embed_tokens",
    "output": "lm_head",
    "norm": "model.norm",
    "cls_embedding": "model.cls_embedding",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
FROM_LANTERN = {new: old for old, new in TO_LANTERN.items()}
QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
FUSED = "attention.wqkv.weight"


class DrafterHeads(nn.ModuleDict):
    """Drafters by kind as a component of a pipeline: diffusers asks components for their dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, float32 if there are none."""
        return next((weight.dtype for weight in self.parameters()), torch.float32)


def load_gpt(
    path: str | Path,
    config: GPTConfig | None = None,
    *,
    n_head: int | None = None,
    block_size: int | None = None,
    dtype: DtypeChoice = torch.float32,
) -> Transformer:
    """The transformer in the file or folder ``path``, in evaluation mode. ``dtype`` is the
    weights', or a function that chooses it by the number of parameters.

    Without ``config`` the sizes come from ``config.json`` beside the weights, else from the
    weights' shapes; ``n_head`` and ``block_size`` (256 for 256 px, 576 for 384 px) are needed if
    neither gives them. LANTERN's names are accepted. Raises ``ValueError`` when sizes are missing
    and, naming them, when weights are missing, extra or misshapen.
    """
    state = read_checkpoint(path)
    if "model.embed_tokens.weight" in state:
        state = from_lantern({k: v for k, v in state.items() if "rotary_emb" not in k})
    infer = partial(infer_gpt_config, n_head=n_head, block_size=block_size)
    return load_module(path, Transformer, GPTConfig, infer, config, state=state, dtype=dtype)


def load_vq(
    path: str | Path, config: VQConfig | None = None, *, dtype: torch.dtype = torch.float32
) -> VQModel:
    """The image tokenizer in ``path``, in evaluation mode; sizes and errors as ``load_gpt``."""
    common = (path, VQModel, VQConfig, infer_vq_config, config)
    return load_module(*common, leftovers=VQ_LEFTOVERS, dtype=dtype)


def infer_gpt_config(
    state: Mapping[str, Tensor],
    *,
    n_head: int | None = None,
    block_size: int | None = None,
    source: str | Path = "",
) -> GPTConfig:
    """Sizes of a LlamaGen ``state`` by its shapes; ``n_head`` also by the published sizes.

    The ``freqs_cis`` table [P + block_size, D/2, 2] in an old file gives both. Raises
    ``ValueError`` naming the sizes that must be given.
    """
    vocab_size, dim = shape_of(state, "tok_embeddings.weight", source)
    ffn_dim = shape_of(state, "layers.0.feed_forward.w1.weight", source)[0]
    n_layer = count(state, r"layers\.(\d+)\.")
    prefix = _prefix_sizes(state, source)
    if "freqs_cis" in state:
        rows, half, _ = shape_of(state, "freqs_cis", source)
        n_head = n_head or dim // (2 * half)
        block_size = block_size or rows - prefix.get("cls_token_num", 1)
    heads = (p["n_head"] for p in PUBLISHED.values() if (p["dim"], p["n_layer"]) == (dim, n_layer))
    n_head = n_head or next(heads, None)
    if n_head is None or block_size is None:
        missing = "n_head" if n_head is None else "block_size (256 for 256 px, 576 for 384 px)"
        raise ValueError(
            f"{missing} must be given, because {source} does not contain it; pass it, or put a "
            "config.json beside the file"
        )
    config = GPTConfig(dim, n_layer, n_head, vocab_size, block_size, **prefix)
    if config.ffn_dim == ffn_dim:
        return config
    multiplier = (ffn_dim + 0.5) / int(8 * config.dim / 3)  # rounds down to ffn_dim
    return replace(config, multiple_of=1, ffn_dim_multiplier=multiplier)


def _prefix_sizes(state: Mapping[str, Tensor], source: str | Path) -> dict[str, Any]:
    """Sizes of the class or caption embedder."""
    if "cls_embedding.uncond_embedding" in state:
        tokens, width = shape_of(state, "cls_embedding.uncond_embedding", source)
        return {"model_type": "t2i", "cls_token_num": tokens, "caption_dim": width}
    return {"num_classes": shape_of(state, "cls_embedding.embedding_table.weight", source)[0] - 1}


def infer_vq_config(state: Mapping[str, Tensor], source: str | Path = "") -> VQConfig:
    """Sizes of a VQ ``state`` by its shapes; the codebook counts as normalised, as published."""
    size, width = shape_of(state, "quantize.embedding.weight", source)
    return VQConfig(
        codebook_size=size,
        codebook_embed_dim=width,
        z_channels=shape_of(state, "encoder.conv_out.weight", source)[0],
        **stack_sizes(state, source, "conv_blocks", "res"),
    )


def to_lantern(state: Mapping[str, Tensor]) -> State:
    """LANTERN's names for a LlamaGen ``state``. Raises ``ValueError`` for an unknown name."""
    renamed: State = {}
    for key, tensor in state.items():
        layer, rest = _split(key)
        if layer and rest == FUSED:
            for name, part in zip(QKV, tensor.chunk(3), strict=True):
                renamed[f"model.{layer}{name}"] = part.clone()
        else:
            renamed[("model." if layer else "") + layer + _rename(rest, TO_LANTERN, key)] = tensor
    return renamed


def from_lantern(state: Mapping[str, Tensor]) -> State:
    """LlamaGen's names for a LANTERN ``state``.

    Raises ``ValueError`` on a name that LANTERN does not have and on a layer without all of q, k
    and v.
    """
    renamed: State = {}
    for key, tensor in state.items():
        layer, rest = _split(key.removeprefix("model.") if key.startswith("model.layers.") else key)
        if rest not in QKV:
            renamed[layer + _rename(rest, FROM_LANTERN, key)] = tensor
            continue
        names = [f"model.{layer}{name}" for name in QKV]
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"a layer must hold its q, k and v projections, got none named {missing[0]}"
            )
        renamed[layer + FUSED] = torch.cat([state[name] for name in names])  # [3C, C]
        for name in names:
            give_back(state[name])
    return renamed


def _split(key: str) -> tuple[str, str]:
    """``("layers.3.", rest)`` of a layer's name, ``("", name)`` of any other."""
    match = re.match(r"layers\.\d+\.", key)
    return ("", key) if match is None else (match[0], key[match.end() :])


def _rename(name: str, table: Mapping[str, str], key: str) -> str:
    for old, new in table.items():
        if name.startswith(old + "."):
            return new + name[len(old) :]
    raise ValueError(f"weights must carry names of {', '.join(table)}, got {key}")


def target_fingerprint(model: Transformer) -> str:
    """Fingerprint of a drafter's target: a hash of the head and of the first and last layer, twelve
    hexadecimal digits.
    """
    weights = model.state_dict()
    first = weights["layers.0.attention.wo.weight"]
    last = weights[f"layers.{model.config.n_layer - 1}.feed_forward.w2.weight"]
    return fingerprint(weights["output.weight"], first, last)


def load_drafters(
    target: Transformer, model: Path, drafter: str | Path | None = None
) -> dict[str, DrafterHead]:
    """Every drafter in the folder of a ``model``, at ``drafters/<kind>/{model.safetensors,
    config.json}``, by kind and in the target's dtype. A ``drafter`` folder elsewhere replaces the
    model's drafter of the same kind.

    Raises ``ValueError`` for a folder without a drafter, and for a drafter of another target.
    """
    shipped = model / "drafters"
    folders = {kind: shipped / kind for kind in READERS if (shipped / kind).is_dir()}
    if drafter is not None:
        folders[kind_of(drafter)] = Path(drafter)
    return {kind: READERS[kind](folder, target) for kind, folder in folders.items()}


def kind_of(drafter: str | Path) -> str:
    """The kind of the drafter in the folder ``drafter``; raises ``ValueError`` if it holds none."""
    file = Path(drafter) / "config.json"
    kinds = {"BlockHead": "block", "EagleHead": "eagle"}
    kind = kinds.get(str(read_json(file).get("model"))) if file.is_file() else None
    if kind is None:
        raise ValueError(
            f"drafter must be a folder with a block drafter or an EAGLE head, got {drafter}; "
            "specmm train drafter makes one"
        )
    return kind


def save_drafters(
    drafters: Mapping[str, DrafterHead],
    folder: Path,
    target: Transformer,
    dtype: torch.dtype | None = None,
) -> None:
    """Write every drafter with the target's fingerprint."""
    fingerprint = target_fingerprint(target) if drafters else None
    for kind, head in drafters.items():
        save_drafter(head, folder / kind, fingerprint=fingerprint, dtype=dtype)


def save_drafter(
    head: DrafterHead,
    folder: Path,
    *,
    fingerprint: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a drafter's weights and sizes.

    With the target's ``fingerprint``, it can be loaded for that target only.
    """
    target_facts = {} if fingerprint is None else {"target_fingerprint": fingerprint}
    write_checkpoint(head.state_dict(), head.config.facts() | target_facts, folder, dtype)


def load_block(folder: Path, target: Transformer) -> BlockHead:
    """The block drafter in ``folder``; raises ``ValueError`` if it is for another target."""
    facts = read_json(folder / "config.json")
    needed = ("levels", "layers", "aux_layers", "target_fingerprint")
    missing = [key for key in needed if key not in facts]
    if missing:
        raise ValueError(
            f"{folder / 'config.json'} must say {', '.join(missing)}, got {sorted(facts)}"
        )
    check_fingerprint(facts["target_fingerprint"], target_fingerprint(target), folder)
    sizes = facts["levels"], facts["layers"], target.config, tuple(facts["aux_layers"])
    config = BlockConfig(*sizes, facts.get("inner", 0))
    with WithoutWeights():
        head = BlockHead(config)
    weight = target.output.weight
    load_strict(head, read_checkpoint(folder), source=folder, dtype=weight.dtype)
    return head.to(weight.device, weight.dtype).eval()


def load_eagle(
    path: str | Path,
    target: GPTConfig,
    *,
    fingerprint: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> EagleHead:
    """The EAGLE head in the file or folder ``path``, ours or LANTERN's, in evaluation mode, for a
    target of ``target`` sizes.

    ``fingerprint`` is the target's (``target_fingerprint``); it is compared when the
    ``config.json`` beside the weights records one. Raises ``ValueError`` for a drafter of another
    target and, naming them, when weights are missing, extra or misshapen.
    """
    state = read_checkpoint(path)
    gate = state.get(EAGLE_GATE)
    config = EagleConfig(target, None if gate is None else len(gate))
    _check_eagle(path, state, config.sizes() | {"target_fingerprint": fingerprint})
    with WithoutWeights():
        head = EagleHead(config)
    load_strict(head, state, EAGLE_LEFTOVERS, path, dtype)
    return head.to(dtype).eval()


def _load_eagle_for(folder: Path, target: Transformer) -> EagleHead:
    """As :func:`load_eagle`, on the ``target``'s device and in its dtype."""
    weight = target.output.weight
    fingerprint = target_fingerprint(target)
    head = load_eagle(folder, target.config, fingerprint=fingerprint, dtype=weight.dtype)
    return head.to(weight.device)


def _check_eagle(path: str | Path, state: State, sizes: Mapping[str, object]) -> None:
    """Raise :class:`FileError` unless the file has these ``sizes``."""
    file = weights_file(path).with_name("config.json")
    facts = read_json(file) if file.is_file() else {}
    if "embed_tokens.weight" in state:
        facts["vocab_size"], facts["hidden_size"] = state["embed_tokens.weight"].shape
    for name, value in sizes.items():
        if value is not None and facts.get(name, value) != value:
            raise FileError(
                path,
                f"is for another target: drafter must be of this target ({name} {value}), got "
                f"{facts[name]}; train one for it",
            )


READERS: Mapping[str, Callable[[Path, Transformer], DrafterHead]] = {
    "block": load_block,
    "eagle": _load_eagle_for,
}
