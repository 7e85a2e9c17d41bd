"""Tiny processors of transformers over one tokenizer, and random models for what they give."""

import torch
import transformers as tf
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

NAMED = {  # attributes of tokenizers that some processors read
    "image_token": "<image>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "boa_token": "<boa>",
    "eoa_token": "<eoa>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "img_line_break_token": "<line>",
    "image_wrapper_token": "<wrap>",
    "eof_token": "<eof>",
    "image_start_token": "<image_start>",
    "image_end_token": "<image_end>",
    "image_break_token": "[IMG_BREAK]",
}
MORE = (
    "<|image|> <|video|> [IMG] [IMG_END] <fake_token_around_image> <global-img> "
    "<|begin_of_video|> <|end_of_video|> <|vision_start|> <|vision_end|> <IMG_START> <IMG_ATOM> "
    "<IMG_GRID> <IMG_COL> <IMG_ROW> <IMG_END> <|patch|> <|image_start|> <|image_end|> "
    "<|tile_x_separator|> <|tile_y_separator|> <|python_tag|> <|IMG_PATCH|> TILE_GLOBAL TILE_1"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", *NAMED.values(), *MORE.split()]
TALK = "what is this where how many colour red blue green a the one two three dog cat box"
WORDS = TALK.split()


def tokenizer():
    names = [*SPECIAL, *WORDS]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens=NAMED,
    )


def template(image="<image>", video="<video>"):
    return (
        "<s>{% for m in messages %}{% for c in m['content'] %}"
        f"{{% if c['type'] == 'image' %}}{image}{{% elif c['type'] == 'video' %}}{video}"
        "{% else %} {{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
    )


def square(side):
    return {"height": side, "width": side}


SMALL = dict(size={"shortest_edge": 64, "longest_edge": 4096}, patch_size=4, merge_size=2)
TILES = dict(image_grid_pinpoints=[[8, 8], [8, 16], [16, 8], [16, 16]])
CROPPED = dict(size=square(8), crop_size=square(8))
CLIP = dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
IN_VISION = "<|vision_start|>{}<|vision_end|>"
BETWEEN = template(IN_VISION.format("<image>"), IN_VISION.format("<video>"))
GLM = template(IN_VISION.format("<image>"), "<|begin_of_video|><video><|end_of_video|>")


def qwen(name, pictures="Qwen2VL", videos="Qwen2VL", chat=BETWEEN):
    pixels = getattr(tf, f"{pictures}ImageProcessor")(**SMALL)
    films = getattr(tf, f"{videos}VideoProcessor")(**SMALL)
    return getattr(tf, f"{name}Processor")(pixels, tokenizer(), films, chat_template=chat)


def of(name, pictures, image="<image>", **options):
    """A processor of pictures and a chat template."""
    made = getattr(tf, f"{name}Processor")
    return made(pictures, tokenizer(), chat_template=template(image), **options)


def paligemma():
    pictures = tf.SiglipImageProcessor(size=square(8))
    pictures.image_seq_length = 4
    return tf.PaliGemmaProcessor(pictures, tokenizer())


def llava(**options):
    return tf.LlavaProcessor(
        tf.CLIPImageProcessor(**CROPPED),
        tokenizer(),
        **(CLIP | {"chat_template": template()} | options),
    )


def smolvlm():
    films = tf.SmolVLMVideoProcessor(size={"longest_edge": 16}, num_frames=4, fps=1)
    pictures = tf.SmolVLMImageProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    )
    return tf.SmolVLMProcessor(
        pictures, tokenizer(), films, image_seq_len=4, chat_template=template()
    )


