"""Tiny random vision-language models of several kinds in folders, with processors of their own."""

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyz:?Ġ"  # of byte-level tokenizers, the last one a blank
MARKS = ("<pad>", "<s>", "</s>", "<unk>", "<image>", "<video>", "<start>", "<end>")
TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}:{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}PICTURE{% elif c['type'] == 'video' %}VIDEO"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{{ '<unk>' if m['role'] == 'assistant' }}{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt }}"
)
END = 3  # of an answer in the template
TEXT = dict(
    vocab_size=len(LETTERS) + len(MARKS),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
TOWER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
QWEN_SIZES = dict(patch_size=4, temporal_patch_size=2)
QWEN_TOWER = dict(
    QWEN_SIZES,
    hidden_size=16,
    intermediate_size=24,
    out_hidden_size=32,
    depth=2,
    num_heads=2,
    spatial_merge_size=2,
)
QWEN_IDS = dict(image_token_id=4, video_token_id=5, vision_start_token_id=6, vision_end_token_id=7)


def template(picture, video="<video>"):
    """A chat template with those placeholders."""
    return TEMPLATE.replace("PICTURE", picture).replace("VIDEO", video)


def tokenizer(**named):
    vocabulary = {mark: i for i, mark in enumerate((*MARKS, *LETTERS))}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=named,
        padding_side="left",
    )


def qwen_processor(kind, videos):
    """Pictures keep their shape: each has a grid of its own."""
    words = tokenizer(
        image_token="<image>",
        video_token="<video>",
        vision_bos_token="<start>",
        vision_eos_token="<end>",
    )
    sizes = dict(QWEN_SIZES, merge_size=2)
    pictures = tf.Qwen2VLImageProcessor(**sizes, min_pixels=64, max_pixels=512)
    clips = videos(**sizes, size=dict(shortest_edge=256, longest_edge=1024))
    talk = template("<start><image><end>", "<start><video><end>")
    return kind(pictures, words, clips, chat_template=talk)


def qwen2_5_vl(**text):
    """M-RoPE, a grid for each picture."""
    config = tf.Qwen2_5_VLConfig(
        text_config=TEXT | dict(rope_parameters=MROPE) | text,
        vision_config=QWEN_TOWER | dict(window_size=16, fullatt_block_indexes=[1]),
        **QWEN_IDS,
    )
    model = tf.Qwen2_5_VLForConditionalGeneration(config)
    return model, qwen_processor(tf.Qwen2_5_VLProcessor, tf.Qwen2VLVideoProcessor)


def qwen3_5():
    """Linear attention in every other layer, wide heads, rotary positions of half of them."""
    text = dict(
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        head_dim=16,
        rope_parameters=MROPE | dict(partial_rotary_factor=0.5),
        layer_types=["linear_attention", "full_attention"],
    )
    config = tf.Qwen3_5Config(
        text_config=TEXT | text,
        vision_config=QWEN_TOWER | dict(num_position_embeddings=64),
        **QWEN_IDS,
    )
    model = tf.Qwen3_5ForConditionalGeneration(config)
    return model, qwen_processor(tf.Qwen3VLProcessor, tf.Qwen3VLVideoProcessor)


def internvl():
    """Pictures cut into one or two tiles and a thumbnail."""
    config = tf.InternVLConfig(
        text_config=TEXT | dict(model_type="qwen2"),
        vision_config=TOWER | dict(image_size=[16, 16], patch_size=[4, 4]),
        image_token_id=4,
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    words = tokenizer(
        start_image_token="<start>",
        end_image_token="<end>",
        context_image_token="<image>",
        video_token="<video>",
    )
    size = dict(height=16, width=16)
    processor = tf.InternVLProcessor(
        tf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=2),
        words,
        tf.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=template("<image>"),
    )
    return tf.InternVLForConditionalGeneration(config), processor


def gemma3():
    """Scaled embeddings, windows in every other layer, wide heads; a picture's tokens see one
    another.
    """
    layers = ["sliding_attention", "full_attention"]
    config = tf.Gemma3Config(
        text_config=TEXT | dict(head_dim=16, sliding_window=6, layer_types=layers),
        vision_config=TOWER | dict(image_size=16, patch_size=4),
        image_token_id=4,
        boi_token_id=6,
        eoi_token_id=7,
        mm_tokens_per_image=4,
    )
    processor = tf.Gemma3Processor(
        tf.Gemma3ImageProcessor(size=dict(height=16, width=16)),
        tokenizer(image_token="<image>", boi_token="<start>", eoi_token="<end>"),
        image_seq_length=4,
        chat_template=template("<start>"),
    )
    return tf.Gemma3ForConditionalGeneration(config), processor


