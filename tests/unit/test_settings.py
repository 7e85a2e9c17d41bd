"""Settings beside a model, and classes by name."""

from pathlib import Path

import pytest

from specmm.image_ar.calls import class_ids
from specmm.image_ar.files import read_settings, with_options, write_settings
from specmm.image_ar.tokens.pipeline import LlamaGenSettings

NAMES = ("heart", "face-smiling", "time")


def test_settings_survive_the_disk(tmp_path: Path) -> None:
    settings = LlamaGenSettings(
        1.5, 10, 0.9, 40, 0.95, NAMES, {"speculative": (3, 2)}, ((0.5, 0.2), (0.4, 0.1))
    )
    write_settings(settings, tmp_path)
    assert read_settings(LlamaGenSettings, tmp_path) == settings
    assert read_settings(LlamaGenSettings, tmp_path / "elsewhere") == LlamaGenSettings()


def test_options_that_are_none_keep_the_model_s() -> None:
    settings = with_options(LlamaGenSettings(cfg=2.0, top_k=40), cfg=None, top_k=0, temperature=0.5)
    assert (settings.cfg, settings.top_k, settings.temperature) == (2.0, 0, 0.5)


def test_classes_by_name_and_by_id() -> None:
    assert class_ids(["time", 0, "1"], NAMES, 3) == [2, 0, 1]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("hart", "did you mean 'heart'"), (3, "below 3, got 3"), ("-1", "unknown class '-1'")],
)
def test_unknown_classes(wanted: str | int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        class_ids([wanted], NAMES, 3)
