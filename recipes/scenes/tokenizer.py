"""The processor of a small LLaVA: byte-level BPE learnt from our own texts, the picture's
preparation, a chat template.

Any text can be encoded (bytes are the alphabet), and every word of the training texts is one token
or a few.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

BOS = "<s>"
EOS = "</s>"
PAD = "<pad>"
IMAGE = "<image>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL = (PAD, BOS, EOS, IMAGE, USER, ASSISTANT)
VOCABULARY = 768
MEAN = 0.5  # of a pixel in [0, 1], each channel
STD = 0.5
TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{{ '<|user|>' if message['role'] == 'user' else '<|assistant|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '</s>' if message['role'] == 'assistant' }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)


def build_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Learn at most ``vocabulary`` tokens from ``texts``."""
    # a space before every text, so that a word is the same token at the beginning and in the middle
    bpe = byte_pairs(texts, vocabulary, SPECIAL, prefix_space=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def byte_pairs(
    texts: Iterable[str], vocabulary: int, special: Iterable[str], prefix_space: bool = False
) -> Tokenizer:
    """A byte-level BPE of at most ``vocabulary`` tokens learnt from ``texts``, its ``special``
    tokens first.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    plain = decoders.ByteLevel()
    bpe.decoder = decoders.Sequence([plain, decoders.Strip(" ", 1, 0)]) if prefix_space else plain
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def build_processor(tokenizer: PreTrainedTokenizerFast, size: int, patch: int) -> LlavaProcessor:
    """A processor for pictures of ``size`` × ``size`` pixels, ``patch`` × ``patch`` pixels an image
    token.
    """
    pictures = CLIPImageProcessor(
        size={"height": size, "width": size},
        do_center_crop=False,
        image_mean=[MEAN] * 3,
        image_std=[STD] * 3,
    )
    return LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=TEMPLATE,
    )
