import numpy as np
import pytest
import torch

from specmm.metrics.features import FeatureSet
from specmm.metrics.frechet import FeatureStatistics, frechet_distance


def correlated(n: int, width: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    """Non-negative, skewed, correlated features with a decaying spectrum, as a network's are: [n,
    width].
    """
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=torch.Generator().manual_seed(9)) / torch.arange(
        1, width + 1
    )
    return (torch.randn(n, width, generator=generator) @ mix + shift).relu()


def by_nuclear_norm(x: torch.Tensor, y: torch.Tensor) -> float:
    """The same through Tr (S_1 S_2)^½ = |A Bᵀ|_* of the centred samples: accurate whatever the
    rank.
    """
    a, b = (s.double() - s.double().mean(0) for s in (x, y))
    a = a / (len(a) - 1) ** 0.5
    b = b / (len(b) - 1) ** 0.5
    shift = (x.double().mean(0) - y.double().mean(0)).square().sum()
    return float(
        shift + a.square().sum() + b.square().sum() - 2 * torch.linalg.svdvals(a @ b.T).sum()
    )


def test_agrees_with_torchmetrics() -> None:
    fid = pytest.importorskip("torchmetrics.image.fid")
    x = correlated(900, 128, 2)
    y = correlated(900, 128, 3, shift=0.05)
    (m1, s1), (m2, s2) = FeatureStatistics.of(x).moments(), FeatureStatistics.of(y).moments()
    expected = float(fid._compute_fid(m1, s1, m2, s2))
    assert frechet_distance(x, y).value == pytest.approx(expected, rel=1e-6)


def test_parts_add_up_and_order_does_not_matter() -> None:
    x = correlated(300, 16, 2)
    y = correlated(200, 16, 3, shift=0.05)
    one = frechet_distance(x, y)
    two = frechet_distance(y, x)
    assert (
        one.value
        == one.parts["mean_term"] + one.parts["covariance_term"]
        == pytest.approx(two.value, rel=1e-12)
    )
    assert (one.protocol["counts"], two.protocol["counts"]) == ([300, 200], [200, 300])


@pytest.mark.parametrize("columns", [1, 24, 100])
def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    x = correlated(300, 100, 2)
    y = correlated(200, 100, 3, shift=0.05)
    whole = frechet_distance(x, y).value
    monkeypatch.setattr("specmm.metrics.frechet.COLUMNS", columns)
    monkeypatch.setattr("specmm.metrics.frechet.ROWS", 37)
    assert frechet_distance(x, y).value == pytest.approx(whole, rel=1e-10)
    torch.testing.assert_close(FeatureStatistics.of(x).moments()[1], x.double().T.cov())


def test_singular_covariance_of_many_samples() -> None:
    x = correlated(900, 40, 2)
    y = correlated(900, 40, 3, shift=0.05)
    for same in (x, y):
        same[:, 7], same[:, 8] = same[:, 6], 2.5  # a copied feature and a constant one
    assert frechet_distance(x, y).value == pytest.approx(by_nuclear_norm(x, y), rel=1e-9)


def test_known_gaussians() -> None:
    x = torch.tensor([[-1.0, 0], [1, 0], [0, -2], [0, 2]], dtype=torch.float64)
    y = 3 * x + torch.tensor([5.0, 0])
    variances = np.array([2 / 3, 8 / 3])
    expected = 25 + ((3 - 1) ** 2 * variances).sum()
    assert frechet_distance(x, y).value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "count", [40, 700, 20_000], ids=["fewer samples than features", "more", "many"]
)
def test_zero_for_equal_sets(count: int) -> None:
    x = correlated(count, 256, 4)
    assert abs(frechet_distance(x, x).value) < 1e-6


@pytest.mark.parametrize(("n", "m"), [(30, 500), (500, 30), (30, 30), (64, 65)])
def test_exact_when_rank_deficient(n: int, m: int) -> None:
    x = correlated(n, 64, 5)
    y = correlated(m, 64, 6)
    result = frechet_distance(x, y)
    assert result.value == pytest.approx(by_nuclear_norm(x, y), rel=1e-9)
    assert f"{min(n, m)} samples of 64 features" in result.protocol["note"]


def test_constant_features() -> None:
    x = torch.ones(5, 3)
    y = torch.full((6, 3), 3.0)
    assert frechet_distance(x, y).value == pytest.approx(12.0)


def test_statistics_stream() -> None:
    x = correlated(500, 32, 7)
    y = correlated(300, 32, 8)
    whole = FeatureStatistics.of(torch.cat([x, y]))
    streamed = FeatureStatistics.empty(32)
    for rows in torch.cat([x, y]).split(97):
        streamed.update(rows)
    assert streamed.count == 800
    for ours, theirs in zip(streamed.moments(), whole.moments(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert whole.moments()[1].numpy() == pytest.approx(
        np.cov(torch.cat([x, y]).double().numpy(), rowvar=False)
    )


NAN_IN_ROW_2 = torch.zeros(4, 3).index_fill_(0, torch.tensor(2), float("nan"))
ROWS = torch.rand(8, 3)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: FeatureStatistics.empty(3).update(NAN_IN_ROW_2), "1 of 4 rows .first: row 2."),
        (lambda: frechet_distance(ROWS[:1], ROWS), "at least 2 samples, got 1"),
        (lambda: frechet_distance(torch.zeros(5, 3), torch.zeros(5, 4)), "width, got 3 and 4"),
        (lambda: FeatureStatistics.empty(3).update(torch.zeros(5, 4)), "same width"),
        (
            lambda: frechet_distance(*(FeatureSet(ROWS, {"dtype": d}) for d in ("f32", "bf16"))),
            "dtype='f32' and 'bf16'",
        ),
        (lambda: FeatureSet(torch.zeros(3, 3, dtype=torch.int64)), "floating-point matrix"),
    ],
)
def test_what_has_no_distance(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_a_matrix_goes_with_any_protocol():
    result = frechet_distance(FeatureSet(ROWS, {"dtype": "float32"}), ROWS.numpy())
    assert result.protocol["dtype"] == "float32" and result.protocol["counts"] == [8, 8]
