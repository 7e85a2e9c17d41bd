import numpy as np
import pytest
import torch

from specmm.metrics.extractors import Extractor, channels_first
from specmm.metrics.frechet import frechet_distance
from specmm.metrics.paired import reconstruction

image = pytest.importorskip("torchmetrics.functional.image", reason="needs the extra fid")


def sets(count: int = 7) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    first = generator.integers(0, 256, (count, 24, 20, 3), dtype=np.uint8)
    return first, (first + generator.integers(0, 9, first.shape)).clip(0, 255).astype(np.uint8)


def moments(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.mean((2, 3)), x.std((2, 3))], dim=1)


def toy() -> Extractor:
    return Extractor("toy", {"features": "means and deviations"}, channels_first, moments)


def test_agrees_with_torchmetrics() -> None:
    first, second = sets()
    one, two = (torch.from_numpy(s).permute(0, 3, 1, 2).float() for s in (first, second))
    expected = {
        "psnr": image.peak_signal_noise_ratio(two, one, 255.0, dim=(1, 2, 3)),
        "ssim": image.structural_similarity_index_measure(two, one, data_range=255.0),
    }
    found = {m.metric: m for m in reconstruction(first, second, batch=3)}
    assert set(found) == set(expected)
    for name, m in found.items():
        assert m.value == pytest.approx(float(expected[name]), rel=1e-5)
        assert m.interval is not None and m.interval.low < m.value < m.interval.high
        assert m.protocol["counts"] == [7] and m.protocol["data_range"] == 255


def test_rfid_is_the_distance_of_both_sides() -> None:
    first, second = sets(40)
    found = reconstruction(iter(first), iter(second), extractor=toy(), batch=6)[-1]
    features = [toy().features(s, progress=False) for s in (first, second)]
    assert found.metric == "rfid" and found.protocol["features"] == "means and deviations"
    assert found.value == pytest.approx(frechet_distance(*features).value, rel=1e-5)


def test_equal_pictures() -> None:
    first, _ = sets()
    psnr, ssim = reconstruction(first, first)
    assert psnr.value == 100 and ssim.value == pytest.approx(1, abs=1e-5)


def test_mixed_sizes_are_averaged_over_pictures() -> None:
    first, second = sets(4)
    mixed = [[*s[:2], *(p[:12, :14] for p in s[2:])] for s in (first, second)]
    together = reconstruction(*mixed, batch=4)
    alone = reconstruction(*mixed, batch=1)
    assert [m.value for m in together] == pytest.approx([m.value for m in alone], rel=1e-6)


def test_bad_input() -> None:
    first, second = sets(3)
    with pytest.raises(ValueError, match="no partner for number 3 of the first"):
        reconstruction(first, second[:2])
    with pytest.raises(ValueError, match=r"one size, got \[24, 20\] and \[23, 20\]"):
        reconstruction(first, second[:, 1:])
    with pytest.raises(ValueError, match="at least 11 pixels"):
        reconstruction(first[:, :8], second[:, :8])
    with pytest.raises(ValueError, match="must be uint8"):
        reconstruction(first.astype(float), second)
    with pytest.raises(ValueError, match="got none"):
        reconstruction([], [])
