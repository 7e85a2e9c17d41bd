import multiprocessing
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from specmm.metrics.features import FeatureSet
from specmm.metrics.frechet import frechet_distance, memorisation_distance
from specmm.metrics.inception_score import ScoreStatistics, inception_score
from specmm.metrics.kernel import kernel_distance
from specmm.metrics.neighbours import density_coverage, precision_recall

pytest.importorskip("torchmetrics")

from specmm.metrics.modules import (
    DensityCoverage,
    FrechetDistance,
    InceptionScore,
    KernelDistance,
    MemorisationDistance,
    PrecisionRecall,
    SampleMetric,
)

WIDTH = 6
WHOLE_SETS = {"subsets": 1, "subset_size": 2}


def sets(n: int = 80, m: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, WIDTH, generator=generator), 0.9 * torch.rand(
        m, WIDTH, generator=generator
    ) + 0.1


def every() -> list[SampleMetric]:
    return [
        FrechetDistance(width=WIDTH),
        KernelDistance(kernel_options=WHOLE_SETS),
        PrecisionRecall(),
        DensityCoverage(),
        MemorisationDistance(),
        InceptionScore(classes=WIDTH, splits=2),
    ]


def expected() -> dict[str, float]:
    x, y = sets()
    found = [
        frechet_distance(x, y),
        kernel_distance(x, y, **WHOLE_SETS).measurement(),  # type: ignore[arg-type]
        *precision_recall(x, y),
        *density_coverage(x, y),
        memorisation_distance(x, y),
        inception_score(y, splits=2),
    ]
    return {m.metric: m.value for m in found}


def test_modules_are_the_core_in_batches() -> None:
    x, y = sets()
    for metric in every():
        for real, rows in ((True, x), (False, y)):
            for batch in rows.split(20):
                metric.update(batch, real=real)
        value = metric.compute()
        found = {m.metric: m.value for m in metric.measurements()}
        assert found == pytest.approx({k: expected()[k] for k in found}, rel=1e-9)
        assert (value if isinstance(value, dict) else {next(iter(found)): value}) == pytest.approx(
            found
        )


def take_half(rank: int, meeting: str, answers: Any) -> None:
    """One of two processes: a share of both sides, then the numbers of both together."""
    torch.set_num_threads(1)  # a forked process has no thread pool
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    found = {}
    for metric in every():
        for real, rows in zip((True, False), sets(), strict=True):
            metric.update(rows[:21] if rank == 0 else rows[21:], real=real)
        found |= {m.metric: m.value for m in metric.measurements()}
    answers.put(found)
    torch.distributed.destroy_process_group()


def test_two_processes_give_one_processs_numbers(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # spawning would import torch twice more
    answers = context.Queue()
    started = [
        context.Process(target=take_half, args=(r, str(tmp_path / "meeting"), answers))
        for r in range(2)
    ]
    for process in started:
        process.start()
    found = [answers.get(timeout=120) for _ in started]
    for process in started:
        process.join(timeout=120)
    alone = expected()
    score = ScoreStatistics.empty(WIDTH, 2).update(
        sets()[1][:21]
    )  # each process deals out its own samples
    alone["inception_score"] = (
        score.merge(ScoreStatistics.empty(WIDTH, 2).update(sets()[1][21:])).measurement().value
    )
    for of_one in found:
        assert of_one == pytest.approx(alone, rel=1e-9)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_real_features_can_be_kept() -> None:
    x, y = sets()
    kept: list[SampleMetric] = [FrechetDistance(width=WIDTH, reset_real_features=False)]
    kept.append(PrecisionRecall(reset_real_features=False))
    for metric in kept:
        metric.update(FeatureSet(x, {"weights": "a"}), real=True)
        metric.update(FeatureSet(y, {"weights": "a"}), real=False)
        first = metric.measurements()
        metric.reset()
        with pytest.raises(ValueError, match=r"at least 2 samples, got 0|got no made ones"):
            metric.compute()
        metric.update(FeatureSet(y, {"weights": "a"}), real=False)
        assert metric.measurements() == first
        with pytest.raises(ValueError, match="weights='a' and 'b'"):
            metric.update(FeatureSet(x, {"weights": "b"}), real=True)
    forgetful = FrechetDistance(width=WIDTH)
    forgetful.update(x, real=True)
    forgetful.reset()
    assert int(forgetful.real_count) == 0 and not forgetful.real_outer.any()


def test_precision_is_kept_whatever_the_dtype() -> None:
    x, y = sets()
    metric = FrechetDistance(width=WIDTH).set_dtype(torch.float16).half()
    metric.update(x, real=True)
    metric.update(y, real=False)
    assert metric.real_outer.dtype == torch.float64
    assert float(metric.compute()) == pytest.approx(expected()["fid"], rel=1e-9)


def test_pictures_go_through_the_extractor() -> None:
    class Means:
        protocol: ClassVar = {"features": "means"}

        def features(self, pictures: torch.Tensor) -> FeatureSet:
            return FeatureSet(pictures.double().mean((1, 2)) / 255, dict(self.protocol))

    pictures = torch.randint(
        0, 256, (40, 4, 4, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    metric = FrechetDistance(Means(), width=3)
    metric.update(pictures[:20], real=True)
    metric.update(pictures[20:], real=False)
    (found,) = metric.measurements()
    assert found.protocol["features"] == "means" and found.protocol["counts"] == [20, 20]


def test_real_samples_are_nothing_to_the_inception_score() -> None:
    x, y = sets()
    metric = InceptionScore(classes=WIDTH, splits=2)
    metric.update(x, real=True)
    metric.update(y)
    assert float(metric.compute()) == pytest.approx(expected()["inception_score"])


def test_bad_input() -> None:
    x, _ = sets()
    with pytest.raises(ValueError, match="same width, got 5 and 6"):
        FrechetDistance(width=5).update(x, real=True)
    with pytest.raises(ValueError, match="finite"):
        KernelDistance().update(x / 0, real=True)
    metric = KernelDistance()
    metric.update(x, real=True)
    with pytest.raises(ValueError, match="got no made ones; call update"):
        metric.compute()
