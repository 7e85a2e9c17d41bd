"""LlamaGen weights under LANTERN's (Hugging Face Llama-style) names, and back. No number changes.

LANTERN keeps queries, keys and values apart and renames the rest; the order of rows and the rotary
pairing are the same. Shape letters: C width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]

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


def is_lantern(state: Mapping[str, Tensor]) -> bool:
    """Whether ``state`` carries LANTERN's names."""
    return "model.embed_tokens.weight" in state


def to_lantern(state: Mapping[str, Tensor]) -> State:
    """LANTERN's names for a LlamaGen ``state``. Raises ``ValueError`` on a name that LlamaGen does
    not have.
    """
    renamed: State = {}
    for key, tensor in state.items():
        layer, rest = _split(key)
        if layer and rest == FUSED:
            parts = tensor.chunk(3)
            renamed |= {
                f"model.{layer}{name}": part.clone() for name, part in zip(QKV, parts, strict=True)
            }
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
        if rest == QKV[0]:
            renamed[layer + FUSED] = torch.cat(
                [_part(state, f"model.{layer}{name}") for name in QKV]
            )  # [3C, C]
        elif rest in QKV:
            _part(state, f"model.{layer}{QKV[0]}")
        else:
            renamed[layer + _rename(rest, FROM_LANTERN, key)] = tensor
    return renamed


def _split(key: str) -> tuple[str, str]:
    """``("layers.3.", rest)`` of a layer's name, ``("", name)`` of any other."""
    found = re.match(r"layers\.\d+\.", key)
    return ("", key) if found is None else (found[0], key[found.end() :])


def _rename(name: str, table: Mapping[str, str], key: str) -> str:
    for old, new in table.items():
        if name.startswith(old + "."):
            return new + name[len(old) :]
    raise ValueError(f"weights must carry names of {', '.join(table)}, got {key}")


def _part(state: Mapping[str, Tensor], key: str) -> Tensor:
    if key not in state:
        raise ValueError(f"a layer must hold its q, k and v projections, got none named {key}")
    return state[key]
