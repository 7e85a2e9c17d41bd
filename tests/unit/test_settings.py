"""Settings beside a model, classes by name, and one generator a picture."""

from pathlib import Path

import pytest
import torch

from specmm.image_ar.settings import Settings, class_ids, sample_generators

NAMES = ("heart", "face-smiling", "time")
CPU = torch.device("cpu")


def test_settings_survive_the_disk(tmp_path: Path) -> None:
    settings = Settings(1.5, 10, 0.9, 40, 0.95, NAMES, {"speculative": (3, 2)}, ((0.5, 0.2), (0.4, 0.1)))
    settings.write(tmp_path)
    assert Settings.read(tmp_path) == settings
    assert Settings.read(tmp_path / "elsewhere") == Settings()


def test_options_that_are_none_keep_the_model_s() -> None:
    settings = Settings(cfg=2.0, top_k=40).with_options(cfg=None, top_k=0, temperature=0.5)
    assert (settings.cfg, settings.top_k, settings.temperature) == (2.0, 0, 0.5)


def test_classes_by_name_and_by_id() -> None:
    assert class_ids(["time", 0, "1"], NAMES, 3) == [2, 0, 1]


@pytest.mark.parametrize(
    ("wanted", "message"), [("hart", "did you mean 'heart'"), (3, "below 3, got 3"), ("-1", "unknown class '-1'")]
)
def test_unknown_classes(wanted: str | int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        class_ids([wanted], NAMES, 3)


def test_one_generator_a_picture() -> None:
    first, again = (sample_generators(torch.Generator().manual_seed(0), 3, CPU) for _ in range(2))
    draws = [torch.rand(4, generator=g) for g in first]
    assert all(torch.equal(d, torch.rand(4, generator=g)) for d, g in zip(draws, again, strict=True))
    assert len({tuple(d.tolist()) for d in draws}) == 3
    longer = sample_generators(torch.Generator().manual_seed(0), 5, CPU)
    assert torch.equal(draws[2], torch.rand(4, generator=longer[2]))


def test_generators_given_are_those_used() -> None:
    given = [torch.Generator().manual_seed(i) for i in range(2)]
    assert sample_generators(given, 2, CPU) == given
    with pytest.raises(ValueError, match="each of the 3 pictures, got 2"):
        sample_generators(given, 3, CPU)


def test_without_a_generator_runs_differ() -> None:
    one, two = (sample_generators(None, 1, CPU)[0].initial_seed() for _ in range(2))
    assert one != two
