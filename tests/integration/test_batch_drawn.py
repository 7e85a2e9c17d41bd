"""``specmm batch`` of answers with pictures, by a tiny Chameleon: every answer once with all its
pictures, the same whatever the batch, after a kill and after a repair.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import specmm
from benchmarks.soak.kills import campaign
from specmm.image_ar.records import read_record
from specmm.jobs.answers import AnswerWorker
from specmm.jobs.folder import Spec
from specmm.jobs.items import read_items
from specmm.jobs.results import files_of, save
from specmm.programs.batch_invariant import batch_invariant
from tests.integration.test_batch import refused, run
from tests.noisy import noisy
from tests.tiny import chameleon

COUNT = 70
ASKED = ["blue tree", "tree on a hill", "a red barn"]
WARM = ("--temperature", 1.0, "--max-new-tokens", COUNT, "--dtype", "float32")


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def files(out: Path) -> dict[str, bytes]:
    found = [f for place in ("results", "archives") for f in (out / place).rglob("*.*")]
    return {f.name: f.read_bytes() for f in found}


def rows(count: int) -> list[dict[str, Any]]:
    """Some that draw, one of them shown a picture, and one that may not draw."""
    made: list[dict[str, Any]] = [
        {"id": f"set/{i}", "question": ASKED[i % 3], "draw": True} for i in range(count - 3)
    ]
    made.append({"id": "shown", "question": ASKED[0], "image": "seen.png", "draw": True})
    other = {"question": ASKED[0], "method": "prompt-lookup"}
    return [*made, {"id": "drawn", **other, "draw": True}, {"id": "words", **other}]


def job_file(place: Path, made: list[dict[str, Any]]) -> Path:
    noisy((16, 16), 60).save(place / "seen.png")
    file = place / "jobs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("anole")
    chameleon.save_writer(place)
    return place


@pytest.fixture(scope="module")
def pipe(folder: Path) -> specmm.VQAPipeline:
    return specmm.VQAPipeline.from_pretrained(folder, torch_dtype=torch.float32)


@pytest.mark.parametrize("method", ["sjd", "ar"])
@pytest.mark.slow
def test_a_job_with_pictures_from_end_to_end(folder, pipe, method, tmp_path):
    """What a call of its own draws for each item, in batches of one and of three."""
    common = ("batch", job_file(tmp_path, rows(7)), "--model", folder, "--method", method, *WARM)
    for size in (1, 3):
        done = run(*common, "--out", tmp_path / str(size), "--batch-size", size, "--parquet")
        assert done.exit_code == 0, done.output
    out = tmp_path / "3"
    assert files(tmp_path / "1") == files(out)
    index = {row["id"]: row for row in lines(out / "index.jsonl")}
    assert len(index) == 7 and "pictures" not in index["words"]
    drawn = 0
    for item in read_items(tmp_path / "jobs.jsonl"):
        chosen = item.method or method
        given = dict(seed=[item.seed], method=chosen, temperature=1.0, max_new_tokens=COUNT)
        with batch_invariant():
            own = pipe([item.pictures], [item.text], draw=bool(item.draw), **given)
        row = index[item.id]
        saved = json.loads((out / row["file"]).read_text())
        assert saved["answer"] == row["answer"] == own.answers[0]
        shown = own.pictures[0] if item.draw else []
        assert len(shown) == row["answer"].count("<image>") == len(row.get("pictures", ()))
        assert saved.get("pictures", []) == [Path(p["file"]).name for p in row.get("pictures", ())]
        for number, (picture, found) in enumerate(zip(shown, row.get("pictures", ()), strict=True)):
            with Image.open(out / found["file"]) as image:
                assert image.tobytes() == picture.tobytes()
            told = read_record(out / found["file"])
            assert (told["id"], told["picture"]) == (item.id, number + 1)
            assert told["seed"] == item.seed and told["question"] == item.text
        drawn += len(shown)
    assert drawn >= 4 and max(len(row.get("pictures", ())) for row in index.values()) > 1
    from pyarrow import parquet

    table = parquet.read_table(out / "index.parquet")
    assert table["pictures"].to_pylist() == [row.get("pictures") for row in index.values()]
    checked = run("batch", tmp_path / "jobs.jsonl", "--out", out, "--verify")
    assert checked.exit_code == 0, checked.output
    assert json.loads(run(*common, "--out", out, "--json").stdout)["done_now"] == 0


def warm(folder: Path, **more: Any) -> Spec:
    sampling = dict(temperature=1.0, max_new_tokens=COUNT, draw=True)
    return Spec(str(folder), "sjd", sampling=sampling, dtype="float32", **more)


@pytest.mark.parametrize("layout", ["folders", "tar"])
@pytest.mark.slow
def test_a_job_with_pictures_that_is_killed_goes_on(folder, pipe, layout, tmp_path):
    """At random moments: every answer and every picture once, with the bytes of a whole run."""
    made = [{"id": f"set/{i}", "question": ASKED[i % 3]} for i in range(4)]
    items = read_items(job_file(tmp_path, made))
    worker = AnswerWorker(warm(folder, layout=layout), questions=True, pipe=pipe)
    assert campaign(worker, 3, items)["kills"] >= 3


@pytest.mark.parametrize("layout", ["folders", "tar"])
@pytest.mark.slow
def test_damaged_and_missing_pictures_are_made_again(folder, layout, tmp_path):
    jobs, out = job_file(tmp_path, rows(7)), tmp_path / "out"
    common = ("batch", jobs, "--model", folder, "--method", "sjd", *WARM, "--out", out)
    common += ("--layout", layout, "--shard-size", 2)
    assert run(*common).exit_code == 0
    before = files(out)
    loose = [*(out / "results").rglob("*.*")]
    assert bool(loose) is (layout == "folders"), "an archive has the pictures, too"
    if layout == "tar":
        first = min((out / "archives").iterdir())
        first.write_bytes(first.read_bytes()[:600])
    else:
        first, second, *_ = sorted((out / "results").rglob("*.1.png"))
        first.write_bytes(first.read_bytes()[:-9] + b"other bits")
        second.rename(second.with_suffix(".jpeg"))
    checked = run("batch", jobs, "--out", out, "--verify")
    assert checked.exit_code == 1 and ("1.png" in checked.output or layout == "tar")
    found = json.loads(run(*common, "--repair", "--json").stdout)
    assert found["repaired"] == 2 and found["repaired_otherwise"] == 0
    for stray in (out / "results").rglob("*.jpeg"):
        stray.unlink()
    assert files(out) == before
    assert run("batch", jobs, "--out", out, "--verify").exit_code == 0


def test_an_answer_with_fewer_pictures_leaves_none_behind(folder, pipe, tmp_path):
    """As when another machine, which rounds otherwise, makes it again."""
    (item,) = read_items(job_file(tmp_path, [{"id": "a", "question": ASKED[0]}]))
    (result,) = AnswerWorker(warm(folder), questions=True, pipe=pipe).run([item])
    (tmp_path / "results").mkdir()
    result.pictures = [noisy((16, 16), 60)] * 3
    save(tmp_path, [result], "webp")
    result.pictures = result.pictures[:1]
    (record,) = save(tmp_path, [result], "webp")
    left = {f.name for f in (tmp_path / "results").rglob("*.*")}
    assert left == {Path(each["file"]).name for each in files_of(record)} and len(left) == 2


def test_a_model_that_cannot_draw_is_refused_in_a_sentence(folder, tmp_path):
    jobs = job_file(tmp_path, [{"id": "a", "question": "blue tree"}])
    common = ("batch", jobs, "--out", tmp_path / "out", "--draw", "--model")
    refusal = refused(*common, "pocket/llava", "--max-new-tokens", COUNT)
    assert "needs a model that writes text and pictures in turn" in refusal
    assert "must be at least 18" in refused(*common, folder, "--max-new-tokens", 17)
    said = "needs a method of ar, prompt-lookup, sjd, auto, got 'block'"
    assert said in refused(*common, folder, "--method", "block", "--max-new-tokens", COUNT)
    blind = shutil.copytree(folder, tmp_path / "blind", ignore=shutil.ignore_patterns("vq"))
    refusal = refused(*common, blind, "--max-new-tokens", COUNT)
    assert "has no decoder for pictures" in refusal
    assert not list((tmp_path / "out" / "results").rglob("*.*"))
    jobs.write_text('{"id": "a", "prompt": "heart"}')
    assert "--draw is for jobs of questions" in refused(*common, "pocket/coder")


def test_a_line_that_asks_too_much_is_set_aside(tmp_path):
    made = [{"id": "a", "question": "what", "draw": True}, {"id": "b", "question": "what"}]
    out = tmp_path / "out"
    common = ("batch", job_file(tmp_path, made), "--model", "pocket/llava", "--out", out)
    assert run(*common, "--max-new-tokens", 4).exit_code == 1
    (failed,) = lines(out / "failed.jsonl")
    assert failed["id"] == "a" and "needs a model that writes text and pictures" in failed["error"]
    assert [row["id"] for row in lines(out / "index.jsonl")] == ["b"]