PROCESSORS = {
    "llava": llava,
    "llava-next": lambda: of("LlavaNext", tf.LlavaNextImageProcessor(**CROPPED, **TILES), **CLIP),
    "llava-onevision": lambda: tf.LlavaOnevisionProcessor(
        tf.LlavaOnevisionImageProcessor(size=square(8), **TILES),
        tokenizer(),
        tf.LlavaOnevisionVideoProcessor(size=square(8)),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=template(),
    ),
    "internvl": lambda: tf.InternVLProcessor(
        tf.GotOcr2ImageProcessor(size=square(16)),
        tokenizer(),
        tf.InternVLVideoProcessor(size=square(16)),
        image_seq_length=4,
        chat_template=template("<IMG_CONTEXT>"),
    ),
    "gemma3": lambda: of(
        "Gemma3", tf.Gemma3ImageProcessor(size=square(16)), "<boi>", image_seq_length=4
    ),
    "gemma4": lambda: tf.Gemma4Processor(
        tf.Gemma4AudioFeatureExtractor(),
        tf.Gemma4ImageProcessor(),
        tokenizer(),
        tf.Gemma4VideoProcessor(),
        image_seq_length=4,
        chat_template=template("<image>", "<|video|>"),
    ),
    "paligemma": paligemma,
    "pixtral": lambda: of(
        "Pixtral",
        tf.PixtralImageProcessor(size={"longest_edge": 16}, patch_size=4),
        "[IMG]",
        patch_size=4,
        image_token="[IMG]",
    ),
    "aya-vision": lambda: of(
        "AyaVision",
        tf.GotOcr2ImageProcessor(size=square(16)),
        patch_size=4,
        img_size=16,
        downsample_factor=2,
    ),
    "cohere2-vision": lambda: of(
        "Cohere2Vision", tf.Cohere2VisionImageProcessor(size=square(16), patch_size=4)
    ),
    "ovis2": lambda: of("Ovis2", tf.Ovis2ImageProcessor(size=square(16)), image_seq_length=4),
    "qwen2-vl": lambda: qwen("Qwen2VL"),
    "qwen2.5-vl": lambda: qwen("Qwen2_5_VL"),
    "qwen3-vl": lambda: qwen("Qwen3VL", videos="Qwen3VL"),
    "glm4v": lambda: qwen("Glm4v", "Glm4v", "Glm4v", GLM),
    "llama4": lambda: of(
        "Llama4", tf.Llama4ImageProcessor(size=square(16)), "<|image|>", patch_size=4
    ),
    "idefics3": lambda: of(
        "Idefics3",
        tf.Idefics3ImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        image_seq_len=4,
    ),
    "smolvlm": smolvlm,
    "lfm2-vl": lambda: of(
        "Lfm2Vl",
        tf.Lfm2VlImageProcessor(
            tile_size=16,
            encoder_patch_size=4,
            downsample_factor=2,
            min_image_tokens=1,
            max_image_tokens=8,
            max_num_patches=64,
        ),
    ),
    "kimi": lambda: tf.Kimi_K25Processor(
        tf.Kimi_K25ImageProcessor(),
        tokenizer(),
        tf.Kimi_K25VideoProcessor(),
        chat_template=template(),
    ),
    "deepseek-vl": lambda: of(
        "DeepseekVL", tf.DeepseekVLImageProcessor(size=square(8), min_size=4), num_image_tokens=4
    ),
    "janus": lambda: of(
        "Janus", tf.JanusImageProcessor(size=square(8), min_size=4), num_image_tokens=4
    ),
    "mllama": lambda: of("Mllama", tf.MllamaImageProcessor(size=square(16))),
}
FILMS = ("llava-onevision", "internvl", "gemma4", "kimi", "glm4v", "smolvlm")
FILMS += ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")
NESTED = ("idefics3", "smolvlm", "mllama", "llava-onevision")  # pictures padded to a batch's most


# ---- models of the same tokens

