"""``specmm batch --compiled``: a picture's bytes do not depend on its batch, on the order or on a
restart, for all pictures of a method are compiled, by programs of one number of rows, or none.
"""

import dataclasses
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import specmm
from specmm import methods
from specmm.choose import when_compiled
from specmm.image_ar.records import read_record
from specmm.image_ar.tokens import running as tokens_running
from specmm.image_ar.tokens.target import Prompt
from specmm.jobs.engines import run_job
from specmm.jobs.folder import JOB, Job, Limits, Spec, prepare
from specmm.jobs.items import Item, seed_of
from specmm.jobs.programs import Programs
from specmm.jobs.progress import Progress
from specmm.jobs.workers import ImageWorker
from specmm.programs.batch_invariant import batch_invariant
from specmm.programs.compiled import UNCOMPILED
from tests.integration.conftest import tiny_pipeline
from tests.integration.test_batch import refused, results

CLASSES = ("heart", "time", "2")
SHARED = os.environ["SPECMM_PROGRAMS"]  # where the compiler keeps headers that it has read


def items_of(count: int) -> list[Item]:
    return [Item(f"c/{i}", "class", CLASSES[i % 3], seed_of(f"c/{i}", 0)) for i in range(count)]


@pytest.fixture
def made(tiny, monkeypatch, tmp_path):
    """Works on a job of a pipeline that is loaded; programs and their seconds are its own."""
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path / "programs"))
    pipe = tiny_pipeline(tokens=16)
    pipe.set_progress_bar_config(disable=True)

    def work(
        items: Sequence[Item], name: str, compiled: Any, method: str = "ar", batch: int = 3
    ) -> Progress:
        spec = Spec(str(tiny), method, dtype="float32", compiled=compiled)

        def opener(job: Job) -> ImageWorker:
            return ImageWorker(spec, pipe=pipe, programs=Programs(job))

        job = Job(tmp_path / name, spec, Limits(batch))
        work.summary, progress = run_job(job, items, opener=opener)
        return progress

    turn, work.rows = pipe.turn, []

    def watched(compiled: Any, target: Any, method: Any, batch: int) -> Any:
        work.rows.append(batch)
        return turn(compiled, target, method, batch)

    monkeypatch.setattr(pipe, "turn", watched)
    work.pipe, work.place = pipe, tmp_path
    return work


def decided(folder: Path) -> dict[str, int]:
    return json.loads((folder / JOB).read_text())["rows"]


def check_equal(made: Any, method: str) -> None:
    """Whole, in parts, in another order and with another batch size after a break."""
    items = items_of(7)
    made(items, "whole", True, method)
    whole = results(made.place / "whole")
    made(items[4:], "parts", True, method)
    made(items[::-1], "parts", True, method, 2)
    assert results(made.place / "parts") == whole and len(whole) == 7
    made(items[4:], "larger", True, method)
    made(items[::-1], "larger", True, method, 8)
    assert results(made.place / "larger") == whole
    assert decided(made.place / "parts") == {method: 3} and made.rows.count(3) == len(made.rows)
    told = [read_record(f) for f in (made.place / "whole" / "results").rglob("*.png")]
    assert all(each["compiled"] for each in told)
    index = (made.place / "whole" / "index.jsonl").read_text().splitlines()
    assert all(json.loads(line)["compiled"] for line in index)
    # the prefill's too
    assert {json.loads(line)["stats"]["tokens"] for line in index} == {16}
    assert made.summary["compiled_items"] == 7


@pytest.mark.parametrize("method", ["ar", "speculative"])
@pytest.mark.slow
def test_compiled_pictures_do_not_depend_on_their_batch(made, traced, method, monkeypatch):
    """No row is refilled: its first round would be a program's."""
    queues = []
    monkeypatch.setattr(tokens_running, "Queue", lambda *given: queues.append(given))
    check_equal(made, method)
    assert not queues


@pytest.mark.slow
def test_pictures_of_real_programs_do_not_depend_on_their_batch(made, monkeypatch):
    """By PyTorch's compiler, whose sums are in an order of their own."""
    monkeypatch.setenv("SPECMM_PROGRAMS", SHARED)
    check_equal(made, "ar")


@pytest.mark.slow
def test_pictures_of_mar_do_not_depend_on_their_batch(tmp_path, traced):
    """In the order of the job and the other way round, two at a time."""
    spec = Spec("pocket/mar", "ar", dtype="float32", compiled=True)
    job = Job(tmp_path, spec, Limits(2))
    prepare(tmp_path, spec)
    worker = ImageWorker(spec, "cpu", programs=Programs(job))
    worker.pipe.settings = dataclasses.replace(worker.pipe.settings, head_steps="ddim12")
    names = ("heart", "face-smiling", "time")
    items = [Item(str(i), "class", name, i) for i, name in enumerate(names)]
    first, other = (worker.run(some[:2]) + worker.run(some[2:]) for some in (items, items[::-1]))
    for one, two in zip(first, other[::-1], strict=True):
        assert one.record["compiled"] and one.image.tobytes() == two.image.tobytes()


