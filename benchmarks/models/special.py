"""What no rule of ``tiny`` can know: fields of the configs of single types.

``start.`` before a name: the config's defaults are read with that value.
"""

from typing import Any

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": MROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {"mamba_n_heads": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 48]},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
}
SPECIAL["qwen4_exp"] = {"text_config": SPECIAL["qwen4_exp_text"]}

# what a model of a type needs that a prompt does not give
OTHER = {
    "gemma4_assistant": "it drafts for Gemma 4, from that model's keys and values",
    "gemma4_unified_assistant": "it drafts for Gemma 4, from that model's keys and values",
    "musicgen": "its rows are the codebooks of a sound",
    "musicgen_melody": "its rows are the codebooks of a sound",
}
