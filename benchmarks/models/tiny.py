"""A tiny random model of any type of transformers, from its own config class.

The config's own fields say what there is to shrink: sizes by what they are called, lists with an
entry a layer to the fewest layers that show every kind, ids of special tokens into the small
vocabulary, configs inside it likewise. ``special`` holds what no rule can know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from benchmarks.models.special import OTHER, SPECIAL

VOCABULARY = 128
ORDINARY = 96  # ids of ordinary tokens are less
WIDTH = 64
HEADS = 4
HEAD_DIM = 16
LAYERS = 2  # at least
PAD = 0
BOS = 1
EOS = 2
IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
SIZES = (  # the first expression that a field's name matches gives the most it may be
    (r"(type|task_type)_vocab_size", 2),
    (r".*vocab_size(_per_layer_input)?|num_embeddings|.*_hash_byte_group_vocab", VOCABULARY),
    (r"mamba_(d_head|head_?dim)|linear_(key_|value_)?head_dim", HEAD_DIM // 2),
    (r"mamba_(n|num)_heads", 16),
    (r"linear_num_value_heads|linear_num_heads", HEADS),
    (r".*(kv|key_value)_heads|.*num_query_groups|linear_num_key_heads", 2),
    (r".*(num_heads|attention_heads|n_heads?|resampler_heads|encoder_heads)", HEADS),
    (r".*(qk_head_dim)", HEAD_DIM * 2),
    (r".*(head_dim|head_size|kv_channels|d_kv|d_head|dim_head|key_dim|value_dim)", HEAD_DIM),
    (r".*(intermediate_size|intermediate_size_mlp|ffn_dim|ffn_hidden_size|mlp_dim|d_ff|dff)", 96),
    (r"n_inner|dim_ff|feed_forward_size|d_inner|moe_hidden_size|share_expert_dim", 96),
    (r".*(hidden_size|_embed_dim|output_dim|_input_size|input_dim|out_dim|in_dim)", WIDTH),
    (r".*(projection_dim|output_proj_dims)|hidden_size_global|d_model|n_embd|embed_dim", WIDTH),
    (r"dim|word_embed_proj_dim|emb_dim|embedding_dim|embedding_size|hidden_dim", WIDTH),
    (r"lru_width|mamba_d_ssm|projection_hidden_dim|attention_dim", WIDTH),
    (r"hidden_size_per_layer_input|.*_rank|mamba_d_state|ssm_state_size|state_size|d_rel", 16),
    (r".*(num|n|local|routed)_(local_|routed_)?experts|moe_num_experts|num_codebooks", 4),
    (r".*experts_per_tok(en)?|top_k_experts|moe_topk|moe_k|moe_top_k|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_group|n_shared_experts|first_k_dense_replace", 1),
    (r"(decoder_|encoder_|num_|n_|num_hidden_|num_encoder_|num_decoder_)?layers?|depth"
     r"|max_window_layers|resampler_depth|num_blocks", LAYERS),
    (r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length"
     r"|max_source_positions|max_target_positions|context_length|seq_len", 1024),
    (r"sliding_window(_size)?|attention_window_size|local_attention", 6),
    (r"(mamba_)?chunk_size|attention_chunk_size", 8),
    (r"image_size|image_resolution", 16),
    (r"patch_size", 4),
    (r"window_size|num_pos_feats", 8),
    (r"index_topk|rotary_dim", 8),
)  # fmt: skip
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
TOKEN = re.compile(r".*_(token_id|token_index)|image_patch_id")


class NotBuildable(Exception):
    """Why no tiny model of a type can be made here."""


def tiny_config(name: str) -> PreTrainedConfig:
    """The smallest config of the model type ``name`` that has every kind of layer.

    Raises :class:`NotBuildable`.
    """
    if name in OTHER:
        raise NotBuildable(OTHER[name])
    return shrunk(CONFIG_MAPPING[name], Ids(), SPECIAL.get(name, {}))


class Ids:
    """Ids of special tokens, the same for one name wherever it stands."""

    def __init__(self) -> None:
        self.given = dict(IDS)
        self.next = VOCABULARY

    def of(self, name: str) -> int:
        """The id of the token ``name``: from the vocabulary's end."""
        name = name.replace("_index", "_id")
        if name not in self.given:
            self.next -= 1
            self.given[name] = self.next
        return self.given[name]


def shrunk(kind: Any, ids: Ids, given: dict[str, Any], found: Any = None) -> PreTrainedConfig:
    """A small config of the class ``kind``; ``given`` are fields that are known, by name.

    What is given for a config inside it is a dictionary of the same form, ``found`` that config as
    the one around it has it.
    """
    usual = kind()
    default = usual if found is None else found
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = field.name
        value = _of(default, name)
        inside = given.get(name)
        if isinstance(value, PreTrainedConfig):
            values[name] = shrunk(type(value), ids, inside or {}, value)
        elif name in kind.sub_configs and isinstance(inside, dict):
            values[name] = shrunk(kind.sub_configs[name], ids, inside)
        elif field.init:
            values |= _small(name, value, ids, changed=value != _of(usual, name))
    values |= per_layer(default, values)
    values |= rope(default)
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = HEADS  # one for each query head, from the latent
    if vars(default).get("is_decoder") is False:
        values["is_decoder"] = True
    values |= {k: v for k, v in given.items() if k not in kind.sub_configs}
    config: PreTrainedConfig = kind(**values)
    return config


