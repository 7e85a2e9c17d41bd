import numpy as np
import pytest
import torch

from specmm.metrics.features import FeatureSet
from specmm.metrics.intervals import Bootstrap
from specmm.metrics.kernel import kernel_distance


def naive(x: torch.Tensor, y: torch.Tensor) -> float:
    """The unbiased estimate as a double loop, in Python floats."""
    a = x.double().numpy()
    b = y.double().numpy()

    def k(u: np.ndarray, v: np.ndarray) -> float:
        return float((u @ v / len(u) + 1) ** 3)

    def within(s: np.ndarray) -> float:
        pairs = [k(s[i], s[j]) for i in range(len(s)) for j in range(len(s)) if i != j]
        return sum(pairs) / len(pairs)

    return within(a) + within(b) - 2 * sum(k(u, v) for u in a for v in b) / (len(a) * len(b))


def sets(n: int, m: int, width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, width, generator=generator), 1.2 * torch.rand(
        m, width, generator=generator
    )


def test_full_estimate_is_the_double_loop() -> None:
    x, y = sets(40, 33)
    assert kernel_distance(x, y).full == pytest.approx(naive(x, y), rel=1e-10)


@pytest.mark.parametrize("full", [True, False], ids=["one pass", "subset by subset"])
def test_subsets_are_the_double_loop(full: bool) -> None:
    x, y = sets(40, 33)
    generator = torch.Generator().manual_seed(5)
    expected = []
    for _ in range(7):
        i = torch.randperm(40, generator=generator)[:20]
        j = torch.randperm(33, generator=generator)[:20]
        expected.append(naive(x[i], y[j]))
    result = kernel_distance(x, y, subsets=7, subset_size=20, seed=5, full=full)
    assert result.mean == pytest.approx(np.mean(expected), rel=1e-10)
    assert result.std == pytest.approx(np.std(expected), rel=1e-8)
    assert (result.full is not None) == full


def test_many_blocks_agree_with_subset_route() -> None:
    x, y = sets(1500, 2100, width=4)
    one = kernel_distance(x, y, subsets=3, subset_size=1500)
    two = kernel_distance(x, y, subsets=3, subset_size=1500, full=False)
    assert one.mean == pytest.approx(two.mean, rel=1e-9)


def test_agrees_with_torch_fidelity_on_its_own_subsets(monkeypatch: pytest.MonkeyPatch) -> None:
    kid = pytest.importorskip("torch_fidelity.metric_kid")
    x, y = (s.double() for s in sets(80, 70))
    options = {"kid_subsets": 6, "kid_subset_size": 50, "rng_seed": 3, "verbose": False}
    theirs = kid.kid_features_to_metric(x, y, **options)
    random = np.random.RandomState(3)
    picks = [
        tuple(torch.from_numpy(random.choice(n, 50, replace=False)) for n in (80, 70))
        for _ in range(6)
    ]
    monkeypatch.setattr("specmm.metrics.kernel._picks", lambda *sizes: picks)
    for full in (True, False):
        ours = kernel_distance(x, y, subsets=6, subset_size=50, full=full)
        assert ours.mean == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-9)
        assert ours.std == pytest.approx(theirs["kernel_inception_distance_std"], rel=1e-7)


def test_measurement_says_which_estimate() -> None:
    x, y = sets(40, 33)
    bootstrap = Bootstrap(torch.Generator().manual_seed(0), draws=100)
    whole = kernel_distance(x, y, bootstrap=bootstrap).measurement()
    assert whole.interval is not None and whole.interval.low < whole.value < whole.interval.high
    assert whole.protocol["estimate"] == "whole sets"
    subsets = kernel_distance(x, y, full=False).measurement()
    assert subsets.value == subsets.parts["subsets_mean"]
    assert subsets.protocol["estimate"] == "mean over subsets"


def test_seed_decides_and_is_recorded() -> None:
    x, y = sets(60, 60)
    one, again, other = (kernel_distance(x, y, subset_size=20, seed=s) for s in (1, 1, 2))
    assert one.mean == again.mean != other.mean
    assert one.protocol["subset_seed"] == 1 and one.protocol["subset_size"] == 20


def test_bad_input() -> None:
    x, y = sets(10, 10)
    with pytest.raises(ValueError, match="at least 2 samples a set, got 1"):
        kernel_distance(x[:1], y)
    with pytest.raises(ValueError, match="same width, got 16 and 15"):
        kernel_distance(x, y[:, 1:])
    with pytest.raises(ValueError, match="finite"):
        kernel_distance(x / 0, y)
    with pytest.raises(ValueError, match="size >= 2"):
        kernel_distance(x, y, subset_size=1)
    with pytest.raises(ValueError, match="got 0 of 10"):
        kernel_distance(x, y, subsets=0)
    with pytest.raises(ValueError, match="bootstrap belongs to the whole-set estimate"):
        kernel_distance(x, y, full=False, bootstrap=Bootstrap(torch.Generator()))
    with pytest.raises(ValueError, match="same protocol, got weights='a' and 'b'"):
        kernel_distance(FeatureSet(x, {"weights": "a"}), FeatureSet(y, {"weights": "b"}))
