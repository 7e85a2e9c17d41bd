"""LANTERN's EAGLE head for LlamaGen: one layer over features of the committed tokens, with the
official names.

Position i reads fc([emb(token_{i+1}); hidden_i]), hidden_i the target's state after its final norm,
and predicts hidden_{i+1}; the target's output head, without a norm, turns that into logits. The
layer has no norm before its attention. Positions are the target's less one: P - 1 prefix rows that
are not turned, then the raster. Source: EAGLE (arXiv 2401.15077), LANTERN (2410.03355).

Shape letters: R rows (both guidance branches), T query positions, S cached positions, C width, H
heads, D head width, F inner width, V vocabulary, P prefix positions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from specmm.cache import Memory
from specmm.checkpoints import load_strict, read_checkpoint, read_json, weights_file
from specmm.image_ar.tokens.gpt import GPTConfig, RMSNorm, Rotary, rotary_table, rotate

LEFTOVERS = ("rotary_emb", "freqs_cis")
GATE = "layers.0.mlp.gate_proj.weight"


@dataclass(frozen=True)
class EagleConfig:
    """Sizes of a head for a target of ``target`` sizes; ``ffn_dim`` F is the target's unless given."""

    target: GPTConfig
    ffn_dim: int | None = None


class EagleAttention(nn.Module):
    """Self-attention with separate projections, two-dimensional rotary factors on queries and keys."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(
        self, x: Tensor, factors: Tensor, bias: Tensor | None, memory: Memory | None
    ) -> Tensor:
        """Attend ``x`` [R, T, C] to itself (causally, without memory) or to what ``memory`` holds
        under ``bias``.
        """
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, factors), rotate(k, factors)  # [R, T, H, D]
        if memory is not None:
            k, v = memory.write(k, v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=memory is None and bias is None
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


class EagleMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, ffn_dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """Attention without a norm before it, then a normed feed-forward, each with a residual."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        target = config.target
        self.self_attn = EagleAttention(target.dim, target.n_head)
        self.mlp = EagleMLP(target.dim, config.ffn_dim or target.ffn_dim)
        self.post_attention_layernorm = RMSNorm(target.dim, target.norm_eps)

    def forward(
        self, x: Tensor, factors: Tensor, bias: Tensor | None, memory: Memory | None
    ) -> Tensor:
        """[R, T, C] -> [R, T, C]."""
        x = x + self.self_attn(x, factors, bias, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """The network; it has its own token embeddings and uses the target's output head."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config, target = config, config.target
        self.embed_tokens = nn.Embedding(target.vocab_size, target.dim)
        self.fc = nn.Linear(2 * target.dim, target.dim)
        self.layers = nn.ModuleList([EagleLayer(config)])
        table = rotary_table(
            target.grid, target.head_dim, target.cls_token_num - 1, target.rope_base
        )
        self.rotary = Rotary(table)

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """Predicted next hidden states [R, T, C] of ``hidden`` [R, T, C] and the ``tokens`` [R, T]
        after them.

        ``positions`` [R or 1, T] (0 … T-1 by default) count from the first prefix position; without
        ``memory`` the attention is causal, else it sees what ``memory`` holds under the additive
        ``bias`` [R or 1, 1, T, S].
        """
        factors = (
            self.rotary.first(tokens.shape[1]) if positions is None else self.rotary.at(positions)
        )
        x = self.fc(torch.cat([self.embed_tokens(tokens), hidden], dim=-1))
        return self.layers[0](x, factors, bias, memory)


def load_eagle(
    path: str | Path,
    target: GPTConfig,
    *,
    fingerprint: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> EagleHead:
    """The head in the file or folder ``path``, in evaluation mode, for a target of ``target``
    sizes.

    ``fingerprint`` is the target's (``target_fingerprint``); it is compared when the
    ``config.json`` beside the weights records one. Raises ``ValueError`` for a drafter of another
    target and, naming them, when weights are missing, extra or misshapen.
    """
    state = read_checkpoint(path)
    _check_target(path, state, target, fingerprint)
    gate = state.get(GATE)
    head = EagleHead(EagleConfig(target, None if gate is None else len(gate)))
    load_strict(head, state, LEFTOVERS, path)
    return head.to(dtype).eval()


def save_eagle(
    head: EagleHead,
    folder: str | Path,
    *,
    fingerprint: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``folder/model.safetensors`` (official names; ``dtype`` such as bf16 halves it) and
    ``config.json``.

    ``fingerprint`` of the target is recorded, so that the head is not loaded for another one.
    """
    folder, target = Path(folder), head.config.target
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in head.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {
        "model": type(head).__name__,
        **_sizes(target),
        "num_key_value_heads": target.n_head,
        "num_hidden_layers": 1,
        "intermediate_size": len(state[GATE]),
        "rms_norm_eps": target.norm_eps,
        "bias": True,
    }
    if fingerprint is not None:
        sizes["target_fingerprint"] = fingerprint
    (folder / "config.json").write_text(json.dumps(sizes, indent=2) + "\n")


def _sizes(target: GPTConfig) -> dict[str, Any]:
    """What a head and its target must agree on, under the names of a Llama configuration."""
    return {
        "hidden_size": target.dim,
        "vocab_size": target.vocab_size,
        "num_attention_heads": target.n_head,
        "block_size": target.block_size,
        "cls_token_num": target.cls_token_num,
    }


def _check_target(
    path: str | Path, state: dict[str, Tensor], target: GPTConfig, fingerprint: str | None
) -> None:
    facts = _read_facts(path)
    if "embed_tokens.weight" in state:
        vocabulary, width = state["embed_tokens.weight"].shape
        facts |= {"hidden_size": width, "vocab_size": vocabulary}
    wanted = _sizes(target) | ({} if fingerprint is None else {"target_fingerprint": fingerprint})
    for name, value in wanted.items():
        if facts.get(name, value) != value:
            raise ValueError(
                f"drafter must be of this target ({name} {value}), got {facts[name]} in {path}, train one for it"
            )


def _read_facts(path: str | Path) -> dict[str, Any]:
    """The ``config.json`` beside the weights; empty when there is none."""
    file = weights_file(path).with_name("config.json")
    return read_json(file) if file.is_file() else {}
