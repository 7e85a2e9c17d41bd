"""Dream and LLaDA as what they are underneath: a Qwen2 and a Llama whose attention mask is open
everywhere.

Dream keeps Qwen2's names; LLaDA's are renamed. So neither needs remote code, and transformers'
kernels serve. Sources: Dream (arXiv 2508.15487), LLaDA (arXiv 2502.09992).

Shape letters: B batch, L positions, C width, v vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specmm.checkpoints import State
from specmm.diffusion_drafters.models.masked import check_mask, places

QWEN_SIZES = {
    name: name
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    )
}
LLADA_SIZES = {
    "vocab_size": "embedding_size",
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_sequence_length",
    "rms_norm_eps": "rms_norm_eps",
}
LLADA_NAMES = {
    "wte": "model.embed_tokens",
    "ln_f": "model.norm",
    "ff_out": "lm_head",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "blocks.ff_out": "mlp.down_proj",
}
LLADA_PLAIN = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
}
LLADA_OFF = (
    "alibi",
    "include_bias",
    "include_qkv_bias",
    "scale_logits",
    "input_emb_norm",
    "attention_layer_norm",
)


class FullAttention:
    """A causal transformers model read without its causal mask; see :class:`DiffusionLM`.

    Raises ``ValueError`` for a mask that is no token of the model and for one that ends a text.
    """

    def __init__(self, model: Any, mask: int, end: int | None, shift: int) -> None:
        self.model, self.end, self.shift = model.eval(), end, shift
        self.vocabulary, self.room = (
            int(model.config.vocab_size),
            int(model.config.max_position_embeddings),
        )
        self.mask = check_mask(mask, self.vocabulary, end)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.model.lm_head.weight.device

    def states(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """States [B, L, C] of ``tokens`` [B, L]; nobody attends where ``valid`` [B, L] bool is
        false.
        """
        width, dtype = tokens.shape[1], self.model.lm_head.weight.dtype
        bias = torch.zeros(
            1, 1, 1, width, dtype=dtype, device=tokens.device
        )  # not None: that would be causal
        if valid is not None:
            bias = bias.masked_fill(~valid[:, None, None], float("-inf"))
        order = None if valid is None else places(valid)
        read = self.model.model(
            input_ids=tokens, attention_mask=bias, position_ids=order, use_cache=False
        )
        return read.last_hidden_state

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., v] of ``states`` [..., C]."""
        return self.model.lm_head(states)


def dream_config(facts: Mapping[str, Any]) -> Qwen2Config:
    """Dream's ``config.json`` as Qwen2's; raises ``ValueError`` for sizes not given and layers it
    cannot have.
    """
    tied = bool(facts.get("tie_word_embeddings", False))
    return Qwen2Config(
        **read_sizes(facts, QWEN_SIZES, "Dream"),
        **plain_rope(facts, 10000.0),
        tie_word_embeddings=tied,
    )


def llada_config(facts: Mapping[str, Any]) -> LlamaConfig:
    """LLaDA's ``config.json`` as Llama's; raises ``ValueError`` for what Llama cannot be."""
    odd = {k: facts[k] for k, v in LLADA_PLAIN.items() if facts.get(k, v) != v}
    odd |= {k: facts[k] for k in LLADA_OFF if facts.get(k)}
    if odd:
        raise ValueError(f"a LLaDA model must have a Llama's layers, got {odd}")
    full = {**facts}
    if full.get("n_kv_heads") is None:
        full["n_kv_heads"] = facts.get("n_heads")
    tied = bool(facts.get("weight_tying", False))
    return LlamaConfig(
        **read_sizes(full, LLADA_SIZES, "LLaDA"),
        **plain_rope(facts, 10000.0),
        tie_word_embeddings=tied,
    )


def llada_state(state: State) -> State:
    """LLaDA's tensors under Llama's names; names that are not LLaDA's stay, for strict loading to
    refuse.
    """
    return {_llama_name(name): tensor for name, tensor in state.items()}


def empty(config: Qwen2Config | LlamaConfig) -> Any:
    """A model of ``config`` with weights to be loaded."""
    kind: Any = Qwen2ForCausalLM if isinstance(config, Qwen2Config) else LlamaForCausalLM
    return kind(config)


def _llama_name(name: str) -> str:
    found = re.fullmatch(r"model\.transformer\.(?:blocks\.(\d+)\.)?(\w+)\.weight", name)
    if found is None:
        return name
    layer, part = found.groups()
    if layer is None:
        return f"{LLADA_NAMES.get(part, part)}.weight"
    return f"model.layers.{layer}.{LLADA_NAMES.get(f'blocks.{part}', LLADA_NAMES.get(part, part))}.weight"


def read_sizes(facts: Mapping[str, Any], names: Mapping[str, str], kind: str) -> dict[str, Any]:
    """Sizes by transformers' names from ``facts`` that call them ``names``; ``ValueError`` for
    those not given.
    """
    missing = [
        theirs for theirs in names.values() if not isinstance(facts.get(theirs), int | float)
    ]
    if missing:
        raise ValueError(
            f"the config of a {kind} model must give numbers, got none for {', '.join(missing)}"
        )
    return {ours: facts[theirs] for ours, theirs in names.items()}


def plain_rope(facts: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Plain rotary positions as transformers 5 is told of them, whichever version wrote ``facts``.

    Raises ``ValueError`` for scaled positions and for sliding windows.
    """
    kept = facts.get("rope_parameters") or {}
    if facts.get("rope_scaling") or kept.get("rope_type", "default") != "default":
        raise ValueError(
            f"positions must be plain rotary ones, got {facts.get('rope_scaling') or kept}"
        )
    if facts.get("use_sliding_window") or "sliding_attention" in (facts.get("layer_types") or ()):
        raise ValueError("every layer must attend everything, got layers with a sliding window")
    given = {"rope_theta": base, **kept, **facts}["rope_theta"]
    return {"rope_parameters": {"rope_type": "default", "rope_theta": float(given)}}
