"""Loads diffusion language models from folders; ``config.json`` says which model it is.

Dream is a Qwen2 and LLaDA a Llama with bidirectional attention. Dream has Qwen2's parameter names,
LLaDA's are renamed, so neither needs remote code, and transformers' kernels serve. MDLM and BD3LM
are in :mod:`specmm.diffusion_drafters.models.ddit`. Sources: Dream (arXiv 2508.15487), LLaDA (arXiv
2502.09992).

Shape letters: B batch, L positions, C width, v vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from specmm.diffusion_drafters.models.ddit import DDiT, DDiTConfig, MaskedDDiT
from specmm.diffusion_drafters.models.masked import DiffusionLM, check_mask, positions
from specmm.extending.registry import unknown
from specmm.hf.drafters.files import (
    HEAD,
    LEFTOVERS,
    TOKENS,
    Facts,
    cast,
    plain_rope,
    qwen_config,
    read_sizes,
    read_state,
)
from specmm.loading.checkpoints import State, load_strict, read_json
from specmm.loading.mapped import WithoutWeights

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
# Values of a LLaDA's config under which it is still a Llama.
LLADA_ON: Facts = {
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
DREAM_MASK = 151666  # the released models', for configs without one
LLADA_MASK = 126336
DDIT_MASKS = ("mask_token_id", "mask_index")  # names in the configs of MDLM and BD3LM
DDIT_EMBEDDING = "vocab_embed.embedding"


class FullAttention:
    """A causal transformers model read without its causal mask; see :class:`DiffusionLM`.

    Raises ``ValueError`` for a mask that is not a token of the model, or that ends a text.
    """

    def __init__(self, model: Any, mask: int, end: int | None, shift: int) -> None:
        self.model = model.eval()
        self.end = end
        self.shift = shift
        self.vocabulary = int(model.config.vocab_size)
        self.room = int(model.config.max_position_embeddings)
        self.mask = check_mask(mask, self.vocabulary, end)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.lm_head.weight.device

    def to(self, device: torch.device) -> Self:
        """Move the weights to ``device``."""
        self.model.to(device)
        return self

    def states(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """States [B, L, C] of ``tokens`` [B, L]; see :class:`DiffusionLM`."""
        # An attention mask of None would be a causal one.
        dtype = self.model.lm_head.weight.dtype
        bias = torch.zeros(1, 1, 1, tokens.shape[1], dtype=dtype, device=tokens.device)
        order = None
        if valid is not None:
            bias = bias.masked_fill(~valid[:, None, None], float("-inf"))
            order = positions(valid)
        read = self.model.model(
            input_ids=tokens, attention_mask=bias, position_ids=order, use_cache=False
        )
        return read.last_hidden_state

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., v] of ``states`` [..., C]."""
        return self.model.lm_head(states)


def load_diffusion_lm(folder: str | Path, dtype: torch.dtype | None = None) -> DiffusionLM:
    """The model in ``folder``, in evaluation mode, in ``dtype`` or the file's.

    Raises ``ValueError`` naming an unknown kind of model, missing sizes, layers unlike the
    published ones, a mask token that the model lacks, and missing, extra, misshapen or non-finite
    weights.
    """
    facts = read_json(Path(folder) / "config.json")
    state = read_state(folder)
    kind = _kind(facts)
    if kind not in READERS:
        raise unknown("kind of diffusion language model", kind, READERS)
    weights_dtype = dtype or next(t.dtype for t in state.values() if t.is_floating_point())
    return READERS[kind](facts, state, folder, weights_dtype)


def _kind(facts: Facts) -> str:
    """The model type; MDLM's training configs have a parameterization instead."""
    subs = "mdlm" if facts.get("parameterization") == "subs" else None
    return str(facts.get("model_type") or subs).lower()


def _dream(facts: Facts, state: State, source: str | Path, dtype: torch.dtype) -> DiffusionLM:
    config = qwen_config(facts, "Dream")
    with WithoutWeights():
        model = Qwen2ForCausalLM(config)
    return _full(model, facts, state, source, dtype, DREAM_MASK, shift=1)


