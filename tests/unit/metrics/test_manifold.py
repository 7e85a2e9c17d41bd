import pytest
import torch

from specmm.metrics.features import FeatureSet
from specmm.metrics.intervals import Bootstrap
from specmm.metrics.neighbours import precision_recall


def sets(
    n: int = 90, m: int = 70, width: int = 6, scale: float = 0.7
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64)
    return x, scale * torch.randn(m, width, generator=generator, dtype=torch.float64) + 0.5


def apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x[:, None] - y[None]).norm(dim=2)


def reach(x: torch.Tensor, k: int) -> torch.Tensor:
    return apart(x, x).sort(1).values[:, k]


def test_is_the_definition() -> None:
    x, y = sets()
    precision, recall = precision_recall(x, y)
    assert precision.value == float((apart(y, x) <= reach(x, 3)).any(1).double().mean())
    assert recall.value == float((apart(x, y) <= reach(y, 3)).any(1).double().mean())
    assert 0.1 < recall.value < precision.value < 1  # the case decides something
    assert precision.metric == "precision" and precision.protocol == {"counts": [90, 70], "k": 3}


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = sets()
    whole = [m.value for m in precision_recall(x, y)]
    monkeypatch.setattr("specmm.metrics.neighbours.BLOCK", 7)
    assert [m.value for m in precision_recall(x, y)] == whole


def test_a_copy_of_the_real_set_is_perfect_wherever_it_lies() -> None:
    x = sets()[0] + 1000
    assert [m.value for m in precision_recall(x, x.clone())] == [1, 1]


def test_points_on_the_surface_count() -> None:
    x = torch.arange(8, dtype=torch.float64)[:, None] / 7
    y = torch.cat([x[:1] - 1 / 7, x[:1] - 1 / 7, x[:1] - 9, x[:1] - 99])
    assert precision_recall(x, y, k=1)[0].value == 0.5


def test_far_and_constant_sets() -> None:
    x, y = sets()
    assert [m.value for m in precision_recall(x, y + 99)] == [0, 0]
    flat = torch.ones(9, 3)
    assert [m.value for m in precision_recall(flat, flat)] == [1, 1]


def test_intervals_hold_the_value() -> None:
    x, y = sets()
    bootstrap = Bootstrap(torch.Generator().manual_seed(0), draws=200)
    for found in precision_recall(x, y, bootstrap=bootstrap):
        assert found.interval is not None
        assert found.interval.low < found.value < found.interval.high


def test_bad_input() -> None:
    x, y = sets()
    with pytest.raises(ValueError, match="less than the samples of either set, got 3 of 3"):
        precision_recall(x, y[:3])
    with pytest.raises(ValueError, match="k must be at least 1"):
        precision_recall(x, y, k=0)
    with pytest.raises(ValueError, match="same width, got 6 and 5"):
        precision_recall(x, y[:, 1:])
    with pytest.raises(ValueError, match="finite"):
        precision_recall(x / 0, y)
    with pytest.raises(ValueError, match="weights='a' and 'b'"):
        precision_recall(FeatureSet(x, {"weights": "a"}), FeatureSet(y, {"weights": "b"}))
