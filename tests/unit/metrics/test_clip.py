from pathlib import Path

import numpy as np
import pytest
import torch

from specmm.metrics.networks import CLIP


def pictures(count: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8) for i in range(count)]


def test_features_are_the_models_own(tiny_clip: Path) -> None:
    from PIL import Image
    from transformers import CLIPModel, CLIPProcessor

    given = pictures(3)
    processor = CLIPProcessor.from_pretrained(tiny_clip)
    inputs = processor(images=[Image.fromarray(p) for p in given], return_tensors="pt")
    with torch.inference_mode():
        expected = CLIPModel.from_pretrained(tiny_clip).get_image_features(**inputs).pooler_output
    found = CLIP(weights=tiny_clip).features(given, progress=False)
    torch.testing.assert_close(found.values, expected, rtol=1e-5, atol=1e-6)
    assert found.protocol["features"] == "CLIP ViT patch 8 image 8"
    assert "crop" in found.protocol["resize"]


def test_long_texts_are_cut(tiny_clip: Path) -> None:
    found = CLIP(weights=tiny_clip).texts(["a" * 40, "b"])
    assert found.shape == (2, 8) and found.isfinite().all()


def test_missing_weights_say_what_to_put_where(tmp_path: Path) -> None:
    said = r"model\.safetensors, config\.json.* got none; put .*clip-vit-base-patch32"
    with pytest.raises(ValueError, match=said):
        CLIP(weights=tmp_path)
