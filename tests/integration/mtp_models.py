"""Tiny random checkpoints with MTP layers, in the layouts of released ones.

The layers are saved as further layers of a deeper model, so that their names and shapes are those
that transformers' own conversions write.
"""

import json
import re

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from benchmarks.models.tiny import tiny_config
from tests.integration import vlm_models

SIZES = dict(
    vocab_size=37,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
EXPERTS = dict(
    first_k_dense_replace=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=16,
    n_shared_experts=1,
)
UNDER_MTP = dict(  # Qwen 3.5's names of what is beside the layers
    enorm="pre_fc_norm_embedding", hnorm="pre_fc_norm_hidden", eh_proj="fc", norm="norm"
)


def deepseek(count, **more):
    """Latent attention, whose keys and values differ in width."""
    config = tf.DeepseekV3Config(
        **SIZES | dict(num_key_value_heads=4),
        **EXPERTS,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        num_mtp_layers=count,
    )
    return config, False


def glm(count):
    """Rotary positions of half the width."""
    return tf.Glm4MoeConfig(**SIZES, **EXPERTS, num_mtp_layers=count), False


def mellum(count):
    """MTP layers that attend a window."""
    config = tf.MellumConfig(
        **SIZES,
        layer_types=["sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        sliding_window=5,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_mtp_layers=count,
    )
    return config, True


def qwen3_5_text(count):
    """Linear attention in every other layer; the config counts by another name."""
    config = tf.Qwen3_5TextConfig(
        **SIZES | dict(head_dim=16),
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters={
            "rope_type": "default",
            "mrope_section": [1, 1, 2],
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        layer_types=["linear_attention", "full_attention"],
        mtp_num_hidden_layers=count,
    )
    return config, True


def qwen3_5(count):
    """Pictures, M-RoPE and linear attention."""
    model, _ = vlm_models.qwen3_5()
    config = model.config
    config.text_config.mtp_num_hidden_layers = count
    return config, True


def step3p7(count):
    """Pictures, and several layers after the last one."""
    config = tiny_config("step3p7")
    text = config.text_config.to_dict()
    first = text["num_hidden_layers"]
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "dense")):
        text[name] = [*text[name][:first], *[kind] * count]
    text["num_nextn_predict_layers"] = count
    return type(config).from_dict(config.to_dict() | {"text_config": text}), False


def deeper(config, count):
    """``config`` of a model with ``count`` more layers, of the kinds of its MTP layers."""
    told = config.__class__.from_dict(config.to_dict())
    text = told.get_text_config()
    text.num_hidden_layers += count
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        kinds = getattr(text, name, None)
        if kinds is not None:
            more = getattr(text, f"mtp_{name}", None) or [kind] * count
            setattr(text, name, [*kinds, *more])
    return told


KINDS = {
    "deepseek": deepseek,
    "glm": glm,
    "mellum": mellum,
    "qwen3.5 text": qwen3_5_text,
    "qwen3.5": qwen3_5,
    "step3p7": step3p7,
}


SEEDS = {"glm": 4, "mellum": 4}  # with which drafts are kept, and rejected


def save(name, folder, count=1, **sizes):
    """A checkpoint of kind ``name`` with ``count`` MTP layers in ``folder``, and a processor.

    The layers' names are those after the last layer, or Qwen 3.5's.
    """
    torch.manual_seed(SEEDS.get(name, 6))
    config, under_mtp = KINDS[name](count)
    for size, value in sizes.items():
        setattr(config, size, value)
    pictures = config.get_text_config() is not config
    made = tf.AutoModelForImageTextToText if pictures else tf.AutoModelForCausalLM
    model = made.from_config(deeper(config, count))
    spread(model)
    (vlm_models.qwen3_5()[1] if pictures else vlm_models.tokenizer()).save_pretrained(folder)
    model.generation_config.eos_token_id = [2, vlm_models.END]
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    text = config.get_text_config()
    first = text.num_hidden_layers
    state = load_file(folder / "model.safetensors")
    last = re.compile(rf"(.*\.)layers\.{first}\.input_layernorm")
    (prefix,) = {found[1] for found in map(last.match, state) if found}
    for number in range(count):
        own = f"{prefix}layers.{first + number}."
        if under_mtp:
            moved = {n: f"mtp.layers.{number}." + n[len(own) :] for n in state if n.startswith(own)}
            state = {moved.get(name, name): x for name, x in state.items()}
        width = text.hidden_size
        norm = model.get_decoder().norm.weight
        beside = {
            "enorm": norm.detach() + 0.1 * torch.randn(width),
            "hnorm": norm.detach() + 0.1 * torch.randn(width),
            "eh_proj": torch.cat([torch.eye(width), 0.1 * torch.randn(width, width)], 1),
            "norm": norm.detach() + 0.1 * torch.randn(width),
        }
        for name, x in beside.items():
            further = own + ("shared_head.norm" if name == "norm" else name)
            state[(f"mtp.{UNDER_MTP[name]}" if under_mtp else further) + ".weight"] = x
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    facts = json.loads((folder / "config.json").read_text()) | json.loads(
        config.to_json_string(use_diff=False)
    )
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def spread(model, by=4.0):
    """Larger weights, for those of a fresh model say nearly the same whatever they read.

    The latest token counts most, so that layers which pass on its embedding draft well.
    """
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim > 1:
                x.mul_(by)
        model.get_input_embeddings().weight.mul_(8)
        if model.get_output_embeddings().out_features > len(vlm_models.MARKS):
            model.get_output_embeddings().weight[: len(vlm_models.MARKS)] = 0  # answers hold few