def qwen3_vl():
    """Features of pictures go into later layers, too."""
    vision = dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
    config = tf.Qwen3VLConfig(
        text_config=TEXT | dict(head_dim=8, rope_parameters=MROPE),
        vision_config=QWEN_TOWER | vision,
        **QWEN_IDS,
    )
    model = tf.Qwen3VLForConditionalGeneration(config)
    return model, qwen_processor(tf.Qwen3VLProcessor, tf.Qwen3VLVideoProcessor)


def llava_onevision():
    """Pictures in tiles and in whole, and their sizes."""
    shapes = [[16, 16], [16, 32], [32, 16]]
    config = tf.LlavaOnevisionConfig(
        text_config=TEXT | dict(model_type="qwen2"),
        vision_config=TOWER | dict(model_type="siglip_vision_model", image_size=16, patch_size=4),
        image_token_id=4,
        video_token_id=5,
        image_grid_pinpoints=shapes,
    )
    size = dict(height=16, width=16)
    processor = tf.LlavaOnevisionProcessor(
        tf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=shapes),
        tokenizer(image_token="<image>", video_token="<video>"),
        tf.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=template("<image>"),
    )
    return tf.LlavaOnevisionForConditionalGeneration(config), processor


def mistral3():
    """Pictures of their own sizes, filled up in a batch."""
    config = tf.Mistral3Config(
        text_config=TEXT | dict(model_type="mistral", head_dim=16),
        vision_config=TOWER | dict(model_type="pixtral", image_size=32, patch_size=4, head_dim=8),
        image_token_index=4,
        spatial_merge_size=2,
    )
    marks = dict(image_token="<image>", image_break_token="<start>", image_end_token="<end>")
    size = dict(longest_edge=32)
    processor = tf.PixtralProcessor(
        tf.PixtralImageProcessor(size=size, patch_size=dict(height=4, width=4)),
        tokenizer(**marks),
        patch_size=4,
        spatial_merge_size=2,
        chat_template=template("<image>"),
        **marks,
    )
    return tf.Mistral3ForConditionalGeneration(config), processor


def idefics3():
    """Tiles by row, filled up with empty ones that a mask hides."""
    words = tokenizer(
        image_token="<image>",
        fake_image_token="<start>",
        global_image_token="<end>",
        end_of_utterance_token="<unk>",
    )
    edges = dict(size=dict(longest_edge=32), max_image_size=dict(longest_edge=16))
    processor = tf.Idefics3Processor(
        tf.Idefics3ImageProcessor(**edges),
        words,
        image_seq_len=4,
        chat_template=template("<image>"),
    )
    config = tf.Idefics3Config(
        text_config=TEXT | dict(model_type="llama", vocab_size=len(words)),
        vision_config=TOWER | dict(image_size=16, patch_size=4),
        image_token_id=processor.image_token_id,
        scale_factor=2,
        pad_token_id=0,
    )
    return tf.Idefics3ForConditionalGeneration(config), processor


def lfm2_vl():
    """Short convolutions in every other layer; patches filled up, and how many there are."""
    layers = ["conv", "full_attention"]
    config = tf.Lfm2VlConfig(
        text_config=TEXT
        | dict(model_type="lfm2", block_auto_adjust_ff_dim=False, layer_types=layers),
        vision_config=TOWER | dict(model_type="siglip2_vision_model", patch_size=4, num_patches=64),
        image_token_id=4,
        projector_hidden_size=32,
    )
    pictures = tf.Lfm2VlImageProcessor(
        encoder_patch_size=4,
        min_image_tokens=1,
        max_image_tokens=8,
        max_num_patches=64,
        do_image_splitting=False,
    )
    words = tokenizer(
        image_token="<image>",
        image_start_token="<start>",
        image_end_token="<end>",
        image_thumbnail_token="<video>",
    )
    processor = tf.Lfm2VlProcessor(pictures, words, chat_template=template("<image>"))
    return tf.Lfm2VlForConditionalGeneration(config), processor


MODELS = {
    "qwen2.5-vl": qwen2_5_vl,
    "internvl": internvl,
    "gemma3": gemma3,
    "qwen3.5": qwen3_5,
    "qwen3-vl": qwen3_vl,
    "llava-onevision": llava_onevision,
    "mistral3": mistral3,
    "idefics3": idefics3,
    "lfm2-vl": lfm2_vl,
}


def save(name, folder, seed=0, std=0.25):
    """A model of kind ``name`` whose answers vary, and its processor, in ``folder``."""
    model, processor = MODELS[name]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, std, generator=generator)
        model.get_output_embeddings().weight[: len(MARKS)] = 0  # answers hold few marks
    model.generation_config.eos_token_id = [2, END]
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
