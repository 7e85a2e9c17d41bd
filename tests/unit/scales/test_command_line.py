"""``specmm plan``, ``generate`` and ``bench`` of next-scale models."""

from specmm.choose.contest import Measured
from specmm.core.watching import watched
from specmm.image_ar.scales.tuning import CALIBRATION
from tests.commands import as_json, refused, succeed


def test_plan_on_the_command_line(pipe, tmp_path):
    pipe.save_pretrained(tmp_path / "model")
    found = as_json(f"plan {tmp_path}/model --batch 2 --dtype float32")
    scales = len(pipe.transformer.config.schedule)
    assert [row["n"] for row in found["by_n"]] == list(range(scales + 1))
    assert found["choice"] in range(scales + 1)
    assert all(row["seconds"] > 0 for row in found["by_n"])
    assert "choice" in succeed(f"plan {tmp_path}/model --dtype float32").stdout


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


def test_a_plan_tells_of_every_run_that_it_measures(pipe):
    told = []
    with watched(told.append):
        pipe.plan(1, pipe.target())
    told = [event for event in told if isinstance(event, Measured)]
    assert told == [Measured(i + 1, CALIBRATION) for i in range(CALIBRATION)]