@pytest.mark.slow
@torch.inference_mode()
def test_rows_of_a_program_do_not_depend_on_their_place_or_neighbours():
    """To the last bit of their distributions, which tokens hide, in layers of a real size."""
    pipe = specmm.ImagePipeline.from_pretrained("pocket/llamagen", dtype="float32", device="cpu")
    pipe.transformer.layers = pipe.transformer.layers[:2]
    torch.set_num_threads(2)
    target = pipe.turn(True, pipe.target(), methods.AR(), 4).chosen
    tokens = torch.randint(pipe.transformer.config.vocab_size, (8, 6))

    def probs(order: list[int]) -> dict[int, torch.Tensor]:
        with batch_invariant():
            target.prefill(Prompt(torch.tensor(order)), 1)
            steps = [target.step(step).probs for step in tokens[order].T]
        return dict(zip(order, torch.cat(steps, 1), strict=True))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", UNCOMPILED)
        first = probs([0, 1, 2, 3])
        for order in ([3, 2, 1, 0], [1, 2, 3, 0], [7, 5, 0, 4], [2, 2, 2, 2]):
            for row, found in probs(order).items():
                assert row not in first or torch.equal(found, first[row])
    assert len({float(found.sum(0)[:9].sum()) for found in first.values()}) == 4


@pytest.mark.slow
def test_auto_decides_once_before_the_first_picture(made, traced, monkeypatch):
    """On seconds of a batch that is thrown away; a job that is resumed does as it was decided."""
    items = items_of(5)
    made(items, "plain", False)
    made(items, "compiled", True)
    plain, compiled = (results(made.place / name) for name in ("plain", "compiled"))
    assert plain != compiled, "what is compiled says so"
    made.pipe.works.clear()
    made(items[:1], "short", "auto")
    assert decided(made.place / "short") == {"ar": 0} and made.summary["compiled_items"] == 0
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    for file in (made.place / "programs").rglob("seconds/*.json"):
        file.unlink()
    made.pipe.works.clear()
    made(items, "short", "auto")
    assert results(made.place / "short") == plain, "as was decided when it did not pay"
    made(items[:2], "long", "auto")
    assert decided(made.place / "long") == {"ar": 3}
    monkeypatch.setattr(when_compiled, "BUILD", 1e9)
    made.pipe.works.clear()
    made(items, "long", "auto")
    assert results(made.place / "long") == compiled


def test_a_process_that_decided_first_counts(tmp_path):
    """While this one was still timing a batch."""
    job = Job(tmp_path, Spec("tiny", compiled="auto"), Limits(2))
    prepare(tmp_path, job.spec)

    def pays() -> bool:
        assert Programs(job).rows("ar", lambda: False) == 0
        return True

    assert Programs(job).rows("ar", pays) == 0 and decided(tmp_path) == {"ar": 0}
    assert Programs(job).rows("sjd", lambda: True) == 2
    assert decided(tmp_path) == {"ar": 0, "sjd": 2}


@pytest.mark.slow
def test_methods_of_lines_are_decided_by_themselves(made, traced, monkeypatch):
    """One that has no programs is drawn without."""
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    monkeypatch.setattr(methods.SJD, "static_shapes", False)
    items = [*items_of(2), Item("z", "class", "heart", 3, method="sjd")]
    assert made(items, "out", "auto").done and made.summary["compiled_items"] == 2
    assert decided(made.place / "out") == {"ar": 3, "sjd": 0}


@pytest.mark.filterwarnings("ignore:compiled programs are not kept")
def test_programs_that_cannot_be_built_fail_their_items(made, unbuilt):
    """What would be drawn without them would differ from the other pictures."""
    counts = made(items_of(2), "out", True)
    assert counts.failed and not counts.done
    assert "runs uncompiled" in (made.place / "out" / "failed.jsonl").read_text()


@pytest.mark.slow
def test_another_job(made, traced, tmp_path):
    made(items_of(2), "out", True)
    with pytest.raises(ValueError, match="holds a job with compiled True and not False"):
        made(items_of(3), "out", False)
    spec = Spec("tiny", compiled=True)
    prepare(tmp_path / "new", spec)
    assert Programs(Job(tmp_path / "new", spec)).rows("ar", lambda: False) == 0
    prepare(tmp_path / "new", spec)
    assert decided(tmp_path / "new") == {"ar": 0}
    prepare(tmp_path / "new", Spec("tiny", "sjd", compiled=True))
    found = json.loads((tmp_path / "new" / JOB).read_text())
    assert "rows" not in found, "decided for another job, which made nothing"


def test_what_cannot_be_compiled_is_refused(tiny, tmp_path):
    file = tmp_path / "jobs.jsonl"

    def said(line: str, *words: object) -> str:
        file.write_text(line)
        return refused("batch", file, "--out", tmp_path / "out", *words)

    drawn = '{"id": "a", "class": "heart"}'
    text = said('{"id": "a", "prompt": "heart"}', "--model", "pocket/coder", "--compiled", "auto")
    assert "--compiled serves jobs of classes, got a prompt" in text
    release = ("--method", "cspd", "-o", "variant=release", "--compiled", "true")
    assert "compiled=True of MAR needs" in said(drawn, "--model", "pocket/mar", *release)
    lookup = ("--method", "draft", "-o", "drafter=prompt-lookup", "--compiled", "true")
    assert "compiled=True needs" in said(drawn, "--model", tiny, *lookup)
    assert "must be true, false or auto" in said(drawn, "--model", tiny, "--compiled", "yes")
