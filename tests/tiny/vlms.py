"""Tiny random models for what ``processors`` give."""

import torch
import transformers as tf

from tests.tiny import parts
from tests.tiny.parts import DEEPSTACK, EXPERTS, MROPE, PIXELS, QWEN_TOWER, TOWER
from tests.tiny.processors import SPECIAL, TILES, WORDS, tokenizer

ids = tokenizer().convert_tokens_to_ids
TEXT = parts.TEXT | dict(vocab_size=len(SPECIAL) + len(WORDS), max_position_embeddings=2048)
IN_PARTS = TEXT | dict(rope_parameters=MROPE, head_dim=8)
SEEN = dict(image_token_id=ids("<image>"), video_token_id=ids("<video>"))
MARKS = {f"vision_{side}_token_id": ids(f"<|vision_{side}|>") for side in ("start", "end")}
WINDOWS = ["sliding_attention", "full_attention"]
DEEPSEEK = EXPERTS | dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16)
DEEPSEEK |= dict(qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
LLAMA4 = dict(intermediate_size=64, vision_output_dim=32, projector_input_dim=32)
LLAMA4 |= dict(projector_output_dim=32, pixel_shuffle_ratio=0.5)
GEMMA4 = dict(num_key_value_heads=2, head_dim=8, patch_size=16, pooling_kernel_size=3)
JANUS = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4)
JANUS |= dict(projection_dim=32, mlp_ratio=2, depth=2, num_image_tokens=4)
JANUS_VQ = dict(embed_dim=4, num_embeddings=8, base_channels=32, channel_multiplier=[1, 1])
JANUS_VQ |= dict(num_res_blocks=1, latent_channels=4, num_hidden_layers=1)
JANUS_VQ |= dict(projection_dim=32, image_token_embed_dim=32)
RATIOS = [[w, h] for w in range(1, 5) for h in range(1, 4 // w + 1)]
MLLAMA = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, attention_heads=2)
MLLAMA |= dict(image_size=16, patch_size=4, num_global_layers=1, vision_output_dim=48)
MLLAMA |= dict(intermediate_layers_indices=[0, 1], max_num_tiles=4, supported_aspect_ratios=RATIOS)
VISUAL = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def text(kind, **changes):
    return dict(model_type=kind, **(TEXT | changes))


def siglip(side=16, **changes):
    return dict(model_type="siglip_vision_model", **(PIXELS | dict(image_size=side) | changes))


CONFIGS = {
    "internvl": lambda: tf.InternVLConfig(
        vision_config=PIXELS | dict(image_size=[16, 16], patch_size=[4, 4]),
        text_config=text("qwen2"),
        image_token_id=ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    ),
    "gemma3": lambda: tf.Gemma3Config(
        vision_config=siglip(),
        text_config=TEXT
        | dict(head_dim=8, sliding_window=8, query_pre_attn_scalar=8, layer_types=WINDOWS),
        mm_tokens_per_image=4,
        image_token_id=ids("<image>"),
        boi_token_index=ids("<boi>"),
        eoi_token_index=ids("<eoi>"),
    ),
    "paligemma": lambda: tf.PaliGemmaConfig(
        vision_config=siglip(8, vision_use_head=False),
        text_config=text("gemma", head_dim=8),
        image_token_id=ids("<image>"),
        projection_dim=32,
    ),
    "llava-onevision": lambda: tf.LlavaOnevisionConfig(
        vision_config=siglip(8),
        text_config=text("qwen2"),
        image_token_index=ids("<image>"),
        video_token_index=ids("<video>"),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        **TILES,
    ),
    "pixtral": lambda: tf.Mistral3Config(
        vision_config=dict(model_type="pixtral", head_dim=8, **PIXELS),
        text_config=text("mistral", head_dim=8),
        image_token_index=ids("[IMG]"),
        spatial_merge_size=1,
        vision_feature_layer=-1,
    ),
    "aya-vision": lambda: tf.AyaVisionConfig(
        vision_config=siglip(vision_use_head=False),
        text_config=text("cohere2"),
        image_token_index=ids("<|IMG_PATCH|>"),
    ),
    "llama4": lambda: tf.Llama4Config(
        vision_config=PIXELS | LLAMA4,
        text_config=TEXT
        | dict(head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=16),
        image_token_index=ids("<|patch|>"),
        boi_token_index=ids("<|image_start|>"),
        eoi_token_index=ids("<|image_end|>"),
    ),
    "kimi": lambda: tf.Kimi_K25Config(
        vision_config=TOWER | dict(patch_size=14),
        projection_hidden_size=16,
        text_config=text("deepseek_v3", **DEEPSEEK),
        **SEEN,
    ),
    "cohere2-vision": lambda: tf.Cohere2VisionConfig(
        vision_config=siglip(),
        text_config=text("cohere2"),
        image_token_id=ids("<image>"),
        alignment_intermediate_size=24,
        downsample_factor=1,
    ),
    "ovis2": lambda: tf.Ovis2Config(
        vision_config=PIXELS | dict(hidden_stride=2, vocab_size=20, num_visual_indicator_tokens=5),
        text_config=text("qwen2"),
        image_token_id=ids("<IMG_ATOM>"),
        visual_indicator_token_ids=ids(list(VISUAL)),
        vocab_size=TEXT["vocab_size"],
        hidden_size=32,
    ),
    "qwen3-vl": lambda: tf.Qwen3VLConfig(
        vision_config=DEEPSTACK, text_config=IN_PARTS, **SEEN, **MARKS
    ),
    "glm4v": lambda: tf.Glm4vConfig(
        vision_config=QWEN_TOWER | dict(image_size=16),
        text_config=IN_PARTS,
        image_token_id=ids("<image>"),
        video_token_id=ids("<video>"),
        image_start_token_id=ids("<|vision_start|>"),
        image_end_token_id=ids("<|vision_end|>"),
        video_start_token_id=ids("<|begin_of_video|>"),
        video_end_token_id=ids("<|end_of_video|>"),
    ),
    "gemma4": lambda: tf.Gemma4Config(
        vision_config=TOWER | GEMMA4 | dict(position_embedding_size=64),
        text_config=TEXT
        | dict(
            head_dim=8,
            global_head_dim=8,
            sliding_window=8,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=TEXT["vocab_size"],
            tie_word_embeddings=False,
            layer_types=WINDOWS,
        ),
        audio_config=None,
        tie_word_embeddings=False,
        image_token_id=ids("<image>"),
        video_token_id=ids("<|video|>"),
        audio_token_id=ids("<audio>"),
        boi_token_id=ids("<boi>"),
        eoi_token_id=ids("<eoi>"),
    ),
    "lfm2-vl": lambda: tf.Lfm2VlConfig(
        vision_config=TOWER
        | dict(
            model_type="siglip2_vision_model", patch_size=4, num_patches=16, vision_use_head=False
        ),
        text_config=text("lfm2", layer_types=["conv", "full_attention"]),
        image_token_id=ids("<image>"),
        projector_hidden_size=24,
        downsample_factor=2,
    ),
    "janus": lambda: tf.JanusConfig(
        vision_config=JANUS,
        text_config=text("llama"),
        vq_config=JANUS_VQ,
        image_token_id=ids("<image>"),
    ),
    "mllama": lambda: tf.MllamaConfig(
        vision_config=MLLAMA,
        text_config=TEXT
        | dict(
            num_hidden_layers=3,
            cross_attention_layers=[1],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        image_token_index=ids("<image>"),
    ),
    "idefics3": lambda: tf.Idefics3Config(
        vision_config=PIXELS,
        text_config=text("llama"),
        image_token_id=ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    ),
    "deepseek-vl": lambda: tf.DeepseekVLConfig(
        vision_config=siglip(8, vision_use_head=False),
        text_config=text("llama"),
        image_token_id=ids("<image>"),
    ),
}
if tf.__version__ == "5.24.0":  # its Llama 4 asks its language model for pictures
    del CONFIGS["llama4"]


def random_model(name):
    """The model of ``name`` with random weights, float32."""
    torch.manual_seed(0)
    made = tf.AutoModelForImageTextToText.from_config(CONFIGS[name]()).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25, generator=generator)
            elif "gate" in key:  # of layers that read pictures, shut until they are trained
                parameter.fill_(1.0)
    return parts.ending(made, 2)