def _of(config: PreTrainedConfig, name: str) -> Any:
    """The field ``name`` itself: some configs refuse to tell it where it differs by layer."""
    own = vars(config)
    return own.get(config.attribute_map.get(name, name), own.get(name))


def _small(name: str, value: Any, ids: Ids, changed: bool) -> dict[str, Any]:
    """What to give for the field ``name``: nothing where the class knows it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {name: smaller(name, value, ids)}
    if name in ("image_size", "patch_size") and isinstance(value, list | tuple):
        return {name: [smaller(name, one, ids) for one in value]}
    return {name: value} if changed and isinstance(value, str | bool) else {}


def smaller(name: str, value: int, ids: Ids) -> int:
    """``value`` of the field ``name``, or what a rule makes of it."""
    if TOKEN.fullmatch(name):
        return ids.of(name)
    most = next((most for rule, most in SIZES if re.fullmatch(rule, name)), value)
    return min(value, most)


def per_layer(default: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Lists that have an entry a layer, at the fewest layers that show each kind of each list."""
    name = next((n for n in DEPTHS if n in values), None)
    if name is None:
        return {}
    depth = int(vars(default).get(name) or 0)
    fields = {field.name for field in dataclasses.fields(default)}
    lists = {
        key: value
        for key, value in vars(default).items()
        if key in fields and isinstance(value, list | tuple) and len(value) == depth
    }
    found = layers_of_each_kind(lists, depth)
    layers = min(depth, LAYERS) if not found else len(next(iter(found.values())))
    return found | {name: layers}


def layers_of_each_kind(lists: dict[str, Any], depth: int) -> dict[str, Any]:
    """``lists`` of ``depth`` layers at the first layers that show each entry of each; two at least.

    A list that numbers the layers numbers those.
    """
    kinds = {key: value for key, value in lists.items() if list(value) != list(range(depth))}
    seen: set[tuple[str, str]] = set()
    chosen = []
    for layer in range(depth):
        new = {(key, str(value[layer])) for key, value in kinds.items()} - seen
        if new:
            chosen.append(layer)
            seen |= new
    spare = max(LAYERS - len(chosen), 0)
    chosen += [layer for layer in range(depth) if layer not in chosen][:spare]
    chosen.sort()
    found: dict[str, Any] = {key: list(range(len(chosen))) for key in lists}
    return found | {key: [value[i] for i in chosen] for key, value in kinds.items()}


def rope(default: PreTrainedConfig) -> dict[str, Any]:
    """Rotary parameters with sections that fit the small heads, where there are sections."""
    parameters = getattr(default, "rope_parameters", None) or {}
    known = getattr(default, "ignore_keys_at_rope_validation", None) or ()
    if "mrope_section" not in {*parameters, *known} or "rope_type" not in parameters:
        return {}
    if "partial_rotary_factor" in parameters:  # there must be something for each section
        parameters = {**parameters, "partial_rotary_factor": 0.5}
    turned = int(HEAD_DIM // 2 * parameters.get("partial_rotary_factor", 1.0))
    third = turned // 3
    sections = [third, third, turned - 2 * third]
    return {"rope_parameters": {**parameters, "mrope_section": sections}}


class Gains(NamedTuple):
    """Sizes of random weights, in parts of one over the root of their inputs."""

    embeddings: float
    layers: float


def build(architecture: str, config: PreTrainedConfig, seed: int, gains: Gains) -> PreTrainedModel:
    """A model of the class ``architecture`` with random weights of the given sizes. Its answers
    hold no placeholder, as those of a trained one.
    """
    torch.manual_seed(seed)
    kind = getattr(transformers, architecture)
    model: PreTrainedModel = kind(_own(kind, config)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomise(name, parameter, generator, gains.layers)
        _scale_ends(model, gains.embeddings / gains.layers)
    _no_end(model.generation_config)
    return model


def _own(kind: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    """``config``, or the one inside it that the class ``kind`` takes."""
    if isinstance(config, kind.config_class):
        return config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig) and isinstance(inner, kind.config_class):
            return inner
    return config


def _scale_ends(model: Any, factor: float) -> None:
    """The tokens' embeddings times ``factor``; no logits for special tokens, which come last."""
    with contextlib.suppress(NotImplementedError):  # of some encoder-decoders
        model.get_input_embeddings().weight.mul_(factor)
    head = model.get_output_embeddings()
    if head is not None:
        head.weight[ORDINARY:] = 0


def _no_end(config: Any) -> None:
    config.eos_token_id = None
    config.forced_eos_token_id = None
    config.pad_token_id = PAD
    config.bos_token_id = BOS
    config.decoder_start_token_id = BOS


def _randomise(name: str, parameter: nn.Parameter, generator: torch.Generator, gain: float) -> None:
    if parameter.ndim > 1:
        inputs = parameter[0].numel() if parameter.ndim > 3 else parameter.shape[-1]
        parameter.normal_(0, gain * inputs**-0.5, generator=generator)
    elif "gate" in name.rsplit(".", 1)[-1] and not bool(parameter.any()):
        parameter.fill_(1.0)  # of cross-attention, which is shut before training
    elif not bool(parameter.isfinite().all()):
        parameter.normal_(0, 1, generator=generator)