def _llada(facts: Facts, state: State, source: str | Path, dtype: torch.dtype) -> DiffusionLM:
    config = _llada_config(facts)
    with WithoutWeights():
        model = LlamaForCausalLM(config)
    state = {_llama_name(name): tensor for name, tensor in state.items()}
    return _full(model, facts, state, source, dtype, LLADA_MASK, shift=0)


def _full(
    model: Any,
    facts: Facts,
    state: State,
    source: str | Path,
    dtype: torch.dtype,
    mask: int,
    shift: int,
) -> FullAttention:
    """A Dream or LLaDA ``model`` with the weights ``state``, as a :class:`FullAttention`."""
    if model.config.tie_word_embeddings and TOKENS in state:
        state = {HEAD: state[TOKENS], **state}
    load_strict(model, state, LEFTOVERS, source, dtype)
    mask_token = facts.get("mask_token_id")
    end = facts.get("eos_token_id")
    return FullAttention(cast(model, dtype), mask if mask_token is None else mask_token, end, shift)


def _llada_config(facts: Facts) -> LlamaConfig:
    """LLaDA's ``config.json`` as Llama's; raises ``ValueError`` for settings that Llama lacks."""
    odd = {k: facts[k] for k, v in LLADA_ON.items() if facts.get(k, v) != v}
    odd |= {k: facts[k] for k in LLADA_OFF if facts.get(k)}
    if odd:
        raise ValueError(f"a LLaDA model must have a Llama's layers, got {odd}")
    full = {**facts}
    if full.get("n_kv_heads") is None:
        full["n_kv_heads"] = facts.get("n_heads")
    return LlamaConfig(
        **read_sizes(full, LLADA_SIZES, "LLaDA"),
        **plain_rope(facts, 10000.0),
        tie_word_embeddings=bool(facts.get("weight_tying", False)),
    )


def _llama_name(name: str) -> str:
    """Llama's name for a LLaDA tensor; other names stay, and strict loading refuses them."""
    match = re.fullmatch(r"model\.transformer\.(?:blocks\.(\d+)\.)?(\w+)\.weight", name)
    if match is None:
        return name
    layer, weight = match.groups()
    if layer is None:
        return f"{LLADA_NAMES.get(weight, weight)}.weight"
    inner = LLADA_NAMES.get(f"blocks.{weight}", LLADA_NAMES.get(weight, weight))
    return f"model.layers.{layer}.{inner}.weight"


def _ddit(facts: Facts, state: State, source: str | Path, dtype: torch.dtype) -> DiffusionLM:
    """The MDLM or BD3LM with the weights ``state``; not with time conditioning."""
    if facts.get("time_conditioning"):
        raise ValueError(f"{source} must be a model without time conditioning, got one with it")
    state = {name.removeprefix("backbone."): tensor for name, tensor in state.items()}
    config = _ddit_config(facts, state, source)
    with WithoutWeights():
        network = DDiT(config)
    load_strict(network, state, LEFTOVERS, source, dtype)
    mask = next((facts[name] for name in DDIT_MASKS if facts.get(name) is not None), None)
    return MaskedDDiT(cast(network, dtype), mask, facts.get("eos_token_id"))


def _ddit_config(facts: Facts, state: State, source: str | Path) -> DDiTConfig:
    """Sizes by their names on the hub or in a training config (nested under ``model``)."""
    values = {**facts, **facts.get("model", {})}

    def size(*names: str) -> int:
        number = next((values[n] for n in names if isinstance(values.get(n), int)), None)
        if number is None:
            fields = " or ".join(names)
            raise ValueError(
                f"{source} must give {fields} as a whole number in config.json, got none"
            )
        return int(number)

    if DDIT_EMBEDDING not in state:
        raise ValueError(f"{source} must hold {DDIT_EMBEDDING}, got {len(state)} other tensors")
    return DDiTConfig(
        vocabulary=len(state[DDIT_EMBEDDING]),
        width=size("hidden_dim", "hidden_size"),
        condition=size("cond_dim"),
        layers=size("n_blocks"),
        heads=size("n_heads"),
        length=size("model_length", "length"),
        block=size("block_size") if _kind(facts) == "bd3lm" else 0,
    )


Reader = Callable[[Facts, State, "str | Path", torch.dtype], DiffusionLM]
READERS: dict[str, Reader] = {"dream": _dream, "llada": _llada, "mdlm": _ddit, "bd3lm": _ddit}
