import pytest
import torch
from scipy import stats

from specmm.metrics.features import FeatureSet
from specmm.metrics.frechet import FeatureStatistics, frechet_distance
from specmm.metrics.intervals import Bootstrap, frechet_interval, student_quantile
from specmm.metrics.kernel import kernel_distance


def bootstrap(seed: int = 0, draws: int = 1000) -> Bootstrap:
    return Bootstrap(torch.Generator().manual_seed(seed), draws)


def normal(n: int, seed: int, width: int = 4) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_weights_are_multinomial() -> None:
    found = bootstrap(draws=4000).weights(10)
    assert torch.equal(found.sum(1), torch.full((4000,), 10.0, dtype=torch.float64))
    torch.testing.assert_close(
        found.mean(0), torch.ones(10, dtype=torch.float64), atol=0.06, rtol=0
    )
    torch.testing.assert_close(
        found.var(0), torch.full((10,), 0.9, dtype=torch.float64), atol=0.1, rtol=0
    )


def test_interval_of_a_mean_is_the_normal_one() -> None:
    x = normal(500, 0)[:, 0]
    found = bootstrap(draws=4000).of_mean(x)
    error = float(x.std() / 500**0.5)
    assert found.low == pytest.approx(float(x.mean()) - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(float(x.mean()) + 1.96 * error, abs=0.15 * error)
    assert found.method == "bootstrap of 4000 over samples"
    assert bootstrap(1).of_mean(x) == bootstrap(1).of_mean(x) != bootstrap(2).of_mean(x)


def test_interval_of_kid_covers_as_often_as_it_says() -> None:
    shift = 0.7
    truth = []
    for seed in range(40):
        x = normal(150, seed)
        y = normal(150, seed + 1000) + shift
        truth.append(kernel_distance(x, y, subsets=1, subset_size=2).full)
    centre = float(torch.tensor(truth).mean())
    inside = 0
    for seed in range(40):
        x = normal(150, seed)
        y = normal(150, seed + 1000) + shift
        found = kernel_distance(
            x, y, subsets=1, subset_size=2, bootstrap=bootstrap(seed, 200)
        ).interval
        assert found is not None
        inside += found.low <= centre <= found.high
    assert inside >= 33  # of 40 at 95 %: below 33 in one of 2,000 runs


def test_frechet_interval_is_as_wide_as_the_luck_of_the_draw() -> None:
    reference = FeatureStatistics.of(2 * normal(2000, 999) + 0.5)
    values = [frechet_distance(normal(300, s), reference).value for s in range(200)]
    spread = float(torch.tensor(values).std())
    found = [
        frechet_interval(FeatureSet(normal(300, s)), reference, torch.Generator().manual_seed(s))
        for s in range(20)
    ]
    widths = torch.tensor([i.high - i.low for i in found]) / 2 / student_quantile(19)
    assert float(widths.mean()) == pytest.approx(spread, rel=0.2)
    assert found[0].low < values[0] < found[0].high
    assert found[0].method.startswith("jackknife of 20 groups")


def test_student_quantile() -> None:
    for freedom in (10, 19, 49):
        assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-3)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="draws >= 2, got 1"):
        bootstrap(draws=1)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap().of_mean(torch.zeros(0))
    with pytest.raises(ValueError, match="at least 40 samples, got 10"):
        made = FeatureSet(normal(10, 0))
        frechet_interval(made, FeatureStatistics.of(made), torch.Generator())
