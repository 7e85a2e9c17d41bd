import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from specmm.loading.extras import install
from specmm.metrics.extractors import extractor

timm = pytest.importorskip("timm", reason="needs the extra fid")
TINY = {"depth": 1, "embed_dim": 16, "num_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DINOv2 as timm's repositories on the hub are laid out."""
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("dinov2")
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=56, **TINY)
    save_file(model.state_dict(), path / "model.safetensors")
    settings = dict(architecture="vit_small_patch14_dinov2", num_classes=0, num_features=16)
    pretrained = dict(input_size=[3, 56, 56], num_classes=0, first_conv="patch_embed.proj")
    settings |= dict(model_args=TINY, pretrained_cfg=pretrained)
    (path / "config.json").write_text(json.dumps(settings))
    return path


def test_features_are_the_class_token(folder: Path) -> None:
    network = extractor("dinov2", weights=folder)
    # no resize needed
    given = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    found = network.features(given, progress=False)
    model = timm.create_model(
        f"local-dir:{folder}", pretrained=True, num_classes=0, img_size=224
    ).eval()
    mean = torch.tensor([0.485, 0.456, 0.406])
    std = torch.tensor([0.229, 0.224, 0.225])
    x = ((torch.from_numpy(given) / 255 - mean) / std).permute(0, 3, 1, 2)
    with torch.inference_mode():
        expected = model.forward_features(x)[:, 0]
    torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-5)
    assert found.protocol["features"] == "vit_small_patch14_dinov2 class token 16"
    assert found.protocol["resize"].startswith("224 bicubic")


def test_mixed_sizes_and_streaming(folder: Path) -> None:
    network = extractor("dinov2", weights=folder)
    given = [np.full((side, side + 3, 3), side % 256, np.uint8) for side in (10, 20, 300)]
    together = network.features(given, batch=3, progress=False).values
    alone = torch.cat([b.values for b in network.stream(given, batch=1)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_missing_weights_say_what_to_put_where(tmp_path: Path) -> None:
    said = r"model\.safetensors, config\.json in .*vit_large_patch14_dinov2"
    with pytest.raises(ValueError, match=said):
        extractor("dinov2", weights=tmp_path)


def test_missing_timm_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=re.escape(install("fid"))):
        extractor("dinov2", weights=folder)
