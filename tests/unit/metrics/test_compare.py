import json

import pytest
import torch
from scipy import stats

from specmm.metrics import compare as gate
from specmm.metrics.compare import Comparison, compare, labelled_distances, relabellings
from specmm.metrics.features import FeatureSet
from specmm.metrics.kernel import kernel_distance

CASES = 100


def normal(n: int, seed: int, width: int = 4) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compared(x: torch.Tensor, y: torch.Tensor, seed: int = 0, **options: object) -> Comparison:
    return compare(x, y, generator=torch.Generator().manual_seed(seed), **options)  # type: ignore[arg-type]


def p_values(shift: float = 0.0) -> list[float]:
    return [
        compared(normal(24, s), normal(30, 10_000 + s) + shift, s, permutations=99).p_value
        for s in range(CASES)
    ]


def uniform(found: list[float]) -> float:
    """Chance of p-values at least as uneven as ``found`` if uniform on 0.01, 0.02, …, 1."""
    jitter = torch.rand(len(found), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return float(
        stats.kstest(
            (torch.tensor(found, dtype=torch.float64) - 0.01 * jitter).numpy(), "uniform"
        ).pvalue
    )


def test_p_values_are_uniform_when_nothing_differs() -> None:
    assert uniform(p_values()) > 0.01


def test_a_broken_twin_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_moves(
        n: int, m: int, count: int, generator: torch.Generator, paired: bool
    ) -> torch.Tensor:
        return (torch.arange(n + m) < n).double().expand(count, -1)

    def other_sizes(
        n: int, m: int, count: int, generator: torch.Generator, paired: bool
    ) -> torch.Tensor:
        return relabellings(n // 4, m + n - n // 4, count, generator, paired)

    for broken in (nothing_moves, other_sizes):
        monkeypatch.setattr(gate, "relabellings", broken)
        assert uniform(p_values()) < 1e-4


def test_a_shift_is_found() -> None:
    found = p_values(shift=0.8)
    assert sum(p <= 0.05 for p in found) > 0.9 * CASES
    assert compared(normal(24, 0), normal(30, 1) + 0.8).differ


def test_statistic_is_the_kernel_distance_of_any_labelling() -> None:
    x = normal(20, 0)
    y = normal(31, 1) + 0.3
    assert compared(x, y).distance == pytest.approx(kernel_distance(x, y).full, rel=1e-10)
    labels = relabellings(20, 31, 5, torch.Generator().manual_seed(0), paired=False)
    pool = torch.cat([x, y])
    expected = [kernel_distance(pool[w == 1], pool[w == 0]).full for w in labels]
    assert labelled_distances(pool, labels).tolist() == pytest.approx(expected, rel=1e-9)
    assert (labels.sum(1) == 20).all()


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(40, 0)
    y = normal(50, 1)
    whole = compared(x, y)
    monkeypatch.setattr(gate, "BLOCK", 7)
    assert compared(x, y).p_value == whole.p_value


def test_pairs_are_swapped_within() -> None:
    labels = relabellings(6, 6, 50, torch.Generator().manual_seed(0), paired=True)
    assert torch.equal(labels[:, :6] + labels[:, 6:], torch.ones(50, 6, dtype=torch.float64))
    x = normal(60, 0)
    # far less than the spread of samples, yet the same way in every pair
    y = x + 0.05 * normal(60, 1) + 0.1
    assert compared(x, y, paired=True).p_value < 0.01 < 0.2 < compared(x, y).p_value


def test_identical_sets_do_not_differ() -> None:
    x = normal(30, 0)
    found = compared(x, x.clone())
    assert found.p_value > 0.5 and not found.differ
    assert compared(x, x.clone(), paired=True).p_value == 1


def test_loss_is_the_difference_of_distances_with_an_interval() -> None:
    real = normal(120, 0)
    x = normal(100, 1) + 0.9
    y = normal(90, 2) + 0.5
    loss = compared(x, y, reference=real).loss
    assert loss is not None and loss.interval is not None
    kid = [kernel_distance(s, real).full for s in (x, y)]
    assert loss.value == pytest.approx(kid[0] - kid[1], rel=1e-9)
    assert 0 < loss.interval.low < loss.value < loss.interval.high
    assert loss.interval.method == "bootstrap of 1000 over all three sets"


def test_pairing_narrows_the_interval() -> None:
    real = normal(150, 0)
    x = normal(100, 1) + 0.5
    y = x + 0.1 * normal(100, 2)
    widths = []
    for paired in (True, False):
        loss = compared(x, y, reference=real, paired=paired).loss
        assert loss is not None and loss.interval is not None
        widths.append(loss.interval.high - loss.interval.low)
    assert widths[0] < widths[1] / 2


def test_seed_decides_and_json_is_plain() -> None:
    x = normal(30, 0)
    y = normal(30, 1) + 0.2
    one, again, other = (compared(x, y, s, reference=normal(40, 2)) for s in (1, 1, 2))
    assert one == again != other
    found = json.loads(json.dumps(one.to_json()))
    assert found["differ"] == one.differ and found["protocol"]["permutations"] == 999
    assert found["loss"]["metric"] == "kid_difference"
    assert found["loss"]["interval"]["level"] == 0.95


def test_bad_input() -> None:
    x = normal(10, 0)
    y = normal(12, 1)
    with pytest.raises(ValueError, match="one size, got 10 and 12"):
        compared(x, y, paired=True)
    with pytest.raises(ValueError, match=r"alpha must be in .*, got 0.05 of 9"):
        compared(x, y, permutations=9)
    with pytest.raises(ValueError, match="at least 2 samples a set, got 1"):
        compared(x[:1], y)
    with pytest.raises(ValueError, match="same width, got 4 and 3"):
        compared(x, y, reference=y[:, 1:])
    with pytest.raises(ValueError, match="finite"):
        compared(x / 0, y)
    with pytest.raises(ValueError, match="weights='a' and 'b'"):
        compare(
            FeatureSet(x, {"weights": "a"}),
            FeatureSet(y, {"weights": "b"}),
            generator=torch.Generator(),
        )