ids = tokenizer().convert_tokens_to_ids
TEXT = dict(
    vocab_size=len(SPECIAL) + len(WORDS),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
TOWER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
TOWER |= dict(image_size=16, patch_size=4)
QWEN = dict(patch_size=4, spatial_merge_size=2, temporal_patch_size=2, num_heads=2, depth=2)
QWEN |= dict(hidden_size=16, intermediate_size=24, out_hidden_size=32)
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
IN_PARTS = TEXT | dict(rope_parameters=MROPE, head_dim=8)
MARKS = dict(
    image_token_id=ids("<image>"),
    video_token_id=ids("<video>"),
    vision_start_token_id=ids("<|vision_start|>"),
    vision_end_token_id=ids("<|vision_end|>"),
)
VISUAL = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def text(kind, **changes):
    return dict(model_type=kind, **(TEXT | changes))


def siglip(side=16, **changes):
    return dict(model_type="siglip_vision_model", **(TOWER | dict(image_size=side) | changes))


CONFIGS = {
    "internvl": lambda: tf.InternVLConfig(
        vision_config=TOWER | dict(image_size=[16, 16], patch_size=[4, 4]),
        text_config=text("qwen2"),
        image_token_id=ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    ),
    "gemma3": lambda: tf.Gemma3Config(
        vision_config=siglip(),
        text_config=TEXT
        | dict(
            head_dim=8,
            sliding_window=8,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
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
        vision_config=dict(model_type="pixtral", head_dim=8, **TOWER),
        text_config=text("mistral", head_dim=8),
        image_token_index=ids("[IMG]"),
        spatial_merge_size=1,
        vision_feature_layer=-1,
    ),
    "cohere2-vision": lambda: tf.Cohere2VisionConfig(
        vision_config=siglip(),
        text_config=text("cohere2"),
        image_token_id=ids("<image>"),
        alignment_intermediate_size=24,
        downsample_factor=1,
    ),
    "ovis2": lambda: tf.Ovis2Config(
        vision_config=TOWER | dict(hidden_stride=2, vocab_size=20, num_visual_indicator_tokens=5),
        text_config=text("qwen2"),
        image_token_id=ids("<IMG_ATOM>"),
        visual_indicator_token_ids=ids(list(VISUAL)),
        vocab_size=TEXT["vocab_size"],
        hidden_size=32,
    ),
    "qwen3-vl": lambda: tf.Qwen3VLConfig(
        vision_config=QWEN | dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
        text_config=IN_PARTS,
        **MARKS,
    ),
    "glm4v": lambda: tf.Glm4vConfig(
        vision_config=QWEN | dict(image_size=16),
        text_config=IN_PARTS,
        image_token_id=ids("<image>"),
        video_token_id=ids("<video>"),
        image_start_token_id=ids("<|vision_start|>"),
        image_end_token_id=ids("<|vision_end|>"),
        video_start_token_id=ids("<|begin_of_video|>"),
        video_end_token_id=ids("<|end_of_video|>"),
    ),
    "gemma4": lambda: tf.Gemma4Config(
        vision_config=dict(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            patch_size=16,
            pooling_kernel_size=3,
            position_embedding_size=64,
        ),
        text_config=TEXT
        | dict(
            head_dim=8,
            global_head_dim=8,
            sliding_window=8,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=TEXT["vocab_size"],
            tie_word_embeddings=False,
            layer_types=["sliding_attention", "full_attention"],
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
        vision_config=dict(
            model_type="siglip2_vision_model",
            num_patches=16,
            vision_use_head=False,
            **{k: v for k, v in TOWER.items() if k != "image_size"},
        ),
        text_config=text("lfm2", layer_types=["conv", "full_attention"]),
        image_token_id=ids("<image>"),
        projector_hidden_size=24,
        downsample_factor=2,
    ),
    "janus": lambda: tf.JanusConfig(
        vision_config=dict(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            projection_dim=32,
            mlp_ratio=2,
            depth=2,
            num_image_tokens=4,
        ),
        text_config=text("llama"),
        vq_config=dict(
            embed_dim=4,
            num_embeddings=8,
            base_channels=32,
            channel_multiplier=[1, 1],
            num_res_blocks=1,
            latent_channels=4,
            num_hidden_layers=1,
            projection_dim=32,
            image_token_embed_dim=32,
        ),
        image_token_id=ids("<image>"),
    ),
    "mllama": lambda: tf.MllamaConfig(
        vision_config=dict(
            image_size=16,
            patch_size=4,
            attention_heads=2,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_global_layers=1,
            vision_output_dim=48,
            intermediate_layers_indices=[0, 1],
            max_num_tiles=4,
            supported_aspect_ratios=[[w, h] for w in range(1, 5) for h in range(1, 4 // w + 1)],
        ),
        text_config=TEXT
        | dict(
            num_hidden_layers=3,
            cross_attention_layers=[1],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        image_token_index=ids("<image>"),
    ),
    "idefics3": lambda: tf.Idefics3Config(
        vision_config=TOWER,
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
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = 2, 0
    return made
