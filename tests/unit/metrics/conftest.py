"""Tiny models in the formats of the real ones."""

import json
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a randomly initialised CLIP and its processor, as ``save_pretrained`` writes
    them.
    """
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = {**size, "vocab_size": len(words), "max_position_embeddings": 24}
    last = len(words) - 1
    text |= dict(bos_token_id=last - 1, eos_token_id=last, pad_token_id=last)
    torch.manual_seed(0)
    vision = size | dict(image_size=32, patch_size=8)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder
