"""A tiny random GLM-Image, as the pipeline of diffusers that ``save_pretrained`` writes."""

import diffusers
import torch
import transformers as tf
from tokenizers import pre_tokenizers

from tests.tiny.parts import SIZES
from tests.tiny.processors import word_tokenizer

CODES = 8
BEGIN, END = CODES, CODES + 1  # of a picture
NAMED = dict(image_token="<image>", grid_bos_token="<sop>", grid_eos_token="<eop>")
MARKS = ("<boi>", "<eoi>", "<pad>", "<s>", "</s>", "<unk>", *NAMED.values())
SPECIAL = [*(f"<code {i}>" for i in range(CODES)), *MARKS]
WORDS = ["a", "red", "blue", "barn", "tree", "on", "hill", "draw", *"0123456789"]
IDS = {name: i for i, name in enumerate([*SPECIAL, *WORDS])}
TEMPLATE = (
    "{% for m in messages %}draw {% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"
)
TEXT = dict(
    vocab_size=len(IDS),
    vision_vocab_size=CODES + 2,
    num_key_value_heads=2,
    max_position_embeddings=512,
    **SIZES,
    pad_token_id=IDS["<pad>"],
    eos_token_id=END,
    rope_parameters=dict(rope_type="default", rope_theta=100.0, mrope_section=[1, 2, 1]),
)
VISION = dict(
    depth=1, hidden_size=16, num_heads=2, intermediate_size=16, patch_size=4, image_size=16
)
PAINTER = dict(in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2)
PAINTER |= dict(attention_head_dim=8, text_embed_dim=8, time_embed_dim=8, condition_dim=8)
PAINTER |= dict(prior_vq_quantizer_codebook_size=CODES)


def tokenizer():
    digits = pre_tokenizers.Digits(individual_digits=True)
    splits = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), digits])
    made = word_tokenizer(SPECIAL, WORDS, splits, NAMED, TEMPLATE)
    made.bos_token = "<boi>"  # as GLM-Image's processor has it
    return made


def processor():
    size = dict(shortest_edge=64, longest_edge=4096)
    pictures = tf.GlmImageImageProcessor(patch_size=4, merge_size=1, size=size)
    return tf.GlmImageProcessor(pictures, tokenizer(), chat_template=TEMPLATE)


def model():
    config = tf.GlmImageConfig(
        text_config=TEXT,
        vision_config=VISION,
        vq_config=dict(embed_dim=8, num_embeddings=CODES, latent_channels=16),
        image_token_id=IDS["<image>"],
        image_start_token_id=BEGIN,
        image_end_token_id=END,
    )
    return tf.GlmImageForConditionalGeneration(config)


def painter(autoregressive):
    """Random networks of diffusion around the ``autoregressive`` model."""
    torch.manual_seed(1)
    vae = diffusers.AutoencoderKL(
        block_out_channels=[4, 8, 8, 8],
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        norm_num_groups=4,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    glyphs = tf.T5Config(vocab_size=384, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return diffusers.GlmImagePipeline(
        tokenizer=tf.ByT5Tokenizer(),
        processor=processor(),
        text_encoder=tf.T5EncoderModel(glyphs).eval(),
        vision_language_encoder=autoregressive,
        vae=vae.eval(),
        transformer=diffusers.GlmImageTransformer2DModel(**PAINTER).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def inputs(texts, size):
    """What the pipeline of diffusers gives generate."""
    turns = [[{"role": "user", "content": [{"type": "text", "text": t}]}] for t in texts]
    height, width = size
    how = dict(padding=True, target_h=height, target_w=width)
    given = dict(tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=how)
    return processor().apply_chat_template(turns, **given)


def places(model, count, size, drawn):
    """Positions [3, 1, L + drawn] that the class gives a prompt of L tokens and what it draws."""
    given = inputs(["tree"], size)
    ids = torch.full((1, count), IDS["tree"])
    grids = dict(
        image_grid_thw=given["image_grid_thw"], images_per_sample=given["images_per_sample"]
    )
    prompt, _ = model.model.get_rope_index(ids, **grids)
    after = model.model._cached_decode_position_ids.transpose(0, 1)
    return torch.cat([prompt, after[..., :drawn]], dim=-1)
