"""Tiny random checkpoints with MTP layers, in the layouts of released ones.

The layers are saved as further layers of a deeper model, so that their names and shapes are those
that transformers' own conversions write.
"""

import json
import re
from dataclasses import dataclass, replace

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from benchmarks.models.tiny import tiny_config
from tests.tiny import parts, vlm_folders
from tests.tiny.parts import EXPERTS, LINEAR, MROPE, spread

SIZES = parts.TEXT | dict(vocab_size=37, head_dim=8)


@dataclass(frozen=True)
class Names:
    """What a release calls the weights of MTP layer ``n``, which is layer ``further`` of all.

    ``block`` is before those of a decoder layer, ``beside`` has the others. ``inside`` is a part of
    the names in a block, and what it is there; the ``kinds`` are of such a layer.
    """

    block: str
    beside: dict[str, str]
    inside: tuple[str, str] = ("", "")
    kinds: tuple[str, str] = ("full_attention", "sparse")

    @classmethod
    def of(cls, block, **beside):
        """Those of which nothing is said lie in the block."""
        own = {name: block + name for name in ("enorm", "hnorm", "eh_proj")}
        return cls(block, own | beside)


FURTHER = Names.of("{prefix}layers.{further}.", norm="{prefix}layers.{further}.shared_head.norm")
QWEN = Names.of(
    "mtp.layers.{n}.",
    enorm="mtp.pre_fc_norm_embedding",
    hnorm="mtp.pre_fc_norm_hidden",
    eh_proj="mtp.fc",
    norm="mtp.norm",
)
ERNIE = Names.of(
    "model.mtp_block.{n}.",
    enorm="model.mtp_emb_norm.{n}",
    hnorm="model.mtp_hidden_norm.{n}",
    eh_proj="model.mtp_linear_proj.{n}",
)
MIMO = replace(
    Names.of("model.mtp.layers.{n}.", norm="model.mtp.layers.{n}.final_layernorm"),
    inside=(".post_attention_layernorm.", ".pre_mlp_layernorm."),
    kinds=("sliding_attention", "dense"),
)


LATENT = dict(num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, v_head_dim=12)
LATENT |= dict(qk_rope_head_dim=8, qk_nope_head_dim=8)


def deepseek(count, **more):
    """Latent attention, whose keys and values differ in width."""
    config = tf.DeepseekV3Config(**SIZES | EXPERTS | LATENT, num_mtp_layers=count)
    return config, FURTHER


def glm(count):
    """Rotary positions of half the width."""
    return tf.Glm4MoeConfig(**SIZES, **EXPERTS, num_mtp_layers=count), FURTHER


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
    return config, QWEN


def qwen3_5_text(count):
    """Linear attention in every other layer; the config counts by another name."""
    config = tf.Qwen3_5TextConfig(
        **SIZES | LINEAR | dict(head_dim=16),
        rope_parameters=MROPE | dict(partial_rotary_factor=0.5),
        layer_types=["linear_attention", "full_attention"],
        mtp_num_hidden_layers=count,
    )
    return config, QWEN


def qwen3_5(count):
    """Pictures, M-RoPE and linear attention."""
    model, _ = vlm_folders.qwen3_5()
    config = model.config
    config.text_config.mtp_num_hidden_layers = count
    return config, QWEN


def step3p7(count):
    """Pictures, and several layers after the last one."""
    config = tiny_config("step3p7")
    text = config.text_config.to_dict()
    first = text["num_hidden_layers"]
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "dense")):
        text[name] = [*text[name][:first], *[kind] * count]
    text["num_nextn_predict_layers"] = count
    return type(config).from_dict(config.to_dict() | {"text_config": text}), FURTHER


def ernie(count):
    """Experts but in the MTP layers; a norm shared with the decoder."""
    config = tf.Ernie4_5_MoeConfig(
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        moe_intermediate_size=16,
        moe_k=2,
        moe_num_experts=4,
        moe_num_shared_experts=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        num_nextn_predict_layers=count,
    )
    return config, ERNIE


