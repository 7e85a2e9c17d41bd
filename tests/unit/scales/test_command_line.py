"""``specmm plan``, ``generate`` and ``bench`` of next-scale models."""

import pytest
import torch

from specmm.choose.contest import Measured
from specmm.core.watching import watched
from specmm.image_ar.scales import var
from specmm.image_ar.scales.tuning import CALIBRATION, DEPTHS, plan_of_sizes
from tests.commands import as_json, refused, succeed


def test_plan_on_the_command_line(pipe, tmp_path):
    pipe.save_pretrained(tmp_path / "model")
    found = as_json(f"plan {tmp_path}/model --batch 2 --dtype float32")
    scales = len(pipe.transformer.config.schedule)
    assert [row["n"] for row in found["by_n"]] == list(range(scales + 1))
    assert found["choice"] in range(scales + 1)
    assert all(row["seconds"] > 0 for row in found["by_n"])
    assert "choice" in succeed(f"plan {tmp_path}/model --dtype float32").stdout


def test_published_sizes_are_planned_without_weights(monkeypatch):
    # as if small ones had been published
    monkeypatch.setattr(var, "PUBLISHED_DEPTHS", {256: (1, 2)})
    found = as_json("plan d2,d1 --batch 2 --dtype float32")
    seconds = [row["seconds"] for row in found["by_n"]]
    assert len(seconds) == 11 and 0 < seconds[0] < seconds[-1], "deeper, wider and slower"
    assert "VAR-d2 and VAR-d1 at 256 px" in found["model"]


@pytest.mark.parametrize(
    ("pair", "resolution", "message"),
    [
        ("d999,d1", 256, "sizes are d16, d20, d24, d30 at 256; d36 at 512, got d999 at 256"),
        ("d17,d16", 256, "got d17 at 256"),
        ("d16,d30", 256, "the larger model comes first, got d16,d30; give d30,d16"),
        ("d30,d16", 300, "got d30 at 300"),
    ],
)
def test_sizes_nobody_published_are_refused(pair, resolution, message):
    assert message in refused("plan", pair, "--resolution", resolution)


def test_a_run_tells_what_it_left_to_the_machine(pipe, tmp_path):
    pipe.save_pretrained(tmp_path / "model")
    words = f"generate {tmp_path}/model --class class3 -n 3 --batch-size 2 --seed 1 --method code"
    found = as_json(words, "--out", tmp_path / "out")
    assert found["ran"].startswith("code(n=") and "expected" in found["reason"]
    assert found["method"] == "code"
    assert "give --batch-size 3, got 2" in refused(words, "-o", "n=2", "-o", "release=true")


def test_bench_on_the_command_line(pipe, tmp_path):
    pipe.save_pretrained(tmp_path / "model")
    rows = as_json(f"bench {tmp_path}/model --methods 'code(n=2)' -n 1 --dtype float32")
    assert [r["label"] for r in rows] == ["ar", "code(n=2)"]
    assert all(r["quality"]["log_likelihood"] < 0 and r["ideal"] > 0 for r in rows)


def test_a_plan_of_sizes_tells_of_every_run_that_it_measures(pipe):
    told = []
    sizes = pipe.transformer.config, pipe.small.config
    with watched(told.append):
        made = plan_of_sizes(*sizes, 1, pipe.target(), torch.float32)
    told = [event for event in told if isinstance(event, Measured)]
    total = len(DEPTHS) * CALIBRATION
    assert told == [Measured(i + 1, total) for i in range(total)] and made.forecasts
