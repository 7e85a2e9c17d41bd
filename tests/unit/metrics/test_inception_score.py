import numpy as np
import pytest
import torch

from specmm.metrics.features import FeatureSet
from specmm.metrics.inception_score import ScoreStatistics, inception_score


def logits(n: int = 203, classes: int = 30, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(n, classes, generator=torch.Generator().manual_seed(seed))


def by_definition(found: torch.Tensor) -> float:
    p = found.double().softmax(1)
    return float((p * (p / p.mean(0)).log()).sum(1).mean().exp())


def test_agrees_with_torch_fidelity_on_its_own_splits() -> None:
    isc = pytest.importorskip("torch_fidelity.metric_isc")
    x = logits(200)
    theirs = isc.isc_features_to_metric(x, splits=10, shuffle=True, rng_seed=7)
    order = torch.from_numpy(np.random.RandomState(7).permutation(len(x)))
    ours = inception_score(x[order.view(10, -1).T.flatten()])  # a part of the order a split
    assert ours.value == pytest.approx(theirs["inception_score_mean"], rel=1e-9)
    assert ours.parts["std"] == pytest.approx(theirs["inception_score_std"], rel=1e-7)


def test_is_its_definition_whole_and_split() -> None:
    x = logits()
    assert inception_score(x, splits=1).value == pytest.approx(by_definition(x), rel=1e-10)
    found = inception_score(x, splits=4)
    assert found.value == pytest.approx(
        np.mean([by_definition(x[i::4]) for i in range(4)]), rel=1e-10
    )
    assert found.parts["whole"] == pytest.approx(by_definition(x), rel=1e-10)
    assert found.protocol == {"splits": 4, "counts": [203]}


def test_extremes() -> None:
    sure = 1e4 * torch.eye(8)  # ln of probabilities that underflow to 0
    assert inception_score(sure, splits=1).value == pytest.approx(8)
    assert inception_score(torch.ones(6, 8), splits=2).value == pytest.approx(1)


def test_streams() -> None:
    x = logits()
    whole = ScoreStatistics.empty(30, 5).update(x)
    streamed = ScoreStatistics.empty(30, 5)
    for rows in x.split(17):
        streamed.update(rows)
    assert streamed.measurement().value == pytest.approx(whole.measurement().value, rel=1e-12)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="10 splits needs as many samples, got 9"):
        inception_score(logits(9))
    with pytest.raises(ValueError, match="finite"):
        inception_score(logits() / 0)
    with pytest.raises(ValueError, match="same width, got 30 and 29"):
        ScoreStatistics.empty(30).update(logits(classes=29))
    with pytest.raises(ValueError, match="splits >= 1, got 30 and 0"):
        ScoreStatistics.empty(30, 0)
    with pytest.raises(ValueError, match="weights='a' and 'b'"):
        found = ScoreStatistics.empty(30).update(FeatureSet(logits(), {"weights": "a"}))
        found.update(FeatureSet(logits(), {"weights": "b"}))
