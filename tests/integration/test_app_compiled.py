"""Races of pictures in the app: compiled once that pays for both methods, outside the clock."""

import pytest

from specmm.app import compiling
from specmm.app.models import AppModels
from specmm.app.pictures import drawn
from specmm.choose import when_compiled


@pytest.fixture
def models(tiny, traced, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path))
    return AppModels(only=(str(tiny),))


def raced(models, first, second, *texts):
    """The lines below both pictures at the end of a race."""
    (model,) = models.names["images"]
    *_, shown = drawn(models, model, "heart", "", first, second, 3, *texts)
    return shown[2], shown[6]


def works(models):
    """What is known of each side's kinds of work, in the order in which they came."""
    (model,) = models.names["images"]
    pipes = models.get("images", model), models.twin(model)
    return [[*pipe.works.all.values()] for pipe in pipes]


@pytest.mark.slow
def test_a_session_is_compiled_once_that_pays_for_both(models, monkeypatch):
    built = []
    finish = compiling.finish
    monkeypatch.setattr(compiling, "finish", lambda lane: built.append(lane) or finish(lane))
    assert not any("compiled" in line for line in raced(models, "ar", "speculative"))
    sides = works(models)
    assert all(side[0].seconds.plain and not side[0].ready for side in sides)
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    assert all("compiled" in line for line in raced(models, "ar", "speculative"))
    assert len(built) == 2, "before the race, outside the clocks"
    for [work] in sides:
        assert work.ready and work.seconds.build is not None
        assert work.seconds.quick and work.tried == 1
    assert all("compiled" in line for line in raced(models, "ar", "speculative"))
    assert len(built) == 2 and all(work.tried == 2 for [work] in sides)


@pytest.mark.slow
def test_what_the_page_changes_is_other_work(models, monkeypatch):
    raced(models, "ar", "sjd")
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    (model,) = models.names["images"]
    names = [*models.parameters("images", model)]
    texts = ["0.5" if name == "temperature" else "" for name in names]
    assert not any("compiled" in line for line in raced(models, "ar", "sjd", *texts))
    assert all("compiled" in line for line in raced(models, "ar", "sjd", *texts))
    assert [len(side) for side in works(models)] == [2, 2]
