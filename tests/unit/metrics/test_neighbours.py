import numpy as np
import pytest
import torch

from specmm.metrics.neighbours import nearest_neighbours, pixels


def test_agrees_with_all_distances() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1100, 12, generator=generator)
    y = torch.rand(300, 12, generator=generator)
    expected = torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist").min(
        1
    )
    found = nearest_neighbours(x, y)
    assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(found.distances, expected.values, rtol=1e-6, atol=0)


def test_copy_is_at_zero_even_far_from_the_origin() -> None:
    y = 1000 + torch.rand(50, 64, generator=torch.Generator().manual_seed(0))
    found = nearest_neighbours(y[[7, 31]], y)
    assert found.indices.tolist() == [7, 31] and found.distances.tolist() == [0.0, 0.0]


def test_pixel_distance_is_root_mean_square() -> None:
    black = np.zeros((1, 4, 4, 3), np.uint8)
    grey = np.full((2, 4, 4, 3), 51, np.uint8)
    found = nearest_neighbours(pixels(black), pixels(grey))
    assert found.distances.item() == pytest.approx(0.2, rel=1e-6)
    assert found.protocol["features"] == "pixels" and found.protocol["counts"] == [1, 2]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="uint8"):
        pixels(np.zeros((1, 4, 4, 3), np.float32))
    with pytest.raises(ValueError, match="at least one sample"):
        nearest_neighbours(torch.zeros(2, 3), torch.zeros(0, 3))
    with pytest.raises(ValueError, match="same width"):
        nearest_neighbours(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="same width"):
        nearest_neighbours(
            pixels(np.zeros((1, 4, 4, 3), np.uint8)), pixels(np.zeros((1, 8, 8, 3), np.uint8))
        )
