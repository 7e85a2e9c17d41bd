"""When ``compiled="auto"`` compiles: once the seconds saved exceed the seconds it takes."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from specmm.choose.when_compiled import BUILD, LOAD, SHARE, TRIES, Seconds, Work
from specmm.programs import program_cache


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A folder of programs of our own."""
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path / "programs"))
    program_cache.said.clear()
    return tmp_path / "programs"


def test_nothing_is_compiled_before_anything_was_timed(kept):
    assert not Work.of("a").pays(10**6)


def test_a_long_call_pays_and_a_short_one_does_not(kept):
    work = Work.of("a")
    work.observe(1.0, 1, quick=False)
    few = BUILD / SHARE
    assert not work.pays(int(few) - 2)
    assert work.pays(int(few) + 1)


def test_what_was_missed_counts_until_it_has_reached_what_programs_take(kept):
    """As who rents until the rent has come to the price: at most twice the best in hindsight."""
    work = Work(Seconds(plain=2.0, quick=1.0, build=40.0, load=10.0))
    pictures = 0
    while not work.pays(1):
        work.observe(2.0, 1, quick=False)
        pictures += 1
    assert pictures == 10  # of a second each, with the one to come


def test_programs_that_save_nothing_are_not_used():
    work = Work(Seconds(plain=1.0, quick=1.2, build=40.0), ready=True, tried=TRIES)
    assert not work.pays(100)
    work.ready = False
    assert not work.pays(10**9)


def test_a_compiled_batch_beside_other_work_does_not_end_compiling():
    """Programs are judged by several batches, and again in the next process."""
    work = Work()
    work.observe(2.0, 1, quick=False)
    work.observe(60.0, 1, quick=True)
    for _ in range(TRIES - 1):
        work.observe(2.6, 1, quick=True)
        assert work.pays(1)
    work.observe(2.5, 1, quick=True)
    assert not work.pays(10**6)
    later = Work(work.seconds)
    assert not later.pays(1) and later.pays(10**6)
    later.observe(2000.0, 1000, quick=False)
    assert later.missed == pytest.approx(2000 * SHARE) and later.pays(1)
    later.observe(20.0, 1, quick=True)
    later.observe(1.0, 1, quick=True)
    assert later.pays(1) and Work(later.seconds).saved == 1.0


def test_the_next_process_knows_the_seconds(kept):
    first = Work.of("a")
    first.observe(2.0, 1, quick=False)
    first.observe(31.0, 1, quick=True)
    assert first.seconds.build == pytest.approx(31 - 2 * (1 - SHARE))
    first.observe(1.0, 1, quick=True)
    second = Work.of("a")
    assert second.seconds == first.seconds and not second.ready
    assert second.seconds.cost == pytest.approx(second.seconds.build * LOAD)
    second.observe(6.0, 1, quick=True)
    assert Work.of("a").seconds.load == 5.0 and Work.of("b").seconds == Seconds()


@pytest.mark.parametrize("text", ["", "[]", '{"plain": "x"}', '{"plain": [1]}', "{", "\0"])
def test_damaged_numbers_are_forgotten(kept, text):
    work = Work.of("a")
    work.observe(1.0, 1, quick=False)
    work.notes.file.write_text(text)
    again = Work.of("a")
    assert again.seconds == Seconds()
    again.observe(3.0, 1, quick=False)
    assert json.loads(work.notes.file.read_text())["plain"] == 3.0


def test_a_folder_that_cannot_be_made_is_one_warning(kept):
    kept.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="are not kept for later runs .*SPECMM_PROGRAMS") as said:
        work = Work.of("a")
        Work.of("b")
    assert len(said) == 1
    work.observe(1.0, 1, quick=False)
    assert work.seconds.plain == 1.0


LEAVING = """
import os
from specmm.programs import program_cache
program_cache.leave(OSError())
print(os.environ[program_cache.VARIABLE], os.path.isdir(os.environ[program_cache.VARIABLE]))
"""


@pytest.mark.slow
def test_the_folder_of_a_process_goes_with_it(tmp_path):
    """Also after an error that says nothing."""
    env = dict(os.environ) | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", LEAVING], env=env, capture_output=True, text=True, check=True
    )
    place, there = run.stdout.split()
    assert Path(place).parent == tmp_path and there == "True"
    assert not Path(place).exists() and "(OSError)" in run.stderr


def test_no_room_for_another_folder_ends_no_run(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    before = str(tmp_path / "as before")
    monkeypatch.setenv(program_cache.VARIABLE, before)
    program_cache.said.clear()
    with pytest.warns(UserWarning, match="disk is full"):
        program_cache.leave(OSError("disk is full"))
    assert os.environ[program_cache.VARIABLE] == before


def test_a_full_disk_is_one_warning(kept, monkeypatch):
    monkeypatch.setattr(program_cache, "ROOM", 2**62)
    with pytest.warns(UserWarning, match="MB left"):
        assert program_cache.folder() is None
