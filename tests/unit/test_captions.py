"""Captions through a tiny random T5 that is saved as a real one is."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from specmm.image_ar.tokens.captions import (
    CaptionEncoder,
    additive,
    clean,
    encode_captions,
    left_pad,
    prefix_mask,
)

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "cat", "on", "the", "mat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("t5")
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=64,
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(WORDS), d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    T5EncoderModel(config).eval().save_pretrained(path)
    return path


@torch.no_grad()
def test_captions_are_left_padded_features(folder):
    batch = encode_captions(["A red  cat", "the mat"], folder, tokens=6)
    assert batch.features.shape == (2, 6, 16) and batch.mask.tolist() == [
        [0, 0, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 1],
    ]
    assert not batch.features[~batch.mask].any()
    for row, ids in enumerate([[3, 4, 5, 1], [7, 8, 1]]):
        alone = T5EncoderModel.from_pretrained(folder)(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(batch.features[row, -len(ids) :], alone, atol=1e-5, rtol=1e-4)


def test_long_captions_are_cut(folder):
    encoder = CaptionEncoder(folder, tokens=4)
    batch = encoder(["a red cat on the mat"])
    assert batch.mask.all() and batch.features.shape == (1, 4, 16)
    torch.testing.assert_close(batch.features, encoder(["a red cat"]).features)


@pytest.mark.parametrize("prompts", [[], [""], ["a cat", "  "]])
def test_empty_prompts(folder, prompts):
    with pytest.raises(ValueError, match="prompts must be non-empty texts"):
        encode_captions(prompts, folder)


def test_missing_encoder(tmp_path):
    with pytest.raises(ValueError, match=r"text encoder must be a T5 folder .* got .*nowhere"):
        CaptionEncoder(tmp_path / "nowhere")


def test_clean():
    assert clean("  A Cat &amp;\n a DOG ") == "a cat & a dog"


def test_left_pad_by_hand():
    features = torch.arange(1.0, 9.0).view(2, 4, 1)
    moved, mask = left_pad(features, torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]))
    assert moved[..., 0].tolist() == [[0, 0, 1, 2], [5, 6, 7, 8]]
    assert mask.tolist() == [[False, False, True, True], [True] * 4]


def test_prefix_mask_by_hand():
    allowed = prefix_mask(torch.tensor([[0, 1]]), 4)
    assert allowed.int().tolist() == [[[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]]
    assert torch.equal(prefix_mask(torch.tensor([[0, 1]]), 4, first=3), allowed[:, 3:])
    bias = additive(allowed, torch.bfloat16)
    assert (
        bias.shape == (1, 1, 4, 4)
        and bias.dtype == torch.bfloat16
        and torch.equal(bias == 0, allowed[:, None])
    )
