import pytest
import torch

from specmm.metrics.frechet import frechet_distance, mean_cosine_distance, memorisation_distance


def sets(spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Training samples, and samples made near them: [120, 10] and [60, 10]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 10, generator=generator, dtype=torch.float64)
    return x, x[::2] + spread * torch.randn(60, 10, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("spread", [0.2, 3.0], ids=["memorised", "not"])
def test_agrees_with_torchmetrics(spread: float) -> None:
    mifid = pytest.importorskip("torchmetrics.image.mifid")
    x, y = sets(spread)
    moments = [(s.mean(0), s.T.cov()) for s in (x, y)]
    # the first set's distance to the second
    expected = float(mifid._mifid_compute(*moments[0], x, *moments[1], y))
    theirs = float(mifid._compute_cosine_distance(y, x, 2.0))
    found = memorisation_distance(x, y)
    assert found.parts["cosine_distance"] == pytest.approx(theirs, rel=1e-9)
    assert (found.value > found.parts["fid"] * 1.5) == (spread < 1)
    assert memorisation_distance(y, x).value == pytest.approx(expected, rel=1e-6)


def test_threshold_decides_and_is_recorded() -> None:
    x, y = sets(0.2)
    found = memorisation_distance(x, y, threshold=1e-6)
    assert found.value == pytest.approx(frechet_distance(x, y).value)
    assert found.protocol["cosine_threshold"] == 1e-6 and found.protocol["counts"] == [120, 60]


def test_copies_and_equal_sets() -> None:
    x, _ = sets(0.2)
    assert memorisation_distance(x, x).value == 0.0
    assert memorisation_distance(x, x[:60]).value > 1e9
    assert mean_cosine_distance(-3 * x, x) == pytest.approx(0, abs=1e-12)


def test_zero_vectors_are_left_out() -> None:
    x, y = sets(0.2)
    padded = torch.cat([x, torch.zeros(5, 10)])
    assert mean_cosine_distance(y, padded) == pytest.approx(mean_cosine_distance(y, x))
    with pytest.raises(ValueError, match="vectors other than zero"):
        memorisation_distance(x, torch.zeros(5, 10))