def mimo(count):
    """Windows with sinks and twice the keys, narrow values; the config does not count."""
    theta = {"rope_type": "default", "partial_rotary_factor": 0.5}
    config = tf.MiMoV2FlashConfig(
        **SIZES,
        **{name: EXPERTS[name] for name in ("n_routed_experts", "num_experts_per_tok")},
        moe_intermediate_size=16,
        v_head_dim=6,
        layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse"],
        sliding_window=5,
        rope_parameters={
            "full_attention": theta | {"rope_theta": 500.0},
            "sliding_attention": theta | {"rope_theta": 100.0},
        },
    )
    return config, MIMO


def deeper(config, count, usual):
    """``config`` of a model with ``count`` more layers, of the kinds of its MTP layers.

    Where it says none they are the ``usual`` ones.
    """
    told = config.__class__.from_dict(config.to_dict())
    text = told.get_text_config()
    text.num_hidden_layers += count
    for name, kind in zip(("layer_types", "mlp_layer_types"), usual, strict=True):
        kinds = getattr(text, name, None)
        if kinds is not None:
            more = getattr(text, f"mtp_{name}", None) or [kind] * count
            setattr(text, name, [*kinds, *more])
    return told


KINDS = {make.__name__: make for make in (deepseek, glm, mellum, step3p7, ernie, mimo)}
KINDS |= {"qwen3.5 text": qwen3_5_text, "qwen3.5": qwen3_5}


SEEDS = {"glm": 4, "mellum": 4}  # with which drafts are kept, and rejected


def save(name, folder, count=1, **sizes):
    """A checkpoint of kind ``name`` with ``count`` MTP layers in ``folder``, and a processor.

    The layers' names are the release's.
    """
    torch.manual_seed(SEEDS.get(name, 6))
    config, names = KINDS[name](count)
    for size, value in sizes.items():
        setattr(config, size, value)
    pictures = config.get_text_config() is not config
    made = tf.AutoModelForImageTextToText if pictures else tf.AutoModelForCausalLM
    model = made.from_config(deeper(config, count, names.kinds))
    louder(model)
    (vlm_folders.qwen3_5()[1] if pictures else vlm_folders.tokenizer()).save_pretrained(folder)
    model.generation_config.eos_token_id = [2, vlm_folders.END]
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    text = config.get_text_config()
    first = text.num_hidden_layers
    state = load_file(folder / "model.safetensors")
    last = re.compile(rf"(.*\.)layers\.{first}\.input_layernorm")
    (prefix,) = {found[1] for found in map(last.match, state) if found}
    for number in range(count):
        own = f"{prefix}layers.{first + number}."
        place = dict(prefix=prefix, n=number, further=first + number)
        moved = {
            key: (names.block.format(**place) + key[len(own) :]).replace(*names.inside)
            for key in state
            if key.startswith(own)
        }
        state = {moved.get(key, key): x for key, x in state.items()}
        width = text.hidden_size
        norm = model.get_decoder().norm.weight
        beside = {
            "enorm": norm.detach() + 0.1 * torch.randn(width),
            "hnorm": norm.detach() + 0.1 * torch.randn(width),
            "eh_proj": torch.cat([torch.eye(width), 0.1 * torch.randn(width, width)], 1),
            "norm": norm.detach() + 0.1 * torch.randn(width),
        }
        for part, full in names.beside.items():
            state[full.format(**place) + ".weight"] = beside[part]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    facts = json.loads((folder / "config.json").read_text()) | json.loads(
        config.to_json_string(use_diff=False)
    )
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def louder(model):
    """The latest token counts most, so that layers which pass on its embedding draft well."""
    spread(model, 4.0)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)
        if model.get_output_embeddings().out_features > len(vlm_folders.MARKS):
            model.get_output_embeddings().weight[: len(vlm_folders.MARKS)] = 0  # answers hold few
