"""Tiny random models in the format of the pocket models: one of pictures, one of text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from recipes.training.coder import build_tokenizer
from specmm.diffusion_drafters.assemble import PROXY
from specmm.diffusion_drafters.models.deer import DEERModel, save_deer, share
from specmm.diffusion_drafters.models.dflash import DFlash, save_dflash
from specmm.diffusion_drafters.models.dflash_config import DFlashConfig
from specmm.image_ar.autoencoder import VQConfig, VQModel
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline, LlamaGenSettings
from specmm.recipes.diffusion import fit_proxy
from specmm.text.pipeline import TextPipeline
from specmm.vlm.pipeline import VQAPipeline
from tests.tiny.parts import SIZES, shaken

TEXT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n" * 3
TEXT_SIZES = SIZES | dict(num_key_value_heads=2, max_position_embeddings=160)
CLASSES = ("heart", "face-smiling", "food-fruit", "country-flag", "time")
LEVELS = 4


def tiny_pipeline(
    seed: int = 0, tokens: int = 36, vocab: int = 64, drafters: bool = True
) -> LlamaGenPipeline:
    """Random weights: dim 64, 2 layers, pictures of 24 pixels."""
    torch.manual_seed(seed)
    config = GPTConfig(64, 2, 4, vocab, tokens, num_classes=len(CLASSES), multiple_of=32)
    gpt = Transformer(config)
    gpt.output.weight.data.normal_(std=0.3)  # distributions that are not flat
    vq = VQModel(VQConfig(vocab, 8, 32, (1, 1, 1), 1, 32))
    vq.quantize.embedding.weight.data = torch.nn.functional.normalize(torch.randn(vocab, 8), dim=-1)
    heads = {
        "block": BlockHead(BlockConfig(LEVELS, 2, config)),
        "eagle": EagleHead(EagleConfig(config)),
    }
    trees = {"speculative": (2, 1, 1), "lantern++": (2, 2, 1)}
    return LlamaGenPipeline(
        gpt.eval(),
        vq.eval(),
        heads if drafters else {},
        LlamaGenSettings(classes=CLASSES, trees=trees),
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model; copy it before changing anything in it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    tiny_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., LlamaGenPipeline]:
    """``tiny_pipeline`` itself, for other weights or sizes."""
    return tiny_pipeline


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def qwen2(vocabulary, seed, layers=2, **changes):
    sizes = TEXT_SIZES | dict(num_hidden_layers=layers) | changes
    config = tf.Qwen2Config(vocab_size=vocabulary, **sizes)
    model = shaken(tf.Qwen2ForCausalLM(config), seed, 0.3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 0, 1
    return model


def write_drafters(folder, target, words):
    """A diffusion model with its proxy, a DEER and a DFlash drafter, a language model; some are the
    target itself, so that something is accepted.
    """
    size, mask = len(words), words.mask_token_id
    near = qwen2(size, 0)
    near.save_pretrained(folder / "text")
    facts = near.config.to_dict() | {
        "model_type": "Dream",
        "mask_token_id": mask,
        "eos_token_id": 0,
    }
    (folder / "diffusion").mkdir()
    (folder / "diffusion" / "config.json").write_text(json.dumps(facts))
    save_file(
        {k: v for k, v in near.state_dict().items()}, folder / "diffusion" / "model.safetensors"
    )
    fit_proxy([words(TEXT)["input_ids"]], size).save(folder / "diffusion" / PROXY)
    inner = qwen2(size, 5, layers=1)
    share(inner, target)
    save_deer(DEERModel(inner, mask, 5, 0, shared=True), folder / "deer", torch.float32)
    one = TEXT_SIZES | dict(vocab_size=size, num_hidden_layers=1, head_dim=8)
    sizes = tf.Qwen3Config(attn_implementation="sdpa", **one)
    block = shaken(DFlash(DFlashConfig(sizes, 5, mask, (0,))), 4, 0.3)
    save_dflash(block, folder / "block", target.get_input_embeddings().weight, torch.float32)


def save_text(folder):
    """A tiny Qwen2 with a tokenizer and every drafter beside it."""
    words = build_tokenizer([TEXT], 280)
    target = qwen2(len(words), 0)
    target.save_pretrained(folder)
    words.save_pretrained(folder)
    write_drafters(folder / "drafters", target, words)
    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Folder of a tiny Qwen2 with a tokenizer and every drafter beside it; copy it before changing
    anything in it.
    """
    return save_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def text_pipe(text_folder):
    """Its pipeline."""
    return TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)


@pytest.fixture(scope="session")
def make_qwen2():
    """``qwen2`` itself, for other weights or sizes."""
    return qwen2


@pytest.fixture(scope="session")
def llava_pipe():
    """The shipped vision-language model's pipeline."""
    return VQAPipeline.from_pretrained("pocket/llava", torch_dtype=torch.float32)


@pytest.fixture(scope="session")
def coder_pipe():
    """The shipped language model's pipeline."""
    return TextPipeline.from_pretrained("pocket/coder", torch_dtype=torch.float32)
