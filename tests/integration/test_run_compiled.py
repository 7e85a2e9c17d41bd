"""Runs that compile once it pays: the pictures still to come are counted while a run lasts."""

import json

import pytest

from specmm import methods
from specmm.choose import when_compiled
from specmm.runs import run as runs
from tests.integration.conftest import tiny_pipeline


@pytest.mark.slow
def test_run_json_says_which_pictures_were_compiled(traced, tmp_path, monkeypatch):
    """Of five in batches of two: not the first batch, which is timed, nor the smaller last one."""
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path / "programs"))
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    pipe = tiny_pipeline(tokens=16)

    def drawn(compiled):
        rest = (0, {}, 2, tmp_path, compiled)
        run = runs.PictureRun("tiny", methods.AR(), "classes", ["heart"] * 5, *rest)
        runs.draw(pipe, run, print)
        run.save()
        found = json.loads((tmp_path / "run.json").read_text())
        assert found["compiled"] == compiled and len(found["outputs"]) == 5
        return found["compiled_pictures"]

    assert drawn("auto") == [False, False, True, True, False]
    assert drawn("auto") == drawn(True) == [True] * 4 + [False]
    assert drawn(False) == [False] * 5


class Stopped(Exception):
    """What ends a run."""


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, Stopped])
def test_pictures_to_come_are_those_of_full_batches(error, tmp_path, monkeypatch):
    """Three of seven in batches of two; after the run, however it ends, none."""
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path / "programs"))
    pipe = tiny_pipeline(tokens=16)
    seen = []

    def watched(pipe, step, done, state):
        seen.append(pipe.works.coming)
        if error is not None:
            raise error
        return state

    names = ["heart"] * 7
    rest = (0, {}, 2, tmp_path, "auto")
    run = runs.PictureRun("tiny", methods.AR(), "classes", names, *rest)
    if error is Stopped:
        with pytest.raises(Stopped):
            runs.draw(pipe, run, print, watched)
    else:
        runs.draw(pipe, run, print, watched)
    expected = {4, 2, 0} if error is None else {4}
    assert set(seen) == expected and pipe.works.coming == 0
