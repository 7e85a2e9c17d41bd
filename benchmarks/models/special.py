"""What no rule of ``tiny`` can know: fields of the configs of single types.

``start.`` before a name: the config's defaults are read with that value.
"""

from typing import Any

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": MROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
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
    "zamba": {
        "num_hidden_layers": 3,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
QWEN4 = SPECIAL["qwen4_exp_text"]
SIDEWAYS = {  # dots3_note's sliding layers
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
SAM = {"image_size": 64, "patch_size": 4, "global_attn_indexes": [1], "output_channels": 16}
GEMMA3N = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    "intermediate_size": [96] * 4,
}
SMALL_SOUND = {"hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1]}
LETTERS = "ABCDEFGHIJ"
VQ = {
    "base_channels": 32,
    "channel_multiplier": [1, 1, 1],
    "num_res_blocks": 1,
    "latent_channels": 32,
    "embed_dim": 32,
    "resolution": 16,
    "hidden_size": 32,
}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
}
QFORMER = {"hidden_size": 64, "encoder_hidden_size": 64, "num_hidden_layers": 2}
SPECIAL |= {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": 120, "num_query_tokens": 4},
    "chameleon": {
        "vocabulary_map": {"<image>": 120, **{f"IMGIMG{LETTERS[i]}Z": 60 + i for i in range(10)}},
        "image_token_id": 120,
        "vq_config": VQ | {"num_embeddings": 10},
    },
    "cohere_compass": {"text_config": SPECIAL["cohere_compass_text"]},
    "deepseek_ocr2": {
        "text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"sam_config": {**SAM, "downsample_channels": [16, 64]}},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": SAM},
    "dots3_note": {"text_config": SIDEWAYS},
    "dots3_note_text": SIDEWAYS,
    "emu3": {
        "vocabulary_map": {
            "<image>": 120,
            "<|extra_200|>": 119,
            **{f"<|visual token {i:06d}|>": 60 + i for i in range(16)},
        },
        "image_token_id": 120,
        "vq_config": VQ | {"codebook_size": 16, "attn_resolutions": []},
    },
    "fast_vlm": {"vision_config": {"architecture": "fastvit_t8", "hidden_size": 768}},
    "florence2": {
        "vision_config": {
            "embed_dim": [16, 16, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_heads": [2, 2, 2, 2],
            "num_groups": [2, 2, 2, 2],
        }
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": GEMMA3N,
    "gemma3n": {
        "text_config": GEMMA3N,
        "vision_config": {
            "architecture": "mobilenetv3_small_050",
            "hidden_size": 288,
            "vocab_offset": 112,
            "vocab_size": 8,
        },
        "audio_config": {"vocab_offset": 120, "vocab_size": 8},
        "vision_soft_tokens_per_image": 4,
        "image_token_id": 113,
        "boi_token_id": 100,
        "eoi_token_id": 112,
        "audio_token_id": 121,
    },
    "gemma4": {"vision_config": {}, "text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"vision_config": {}, "text_config": {"global_head_dim": 32}},
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm5_next": {"text_config": {"index_kpool": 4, "index_topk": 8}},
    "granite4_vision": {
        "image_grid_pinpoints": PINPOINTS,
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0, 1, 0, 1],
        "downsample_rate": "1/2",
        "qformer_config": QFORMER,
    },
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": MROPE}},
    "idefics": {"alpha_initializer": "ones"},
    "inkling_mm_model": {"vision_config": {"num_hidden_layers": 4}},
    "instructblip": {"image_token_index": 120, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 120, "num_query_tokens": 4},
    "kosmos-2": {"latent_query_num": 4},
    "kosmos-2.5": {"latent_query_num": 4},
    "lfm2_vl": {"text_config": SPECIAL["lfm2"]},
    "llama4": {"vision_config": {"intermediate_size": 256}},
    "llava_next": {"image_grid_pinpoints": PINPOINTS},
    "llava_next_video": {"image_grid_pinpoints": PINPOINTS},
    "llava_onevision": {"image_grid_pinpoints": PINPOINTS},
    "minicpm_ocr": {"image_token_id": 120},
    "minicpmv4_6": {"image_token_id": 120, "insert_layer_id": 0},
    "minicpmv4_7": {"image_token_id": 120, "insert_layer_id": 0},
    "mllama": {
        "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {
            "num_global_layers": 1,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 128,
        },
    },
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [1, 0]},
        "vision_config": {"image_size": [16, 16], "num_position_embeddings": 16},
    },
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256, "audio_config": SMALL_SOUND},
    "nemotron_h_omni": {
        "image_token_id": 120,
        "video_token_id": 121,
        "audio_token_id": 122,
        "vision_config": {"video_temporal_patch_size": 2, "num_registers": 1},
    },
    "paddleocr_vl": {"text_config": {"rope_parameters": MROPE}},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": [64, 64]},
            "do_pooling": False,
        }
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": 120, "vision_end_token_id": 121},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 120, "vision_end_token_id": 121},
    "qwen4_exp": {"text_config": QWEN4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p7": {"text_config": {"sliding_window": 6}},
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 4}},
    "unlimited_ocr": {"vision_config": {"sam_config": {**SAM, "downsample_channels": [16, 64]}}},
    "vision-encoder-decoder": {"decoder": {"add_cross_attention": True}},
    "vipllava": {"vision_feature_layer": [-1, -2]},
}

# what a model of a type needs that a prompt does not give
OTHER = {
    "diffusion_gemma": "it denoises blocks of tokens, it has no generate of single ones",
    "pi0": "it gives a robot's actions, not tokens",
    "gemma4_assistant": "it drafts for Gemma 4, from that model's keys and values",
    "gemma4_unified_assistant": "it drafts for Gemma 4, from that model's keys and values",
    "musicgen": "its rows are the codebooks of a sound",
    "musicgen_melody": "its rows are the codebooks of a sound",
}
