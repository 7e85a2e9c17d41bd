"""Tiny random vision-language models of several kinds in folders, with processors of their own."""

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.tiny import parts
from tests.tiny.parts import LINEAR, MROPE, PIXELS, QWEN_TOWER, WINDOWED, shaken, square
from tests.tiny.processors import wrapped

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
TEXT = parts.TEXT | dict(vocab_size=len(LETTERS) + len(MARKS))
QWEN_IDS = dict(image_token_id=4, video_token_id=5, vision_start_token_id=6, vision_end_token_id=7)


def template(picture, video="<video>"):
    """A chat template with those placeholders."""
    return TEMPLATE.replace("PICTURE", picture).replace("VIDEO", video)


def tokenizer(**named):
    vocabulary = {mark: i for i, mark in enumerate((*MARKS, *LETTERS))}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return wrapped(made, named)


def qwen_processor(kind, videos):
    """Pictures keep their shape: each has a grid of its own."""
    words = tokenizer(
        image_token="<image>",
        video_token="<video>",
        vision_bos_token="<start>",
        vision_eos_token="<end>",
    )
    sizes = dict(patch_size=4, temporal_patch_size=2, merge_size=2)
    pictures = tf.Qwen2VLImageProcessor(**sizes, min_pixels=64, max_pixels=512)
    clips = videos(**sizes, size=dict(shortest_edge=256, longest_edge=1024))
    talk = template("<start><image><end>", "<start><video><end>")
    return kind(pictures, words, clips, chat_template=talk)


def qwen2_5_vl(**text):
    """M-RoPE, a grid for each picture."""
    config = tf.Qwen2_5_VLConfig(
        text_config=TEXT | dict(rope_parameters=MROPE) | text, vision_config=WINDOWED, **QWEN_IDS
    )
    model = tf.Qwen2_5_VLForConditionalGeneration(config)
    return model, qwen_processor(tf.Qwen2_5_VLProcessor, tf.Qwen2VLVideoProcessor)


def qwen3_5():
    """Linear attention in every other layer, wide heads, rotary positions of half of them."""
    text = LINEAR | dict(
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


def gemma3():
    """Scaled embeddings, windows in every other layer, wide heads; a picture's tokens see one
    another.
    """
    layers = ["sliding_attention", "full_attention"]
    config = tf.Gemma3Config(
        text_config=TEXT | dict(head_dim=16, sliding_window=6, layer_types=layers),
        vision_config=PIXELS,
        image_token_id=4,
        boi_token_id=6,
        eoi_token_id=7,
        mm_tokens_per_image=4,
    )
    processor = tf.Gemma3Processor(
        tf.Gemma3ImageProcessor(size=square(16)),
        tokenizer(image_token="<image>", boi_token="<start>", eoi_token="<end>"),
        image_seq_length=4,
        chat_template=template("<start>"),
    )
    return tf.Gemma3ForConditionalGeneration(config), processor


MODELS = {"qwen2.5-vl": qwen2_5_vl, "gemma3": gemma3, "qwen3.5": qwen3_5}


def save(name, folder, seed=0, std=0.25):
    """A model of kind ``name`` whose answers vary, and its processor, in ``folder``."""
    model, processor = MODELS[name]()
    shaken(model, seed, std)
    with torch.no_grad():
        model.get_output_embeddings().weight[: len(MARKS)] = 0  # answers hold few marks
    model.generation_config.eos_token_id = [2, END]
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
