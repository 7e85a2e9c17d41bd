"""Captions through a tiny random T5 that is saved as a real one is."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from specmm.core.decode import decode_plain
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.image_ar.autoencoder import VQConfig, VQModel
from specmm.image_ar.tokens.captions import CaptionEncoder, clean, left_pad
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.image_ar.tokens.target import LlamaGenTarget

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "cat", "on", "the", "mat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_t5(tmp_path_factory.mktemp("t5"))


def save_t5(path):
    """A tiny encoder and its tokenizer in the folder ``path``."""
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    marks = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64)
    PreTrainedTokenizerFast(tokenizer_object=words, **marks).save_pretrained(path)
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(WORDS), d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    T5EncoderModel(config).eval().save_pretrained(path)
    return path


@torch.no_grad()
def test_captions_are_left_padded_features(folder):
    batch = CaptionEncoder(folder, tokens=6)(["A red  cat", "the mat"])
    assert batch.condition.shape == (2, 6, 16)
    assert batch.mask.tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert not batch.condition[~batch.mask].any()
    for row, ids in enumerate([[3, 4, 5, 1], [7, 8, 1]]):
        alone = T5EncoderModel.from_pretrained(folder)(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(batch.condition[row, -len(ids) :], alone, atol=1e-5, rtol=1e-4)


def test_long_captions_are_cut(folder):
    encoder = CaptionEncoder(folder, tokens=4)
    batch = encoder(["a red cat on the mat"])
    assert batch.mask.all() and batch.condition.shape == (1, 4, 16)
    torch.testing.assert_close(batch.condition, encoder(["a red cat"]).condition)


@pytest.mark.parametrize("prompts", [[], [""], ["a cat", "  "]])
def test_empty_prompts(folder, prompts):
    with pytest.raises(ValueError, match="prompts must be non-empty texts"):
        CaptionEncoder(folder)(prompts)


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


def test_pictures_of_prompts_see_left_padded_captions(folder):
    """The pipeline's tokens are those of the captions' own features, the padding on the left."""
    torch.manual_seed(0)
    config = GPTConfig(
        32, 2, 2, 24, 16, model_type="t2i", cls_token_num=6, caption_dim=16, multiple_of=8
    )
    model = Transformer(config).eval()
    model.output.weight.data.normal_(std=0.4)
    vq = VQModel(VQConfig(24, 8, 32, (1, 1), 1, 32)).eval()
    encoder = CaptionEncoder(folder, tokens=6)
    pipe = LlamaGenPipeline(model, vq, text_encoder=encoder)
    pipe.set_progress_bar_config(disable=True)
    options = dict(temperature=0, cfg=2.0, output_type="latent", num_images_per_prompt=2)
    out = pipe(prompt=["a red cat", "the mat"], **options)
    captions = encoder(["a red cat", "the mat"])
    assert captions.mask[:, -1].all()
    target = LlamaGenTarget(model, Guidance(2.0), Processor(0))
    *_, end = decode_plain(target, captions, 16, Uniforms.from_seeds([0, 0]))
    assert torch.equal(out.tokens, end.tokens[:, :16].repeat_interleave(2, 0))
