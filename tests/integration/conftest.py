"""A tiny random model in the format of the pocket models."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.drafters.eagle_head import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.image_ar.tokens.settings import Settings
from specmm.image_ar.tokens.vq import VQConfig, VQModel

CLASSES = ("heart", "face-smiling", "food-fruit", "country-flag", "time")
LEVELS = 4


def tiny_pipeline(seed: int = 0, tokens: int = 36, vocab: int = 64, drafters: bool = True) -> LlamaGenPipeline:
    """Random weights: dim 64, 2 layers, pictures of 24 pixels."""
    torch.manual_seed(seed)
    config = GPTConfig(64, 2, 4, vocab, tokens, num_classes=len(CLASSES), multiple_of=32)
    gpt = Transformer(config)
    gpt.output.weight.data.normal_(std=0.3)  # laws that are not flat
    vq = VQModel(VQConfig(vocab, 8, 32, (1, 1, 1), 1, 32))
    vq.quantize.embedding.weight.data = torch.nn.functional.normalize(torch.randn(vocab, 8), dim=-1)
    heads = {"block": BlockHead(BlockConfig(LEVELS, 2, config)), "eagle": EagleHead(EagleConfig(config))}
    trees = {"speculative": (2, 1, 1), "lantern++": (2, 2, 1)}
    return LlamaGenPipeline(gpt.eval(), vq.eval(), heads if drafters else {}, Settings(classes=CLASSES, trees=trees))


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
