"""Tiny random checkpoints of Chameleon: as Anole's, with the tokenizer in ``vq/``, and as
Lumina-mGPT's, with the published tokenizer's file and without its encoder's weights.
"""

import re

import torch
from diffusers import VQModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    ChameleonImageProcessor,
    ChameleonProcessor,
    PreTrainedTokenizerFast,
)

from tests.tiny.parts import SIZES, shaken

CODES, SIDE, FIRST = 8, 4, 20
PICTURE = [FIRST + 2 * i for i in range(CODES)]  # their ids, not those of words
BEGIN, TURN, LINE = "<racm3:break>", "<reserved08706>", "<reserved08799>"
SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": 3, BEGIN: 4, "<unk>": 5, TURN: 6}
SPECIAL |= {LINE: 7, "<eoss>": 13} | {f"<reserved{8800 + n:05d}>": 7 + n for n in range(1, 6)}
WORDS = ["a", "red", "blue", "barn", "tree", "on", "hill", "Generate", "image", "of", "following"]
WORDS += ["2", "4", "1", "6", "x"]
IDS = SPECIAL | {word: 40 + i for i, word in enumerate(WORDS)}
VQ = dict(embed_dim=8, num_embeddings=CODES, latent_channels=8, num_res_blocks=1)
VQ |= dict(resolution=4 * SIDE, base_channels=32, channel_multiplier=[1, 1, 1])
TEXT = SIZES | dict(vocab_size=64, num_key_value_heads=2, max_position_embeddings=96)
TRAINING = dict(mask_image_logits=False, z_loss_weight=1e-5)  # what Lumina-mGPT's leaves


def image_name(code):
    """Digits are letters in Chameleon's vocabulary."""
    return f"IMGIMG{chr(ord('A') + code)}Z"


def model(**more):
    names = {image_name(code): id_ for code, id_ in enumerate(PICTURE)}
    return loud(ChameleonConfig(vocabulary_map=SPECIAL | names, vq_config=VQ, **TEXT, **more))


def loud(config):
    """Random weights whose next tokens depend on the text."""
    torch.manual_seed(0)
    made = ChameleonForConditionalGeneration(config).eval()
    shaken(made.model.layers)
    with torch.no_grad():
        made.lm_head.weight.normal_(0, 0.25)
        made.model.embed_tokens.weight.normal_(0, 0.5)
    return made


def tokenizer():
    words = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), digits])
    start = ("<s>", SPECIAL["<s>"])
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")


def processor():
    """With the marks of pictures as tokens of their own."""
    words = tokenizer()
    marks = ["<image>", BEGIN, "<eoss>", "</s>", "<pad>"]
    words.add_special_tokens({"additional_special_tokens": marks, "sep_token": TURN})
    words.pad_token = "<pad>"
    words.padding_side = "left"
    square = dict(height=4 * SIDE, width=4 * SIDE)
    pictures = ChameleonImageProcessor(size={"shortest_edge": 4 * SIDE}, crop_size=square)
    return ChameleonProcessor(pictures, words, image_seq_length=SIDE**2)


def vq():
    torch.manual_seed(1)
    return VQModel(
        block_out_channels=(32, 32, 32),
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        latent_channels=8,
        num_vq_embeddings=CODES,
        vq_embed_dim=8,
    ).eval()


def save(folder):
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    vq().save_pretrained(folder / "vq")


def save_writer(folder):
    """One that is fond of pictures among its words, with a processor."""
    made = model()
    with torch.no_grad():
        made.lm_head.weight[IDS[BEGIN]] *= 3
    made.save_pretrained(folder)
    processor().save_pretrained(folder)
    vq().save_pretrained(folder / "vq")


def save_lumina(folder):
    """As its training writes it: without the image tokenizer, which comes in a file apart."""
    model(**TRAINING).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if not k.startswith("model.vqmodel.")}
    save_file(kept, file, metadata={"format": "pt"})
    (folder / "tokenizer").mkdir()
    torch.save({"state_dict": published(vq())}, folder / "tokenizer" / "vqgan.ckpt")


def published(found):
    """The weights of a ``VQModel`` of diffusers by the names of VQGAN's release."""
    levels = len(found.config.block_out_channels)
    names = (
        (r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}"),
        (r"mid_block\.attentions\.0", "mid.attn_1"),
        (r"down_blocks\.(\d)\.resnets", r"down.\1.block"),
        (r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample"),
        (r"up_blocks\.(\d)\.resnets", lambda m: f"up.{levels - 1 - int(m[1])}.block"),
        (r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{levels - 1 - int(m[1])}.upsample"),
        (r"conv_norm_out", "norm_out"),
        (r"conv_shortcut", "nin_shortcut"),
        (r"group_norm", "norm"),
        (r"to_out\.0", "proj_out"),
        (r"to_([qkv])", r"\1"),
    )
    state = {}
    for name, weight in found.state_dict().items():
        for pattern, new in names:
            name = re.sub(pattern, new, name)
        linear = re.search(r"attn_1\.(q|k|v|proj_out)\.weight", name)
        state[name] = weight[..., None, None] if linear else weight
    return state
