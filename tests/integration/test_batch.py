"""``specmm batch`` on a tiny random model: every item once, the same whatever the batch, and every
mistake named.
"""

import errno
import hashlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.soak.kills import campaign, items_of
from specmm.image_ar import records
from specmm.image_ar.records import picture_file, read_record
from specmm.image_ar.tokens import pipeline as llamagen
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.jobs import engines
from specmm.jobs import results as results_module
from specmm.jobs import run as loop
from specmm.jobs.answers import AnswerWorker
from specmm.jobs.engines import run_job
from specmm.jobs.folder import Job, Limits, Spec, occupied, prepare
from specmm.jobs.items import Item, read_items
from specmm.jobs.journal import Journal, pack, unpack
from specmm.jobs.progress import Metrics, Progress
from specmm.jobs.results import Result, save
from specmm.jobs.verify import verify
from specmm.jobs.workers import ImageWorker
from specmm.loading import hardware
from specmm.loading.extras import install
from specmm.programs.batch_invariant import batch_invariant
from specmm.runs.again import checked_record, draw_again
from tests.commands import as_json, refused, run, succeed

CLASSES = ("heart", "time", "2")
Saved = dict[str, bytes]


def jobs(folder: Path, count: int, **fields: Any) -> Path:
    file = folder / f"jobs-{count}.jsonl"
    rows = [{"id": f"set/{i}", "class": CLASSES[i % 3], **fields} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def results(folder: Path) -> Saved:
    return {f.name: f.read_bytes() for f in (folder / "results").rglob("*.*")}


def names(archive: Path) -> list[str]:
    with tarfile.open(archive) as found:
        return found.getnames()


@pytest.fixture(scope="session")
def worker(tiny: Path, make_tiny: Callable[..., LlamaGenPipeline]) -> ImageWorker:
    pipe = make_tiny(tokens=16)
    pipe.set_progress_bar_config(disable=True)
    return ImageWorker(Spec(str(tiny), "speculative", dtype="float32"), pipe=pipe)


@pytest.fixture
def make(worker: ImageWorker, tmp_path: Path) -> Callable[..., Progress]:
    """Runs items of a job with the tiny model, already loaded."""

    def call(
        items: Sequence[Item],
        name: str = "out",
        engine: str = "local",
        by: Any = worker,
        retry_failed: bool = False,
        **limits: Any,
    ) -> Progress:
        job = Job(tmp_path / name, worker.spec, Limits(**{"batch": 4, **limits}))
        given = dict(retry_failed=retry_failed, opener=lambda *_: by)
        return run_job(job, items, engine, **given)[1]

    return call


class Faulty:
    """The tiny model's worker, with a fault for some items."""

    def __init__(self, worker: ImageWorker, fault: Callable[[Sequence[Item]], None]) -> None:
        self.worker, self.fault, self.sizes = worker, fault, []
        self.check, self.key, self.turns = worker.check, worker.key, lambda item: 1
        self.network = worker.network

    def run(self, items: Sequence[Item], rows: int = 0) -> list[Result]:
        self.sizes.append(rows)
        self.fault(items[:rows])
        return self.worker.run(items, rows)


# ---- from the command line


def test_a_job_from_end_to_end(tiny, tmp_path):
    file, out = jobs(tmp_path, 5), tmp_path / "out"
    file.write_text(file.read_text() + '{"id": "bad", "class": "hart"}\n')
    words = f"batch {file} --model {tiny} --method speculative --out {out} --batch-size 3"
    common = words.split()
    result = run(*common, "--json", "--parquet", "--price", 36)
    assert result.exit_code == 1, "an item failed"
    found = json.loads(result.stdout)
    assert (found["items"], found["done"], found["failed"], found["done_now"]) == (6, 5, 1, 5)
    assert found["cost"] == pytest.approx(found["wall_seconds"] / 100)
    failed = json.loads((out / "failed.jsonl").read_text())
    assert failed["error"].startswith("unknown class") and "did you mean 'heart'" in failed["error"]
    index = [json.loads(line) for line in (out / "index.jsonl").read_text().splitlines()]
    assert [row["id"] for row in index] == [f"set/{i}" for i in range(5)]
    assert set(index[0]) >= {"seed", "method", "certificate", "stats", "file", "class"}
    told = read_record(out / index[0]["file"])
    assert told["id"] == "set/0" and told["seed"] == index[0]["seed"]
    assert told["certificate"]["kind"] == "exact"
    from pyarrow import parquet

    table = parquet.read_table(out / "index.parquet")
    assert table["id"].to_pylist() == [row["id"] for row in index]
    before = results(out)
    again = json.loads(run(*common, "--json").stdout)
    assert (again["done"], again["done_now"]) == (5, 0) and results(out) == before
    checked = succeed("batch", file, "--out", out, "--verify")
    assert "5 of 6 items done, 1 set aside, 0 left" in checked.stdout


def test_how_far_a_job_is(make, worker, tmp_path):
    """From its folder alone; the rate is that of the last results."""
    make([Item(f"set/{i}", "class", "heart", i) for i in range(3)])
    out = tmp_path / "out"
    prepare(out, worker.spec, items=9)
    found = as_json("batch", out, "--status")
    assert (found["items"], found["done"], found["failed"], found["left"]) == (9, 3, 0, 6)
    assert 0 <= found["seconds_since_last"] < 600 and found["workers"] == 1
    assert found["seconds_left"] == pytest.approx(6 / found["rate"]) and found["rate"] > 3 / 600
    shown = succeed("batch", "jobs.jsonl", "--out", out, "--status").stdout
    assert "3 of 9 items done, 0 set aside, 6 left" in shown and "lately by 1 worker," in shown
    assert "must be the output of specmm batch" in refused("batch", tmp_path, "--status")
    assert "give --out FOLDER" in refused("batch", "jobs.jsonl", "--model", "any")


def test_a_line_goes_before_the_job(worker, make, tmp_path):
    """A sweep in one job: each picture is what its line draws alone; what a model does not take is
    set aside.
    """
    sweep = [
        dict(guidance_scale=scale, temperature=heat, seed=seed)
        for scale in (1.0, 2.0, 2)  # the last two draw the same, and record what they were given
        for heat in (0.5, 1.0)
        for seed in (1, 2)
    ]
    wrong = [dict(num_iter=3), dict(height=999), dict(cfg=-1), dict(cfg=2.0, guidance_scale=2.0)]
    wrong.append(dict(temperature={"a": [1]}))
    rows = [{"class": "time", **options} for options in (*sweep, *wrong)]
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    counts = make(read_items(tmp_path / "jobs.jsonl"))
    assert counts.done == 12 and len(counts.failed) == 5
    said = (tmp_path / "out/failed.jsonl").read_text()
    for sentence in ("unknown argument 'num_iter'", "height must be", "cfg must be", "give cfg or"):
        assert sentence in said
    assert "temperature must be a number, got a dict" in said
    index = [json.loads(line) for line in (tmp_path / "out/index.jsonl").read_text().splitlines()]
    drawn = set()
    for row, options in zip(index, sweep, strict=True):
        with batch_invariant():
            one = worker.pipe(classes=["time"], method="speculative", **options)
        alone = one.images[0].tobytes()
        with Image.open(tmp_path / "out" / row["file"]) as found:
            assert found.tobytes() == alone
        assert repr(row["options"]["cfg"]) == repr(options["guidance_scale"])
        assert row["options"]["temperature"] == options["temperature"]
        drawn.add(alone)
    assert len(drawn) == 8


def test_items_of_a_batch_are_found_among_those_read_ahead(make, worker, tmp_path, monkeypatch):
    """Of a long job few are in memory; those of a method are made together wherever they stand, and
    what is written into JOBS meanwhile counts for the next run.
    """
    monkeypatch.setattr(loop, "AHEAD", 6)
    methods = "ar", "speculative"
    rows = [{"id": f"set/{i}", "class": "heart", "method": methods[i % 2]} for i in range(14)]
    file = tmp_path / "jobs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    made: list[list[str]] = []

    def noted(items: Sequence[Item]) -> None:
        made.append([item.id for item in items])
        file.write_text("no JSON")

    assert make(read_items(file), by=Faulty(worker, noted), batch=3).done == 14
    assert made[:2] == [["set/0", "set/2", "set/4"], ["set/1", "set/3", "set/5"]]
    assert sorted(one for some in made for one in some) == sorted(row["id"] for row in rows)


def test_what_the_index_records_draws_it_again(worker, make, tmp_path):
    """Whatever it was drawn beside: bytes of the file are the same."""
    items = read_items(jobs(tmp_path, 5))
    make(items, name="out", batch=4)
    make(items, name="one", batch=1)
    assert results(tmp_path / "out") == results(tmp_path / "one")
    names = ("model", "files", "dtype", "device", "threads", "versions", "batch_invariant")
    for line in (tmp_path / "out/index.jsonl").read_text().splitlines():
        row = json.loads(line)
        record = checked_record(tmp_path / "out" / row["file"])
        assert {name: row[name] for name in names} == {name: record[name] for name in names}
        assert row["seed"] == record["seed"]
        again = draw_again(record, worker.pipe)
        data = (tmp_path / "out" / row["file"]).read_bytes()
        assert picture_file(again, "png", record) == data


def test_a_job_keeps_its_dtype_and_versions(tiny, tmp_path, monkeypatch):
    file = jobs(tmp_path, 2)
    given = ["batch", file, "--model", tiny, "--out", tmp_path / "out"]
    succeed(*given)
    file.write_text(file.read_text() + '{"id": "more", "class": "heart"}\n')
    made = results(tmp_path / "out")
    monkeypatch.setattr(hardware, "choose_dtype", lambda *_, **__: torch.bfloat16)
    monkeypatch.setattr(llamagen, "choose_dtype", lambda *_, **__: torch.bfloat16)
    line = refused(*given)
    assert "was begun with dtype float32, got bfloat16: results of both would mix" in line
    assert results(tmp_path / "out") == made
    monkeypatch.undo()
    monkeypatch.setattr(records, "versions", lambda: {"torch": "1.13"})
    assert "was begun with versions {" in refused(*given)
    monkeypatch.undo()
    succeed(*given)
    told = json.loads((tmp_path / "out/run.json").read_text())
    assert told["dtype"] == "float32" and told["device"] == "cpu" and told["done"] == 3


@pytest.mark.parametrize(("kind", "suffix"), [("webp", ".webp"), ("jpeg", ".jpeg")])
def test_formats_carry_their_description(worker, tmp_path, kind, suffix):
    (item,) = read_items(jobs(tmp_path, 1))
    (tmp_path / "results").mkdir()
    (record,) = save(tmp_path, worker.run([item]), kind)
    assert record["file"].endswith(suffix)
    assert read_record(tmp_path / record["file"])["id"] == "set/0"


@pytest.mark.parametrize("layout", ["folders", "tar", "torn tar"])
def test_damaged_and_missing_results_are_made_again(tiny, tmp_path, layout):
    out, kind = tmp_path / "out", layout.split()[-1]
    words = f"batch {jobs(tmp_path, 4)} --model {tiny} --dtype float32 --out {out} --shard-size 2"
    common = (*words.split(), "--layout", kind)
    assert run(*common).exit_code == 0
    before = contents(out)
    spoil(out, layout)
    assert run("batch", jobs(tmp_path, 4), "--out", out, "--verify").exit_code == 1
    assert contents(out) != before
    refusal = refused("eval", "fid", out, out)
    assert "damaged or missing results, such as set/" in refusal and "--repair" in refusal
    assert as_json(*common)["done_now"] == 0, "a plain run trusts the journal"
    found = as_json(*common, "--repair")
    assert found["repaired"] == found["done_now"] >= 1 and found["repaired_otherwise"] == 0
    assert contents(out) == before
    assert run("batch", jobs(tmp_path, 4), "--out", out, "--verify").exit_code == 0
    assert "nothing was damaged or missing" in run(*common, "--repair").stdout


def contents(folder: Path) -> Saved:
    """The bytes of results and archives."""
    files = [f for place in ("results", "archives") for f in (folder / place).rglob("*.*")]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


def spoil(out: Path, layout: str) -> None:
    """Alter one result and remove another, in files or in archives."""
    if layout == "folders":
        first, second, *_ = sorted((out / "results").rglob("*.png"))
        first.write_bytes(first.read_bytes()[:-9] + b"other bits")
        second.unlink()
        return
    first, second = sorted((out / "archives").iterdir())
    if layout == "torn tar":
        first.write_bytes(first.read_bytes()[:1000])
        second.unlink()
        return
    data = bytearray(first.read_bytes())
    data[700] ^= 1
    first.write_bytes(bytes(data))


def test_a_repair_with_other_bytes_says_so(tiny, tmp_path):
    """As on a machine that rounds otherwise: here another dtype's pixels, under the first one's
    name.
    """
    out = tmp_path / "out"
    common = ("batch", jobs(tmp_path, 2), "--model", tiny, "--out", out)
    assert run(*common).exit_code == 0
    for file in (out / "journal").glob("*.log"):
        texts = map(unpack, file.read_bytes().splitlines(keepends=True))
        lines = [json.loads(text) for text in texts if text]
        file.write_bytes(b"".join(pack(line | {"sha256": "0" * 64}) for line in lines))
    told = "2 damaged or missing results made again, 2 of them with other bytes"
    said = run(*common, "--repair").stdout
    # another machine or version is refused before
    assert told in said and "rounded by what is made beside them" in said
    assert run("batch", jobs(tmp_path, 2), "--out", out, "--verify").exit_code == 0


def test_what_the_machine_lacks_is_said_before_any_work(tiny, tmp_path, monkeypatch):
    common = ("batch", jobs(tmp_path, 2), "--model", tiny, "--out", tmp_path / "out")
    if not torch.cuda.is_available():
        assert "device must be one of this machine's" in refused(*common, "--device", "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert install("batch") in refused(*common, "--parquet")
    assert not (tmp_path / "out" / "results").exists()


def test_archives_are_webdataset_and_read_by_eval(tiny, tmp_path):
    from specmm.metrics.inputs import open_pictures

    out = tmp_path / "out"
    common = f"--model {tiny} --out {out} --layout tar --shard-size 2 --batch-size 4".split()
    assert run("batch", jobs(tmp_path, 3), *common).exit_code == 0
    # the job has grown: a shard is made anew
    assert run("batch", jobs(tmp_path, 5), *common).exit_code == 0
    shards = sorted((out / "archives").iterdir())
    assert [len(names(s)) for s in shards] == [2, 2, 1]
    assert not results(out) and len(list(open_pictures(out))) == 5
    checked = succeed("batch", jobs(tmp_path, 5), "--out", out, "--verify")
    shards[0].write_bytes(shards[0].read_bytes()[:1000])
    checked = run("batch", jobs(tmp_path, 5), "--out", out, "--verify", "--json")
    assert checked.exit_code == 1 and len(json.loads(checked.stdout)["problems"]) >= 2


def test_mistakes_are_one_line(tiny, tmp_path):
    file, out = jobs(tmp_path, 2), tmp_path / "out"
    common = ("batch", file, "--model", tiny, "--out", out)
    assert "did you mean 'speculative'" in refused(*common, "--method", "speculativ")
    assert "did you mean 'local'" in refused(*common, "--engine", "loca")
    assert "did you mean 'webp'" in refused(*common, "--format", "wepb")
    assert "torchrun" in refused(*common, "--engine", "accelerate")
    assert "give --model" in refused("batch", file, "--out", out)
    assert "unknown option" in refused(*common, "--max-new-tokens", 4)
    assert "not there" in refused("batch", tmp_path / "no.jsonl", "--model", tiny, "--out", out)
    assert run(*common[:4], "--out", tmp_path / "made").exit_code == 0
    assert "seed 0 and not 1" in refused(*common[:4], "--out", tmp_path / "made", "--seed", 1)
    file.write_text('{"id": "set/0", "class": "time"}\n')
    assert "has changed" in refused(*common[:4], "--out", tmp_path / "made")


def test_a_model_whose_files_have_changed_is_refused(tiny, tmp_path):
    """Trained on overnight under its own name: half of the pictures would be another model's."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny, model)
    common = ("batch", "--model", model, "--dtype", "float32", "--out", out)
    assert run(*common, jobs(tmp_path, 1)).exit_code == 0
    (model / "new-drafter.json").write_text("{}")
    assert run(*common, jobs(tmp_path, 2)).exit_code == 0, "what came since is no matter"
    file = next((model / "transformer").glob("*.safetensors"))
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    message = refused(*common, jobs(tmp_path, 3))
    assert f"another transformer/{file.name} of {model}" in message and "choose another" in message
    assert "another" in refused(*common, jobs(tmp_path, 2), "--repair")
    assert run("batch", jobs(tmp_path, 2), "--out", out, "--verify").exit_code == 0
    file.write_bytes(before)
    assert run(*common, jobs(tmp_path, 3)).exit_code == 0


def test_a_corrected_line_is_tried_again(tiny, tmp_path):
    file, out = tmp_path / "jobs.jsonl", tmp_path / "out"
    common = ("batch", file, "--model", tiny, "--out", out)
    rows = [{"id": "a", "class": "haert"}, {"id": "b", "class": "nothing"}]
    for given, failed in ((rows, 2), (rows, 2), ([{"id": "a", "class": "heart"}, rows[1]], 1)):
        file.write_text("".join(json.dumps(row) + "\n" for row in given))
        assert run(*common).exit_code == 1
        assert json.loads((out / "run.json").read_text())["failed"] == failed
    (line,) = (out / "index.jsonl").read_text().splitlines()
    assert json.loads(line)["class"] == "heart"


def test_what_is_left_is_asked_once_nobody_else_works(worker, tmp_path, monkeypatch):
    """A second process that comes as the first one ends must not make everything again."""
    job, items = Job(tmp_path / "out", worker.spec, Limits(batch=2)), read_items(jobs(tmp_path, 2))
    first: list[Any] = []

    def held(journals: Path, rank: str) -> Any:
        if not first:  # the other process, while this one comes to the lock
            first.append(None)
            first.append(run_job(job, items, opener=lambda *_: worker)[1])
        return occupied(journals, rank)

    monkeypatch.setattr(engines, "occupied", held)
    assert run_job(job, items, opener=lambda *_: worker)[1].done == 0
    assert first[1].done == 2


def test_a_method_that_looks_at_the_clock_is_refused(make, tmp_path):
    make(read_items(jobs(tmp_path, 1, method="auto")))
    assert "measured seconds" in (tmp_path / "out/failed.jsonl").read_text()


# ---- the same whatever the batch, the order, the workers


@pytest.mark.slow
def test_bit_equal_across_batches_orders_workers_and_restarts(make, worker, tmp_path, monkeypatch):
    items = read_items(jobs(tmp_path, 9))
    for size in (1, 4, 16):
        make(items, f"b{size}", batch=size)
    make(items[:5], "restarted")
    make(list(reversed(items)), "restarted")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in ("2", "0", "1"):
        monkeypatch.setenv("RANK", rank)
        make(items, "ranks", "accelerate", batch=3)
    first = results(tmp_path / "b1")
    assert len(first) == 9
    assert all(results(tmp_path / name) == first for name in ("b4", "b16", "restarted", "ranks"))
    assert vars(verify(tmp_path / "ranks", items)) == {
        "items": 9, "done": 9, "failed": 0, "left": 0, "problems": []
    }  # fmt: skip


# ---- faults


def test_a_poisoned_item_is_set_aside_and_may_be_taken_up_again(make, worker, tmp_path):
    items = read_items(jobs(tmp_path, 6))

    def fault(batch: Sequence[Item]) -> None:
        if any(i.id == "set/3" for i in batch):
            raise RuntimeError("the model does not like three")

    counts = make(items, by=Faulty(worker, fault), retries=2)
    assert counts.done == 5 and counts.failed == ["set/3"]
    record = json.loads((tmp_path / "out/failed.jsonl").read_text())
    assert record["tries"] == 3
    assert record["error"] == "RuntimeError: the model does not like three"
    again = make(items)
    assert not again.done and not again.failed
    assert make(items, retry_failed=True).done == 1


@pytest.mark.slow
def test_memory_that_runs_out_halves_the_batch(make, worker, tmp_path):
    def fault(batch: Sequence[Item]) -> None:
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    faulty = Faulty(worker, fault)
    assert make(read_items(jobs(tmp_path, 12)), by=faulty, batch=8).done == 12
    assert faulty.sizes == [8, 4, 2, 2, 2, 2, 2]  # eight were asked for, then it knows


def test_ctrl_c_keeps_what_is_done(make, worker, tmp_path):
    calls = []

    def fault(batch: Sequence[Item]) -> None:
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt

    items = read_items(jobs(tmp_path, 6))
    counts = make(items, by=Faulty(worker, fault), batch=2)
    assert counts.interrupted and counts.done == 2
    assert make(items).done == 4 and verify(tmp_path / "out", items).done == 6


@pytest.mark.parametrize("when", range(1, 12))
def test_a_full_disk_loses_nothing(make, tmp_path, monkeypatch, when):
    """Every write and sync fails once, and the job goes on after it."""
    items, calls, sync = read_items(jobs(tmp_path, 4)), [], os.fsync

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == when:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        try:
            make(items, batch=2)
        except (ValueError, OSError) as error:
            assert "No space left" in str(error)
    make(items, batch=2)
    assert vars(verify(tmp_path / "out", items)) == {
        "items": 4, "done": 4, "failed": 0, "left": 0, "problems": []
    }  # fmt: skip


def test_files_of_a_batch_are_on_their_way_to_the_disk_together(tmp_path, monkeypatch):
    """One after the other, a million small pictures waited three hours for the disk alone."""
    slow = 0.05
    monkeypatch.setattr(os, "fsync", lambda handle: time.sleep(slow))
    facts = {"method": "ar", "certificate": {"kind": "exact"}}
    found = [
        Result(item, facts, image=Image.new("RGB", (8, 8)))
        for item in read_items(jobs(tmp_path, 16))
    ]
    (tmp_path / "results").mkdir()
    start = time.perf_counter()
    records = save(tmp_path, found, "png")
    assert time.perf_counter() - start < 16 * slow
    assert [record["id"] for record in records] == [result.item.id for result in found]
    for record in records:
        data = (tmp_path / record["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == record["sha256"]


def test_folders_are_on_the_disk_before_the_records(make, tmp_path, monkeypatch):
    """Names of files, too, or a crash of the machine keeps a record without its file."""
    told: list[str] = []
    sync, append = results_module.sync_folder, Journal.append

    def synced(folder: Path) -> None:
        told.append(folder.name)
        sync(folder)

    def appended(self: Journal, records: Sequence[Any]) -> None:
        told.append("journal")
        append(self, records)

    monkeypatch.setattr(results_module, "sync_folder", synced)
    monkeypatch.setattr(Journal, "append", appended)
    make(read_items(jobs(tmp_path, 4)))
    folders = {file.parent.name for file in (tmp_path / "out/results").rglob("*.png")}
    assert told[-1] == "journal" and set(told[:-1]) == {*folders, "results"}


def without_room(work: Callable[[], object], answers: SimpleQueue[str]) -> None:
    """In a child process."""
    torch.set_num_threads(1)  # a forked process has no thread pool
    sys.stdout = sys.stderr = io.StringIO()  # pytest keeps what is said in a file, too
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        work()
        answers.put("no error")
    except ValueError as error:
        answers.put(str(error))


def test_a_file_limit_is_a_clear_error(make, worker, tmp_path):
    """A real limit of the system, in a process of its own: no file may grow beyond a few bytes."""
    items, context = read_items(jobs(tmp_path, 2)), multiprocessing.get_context("fork")
    answers: SimpleQueue[str] = context.SimpleQueue()
    limit = Faulty(worker, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700)))
    child = context.Process(target=without_room, args=(lambda: make(items, by=limit), answers))
    child.start()
    child.join()
    assert child.exitcode == 0
    line = answers.get()
    assert "File too large" in line and "run the same command again" in line
    make(items)
    assert vars(verify(tmp_path / "out", items))["done"] == 2


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(worker):
    """A handful; benchmarks/soak/kills.py does sixty of each layout."""
    assert campaign(worker, 5, items_of(4))["kills"] >= 5


def test_metrics_are_served_while_it_works(tmp_path):
    metrics = Metrics(0)
    with Progress(3, 0, metrics) as bar:
        bar.observe(2, ["c"], 0.5)
        text = urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics").read().decode()
    assert "specmm_items_done_total 2.0" in text and "specmm_items_failed_total 1.0" in text
    assert threading.active_count() < 50


# ---- answers


@pytest.mark.slow
def test_answers_are_bit_equal_and_read_by_eval(tmp_path):
    Image.new("RGB", (96, 96), "red").save(tmp_path / "red.png")
    rows = [
        {"id": str(i), "image": "red.png", "question": q}
        for i, q in enumerate(("What is it?", "How many?") * 2)
    ]
    rows.append({"id": "missing", "image": "no.png", "question": "What is it?"})
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = read_items(file)
    spec = Spec("pocket/llava", sampling={"max_new_tokens": 8}, dtype="float32")
    worker = AnswerWorker(spec, questions=True)
    for size in (1, 4):
        job = Job(tmp_path / str(size), spec, Limits(size))
        run_job(job, items, opener=lambda *_: worker)
    assert results(tmp_path / "1") == results(tmp_path / "4") and len(results(tmp_path / "1")) == 4
    assert "no.png" in (tmp_path / "1/failed.jsonl").read_text()
    index = [json.loads(line) for line in (tmp_path / "4/index.jsonl").read_text().splitlines()]
    truth = tmp_path / "truth.jsonl"
    truth.write_text(
        "".join(json.dumps({"id": row["id"], "answer": row["answer"]}) + "\n" for row in index)
    )
    scored = succeed(
        "eval", "vqa", tmp_path / "4/index.jsonl", "--answers", truth, "--metric", "exact", "--json"
    )
    assert json.loads(scored.stdout)["value"] == 1


@pytest.mark.slow
def test_a_picture_that_was_exchanged_since_is_told(tmp_path):
    """It is not repaired into another answer, after which every file would be called whole."""
    for name in ("a.png", "b.png"):
        Image.new("RGB", (96, 96), "red").save(tmp_path / name)
    rows = [{"image": name, "question": "What is it?"} for name in ("a.png", "b.png")]
    file, out = tmp_path / "jobs.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["batch", file, "--model", "pocket/llava", "--max-new-tokens", 4, "--out", out]
    succeed(*given)
    assert run("batch", file, "--out", out, "--verify").exit_code == 0
    before = results(out)
    Image.new("RGB", (96, 96), "blue").save(tmp_path / "b.png")
    checked = run("batch", file, "--out", out, "--verify")
    assert (
        checked.exit_code == 1 and "000001: its b.png is another file than it was" in checked.output
    )
    (answer,) = (out / "results").rglob("000001-*.json")
    answer.unlink()
    line = refused(*given, "--repair")
    assert "item '000001' cannot be made again: its b.png is another file than it was" in line
    Image.new("RGB", (96, 96), "red").save(tmp_path / "b.png")
    assert (
        "1 damaged or missing results made again, bit for bit" in succeed(*given, "--repair").stdout
    )
    assert results(out) == before


def test_an_address_is_no_folder(tiny, tmp_path, monkeypatch):
    """A local folder "s3:" would look like success."""
    monkeypatch.chdir(tmp_path)
    line = refused("generate", tiny, "--class", "heart", "--out", "s3://bucket/job")
    assert "--out must be a folder of this machine, got the address s3:/bucket/job" in line
    assert not list(tmp_path.iterdir())
