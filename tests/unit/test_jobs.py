"""Journals, items and batch sizes: any bytes, any rows, any order."""

import base64
import csv
import io
import itertools
import json
import os
import random
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import specmm
from benchmarks.soak.fuzz import fuzz
from specmm.core.cache import Cache, CacheSize, alike
from specmm.core.decode import decide
from specmm.core.randomness import Uniforms
from specmm.core.tree import DraftTree, TreeShape
from specmm.extending.registry import unknown
from specmm.jobs import progress
from specmm.jobs.finish import finish
from specmm.jobs.folder import JOURNALS, Spec, prepare
from specmm.jobs.items import Item, parse, read_items, seed_of
from specmm.jobs.journal import Journal, Ledger, failure, pack, unpack
from specmm.jobs.making import MOST, BatchSizer
from specmm.jobs.programs import one_number_of_threads
from specmm.jobs.progress import Progress
from specmm.jobs.results import name_of, place_of
from specmm.jobs.run import pending
from specmm.loading.hardware import out_of_memory
from specmm.verify import Recursive, Traversal
from specmm.vlm.pictures import open_image
from specmm.zoo.model_files import PARTS, PIECE, digest, files_of_models

QUICK = settings(max_examples=60, deadline=None)
TEXT = st.text(max_size=20)
RECORDS = st.dictionaries(TEXT, st.one_of(TEXT, st.integers(), st.booleans()), max_size=4)


def item(identity: str) -> Item:
    return Item(identity, "class", "heart", seed_of(identity, 0))


# ---- journals


@settings(max_examples=15, deadline=None)  # each waits for the disk
@given(st.lists(RECORDS, max_size=5), st.binary(max_size=12))
def test_a_torn_line_hides_no_other(tmp_path_factory, records, torn):
    folder = tmp_path_factory.mktemp("journal")
    records = [{**record, "id": f"{i}", "state": "done"} for i, record in enumerate(records)]
    (folder / "a-1.log").write_bytes(b"".join(map(pack, records)) + torn)
    Journal(folder, "a").append([{"id": "x", "state": "done"}])
    known = Ledger(folder)
    assert [known[record["id"]] for record in records] == records
    assert known["x"]["state"] == "done" and len(known) == len(records) + 1


@QUICK
@given(RECORDS, st.integers(0, 10**6), st.integers(0, 7))
def test_a_flipped_bit_is_noticed(record, place, bit):
    line = bytearray(pack(record))
    assert json.loads(unpack(bytes(line))) == record
    line[place % len(line)] ^= 1 << bit
    assert unpack(bytes(line)) is None


def test_a_line_that_was_cut_anywhere_is_no_line():
    line = pack({"id": "x", "state": "done"})
    assert all(unpack(line[:n]) is None for n in range(len(line)))


def test_done_stands_against_failed_in_any_order(tmp_path):
    for name, state in (("b", "failed"), ("a", "done"), ("c", "failed")):
        Journal(tmp_path, name).append([{"id": "x", "state": state}])
    assert Ledger(tmp_path)["x"]["state"] == "done"


def test_the_latest_failure_counts_in_any_order(tmp_path):
    """An item set aside under Ray, and again here for another reason."""
    for name, at in (("b", 1.0), ("a", 2.0), ("c", 1.5)):
        Journal(tmp_path, name).append([{**failure(item("x"), f"reason {at}", 1), "at": at}])
    assert Ledger(tmp_path)["x"]["error"] == "reason 2.0"


def test_records_are_known_by_ids_of_any_letters(tmp_path):
    ids = ['quote " and \\\\', "é 漢", "plain", "\\u0041"]
    made = [{"id": one, "state": "done", "at": 1.0, "item": item(one).digest} for one in ids]
    Journal(tmp_path, "a").append([*made, failure(item("bad"), "no", 1)])
    known = Ledger(tmp_path)
    assert list(known) == [*ids, "bad"] and "other" not in known
    assert all(known.is_done(one) for one in ids)
    assert not known.is_done("bad") and not known.is_done("other")
    assert [known[one] for one in ids] == made


def test_what_is_left_of_a_job(tmp_path):
    """Done items of other processes, and items that changed, beside those that are as they were."""
    a, b, c, d = map(item, "abcd")
    made = [{"id": i.id, "state": "done", "at": 1.0, "item": i.digest} for i in (a, item("of 2"))]
    (tmp_path / JOURNALS).mkdir()
    Journal(tmp_path / JOURNALS, "rank").append([*made, failure(b, "no", 1), failure(c, "no", 1)])
    changed = c._replace(text="time")
    assert [*pending(tmp_path, [a, b, changed, d])] == [changed, d]
    assert [*pending(tmp_path, [a, b, d], retry_failed=True)] == [b, d]
    assert [*pending(tmp_path, [a, b, d], damaged={"a"})] == [a, d]
    with pytest.raises(ValueError, match="'a' is done but has changed"):
        pending(tmp_path, [a._replace(text="time"), b, d])


# ---- items


@QUICK
@given(
    st.dictionaries(
        st.sampled_from(["id", "class", "prompt", "image", "question", "seed", "method", "idd"]),
        st.one_of(TEXT, st.integers(), st.none(), st.lists(TEXT, max_size=2), st.floats()),
    )
)
def test_a_row_is_an_item_or_a_sentence(row):
    try:
        (found,) = parse("row 1", row, 0, Path())
    except ValueError as error:
        assert str(error).startswith("row 1: ")
        return
    assert found.id and 0 <= found.seed < 2**63 and found.text
    assert parse("row 1", row, 0, Path())[0].digest == found.digest


@QUICK
@given(st.lists(st.text(min_size=1, max_size=600), min_size=2, max_size=6, unique=True))
def test_places_differ_and_stay_inside(ids):
    ids = [i for i in ids if i.isascii() or i.encode("utf-8", "ignore").decode() == i]
    places = [place_of(item(i), "png") for i in ids]
    assert len(set(places)) == len(places)
    assert all(p.startswith("results/") and p.count("/") == 2 and ".." not in p for p in places)
    assert all(len(name_of(item(i)).encode()) < 250 for i in ids)


def test_seeds_come_from_ids(tmp_path):
    rows = [{"id": f"{i}", "class": "heart"} for i in range(50)]
    random.Random(0).shuffle(rows)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    items = read_items(tmp_path / "a.jsonl", base=3)
    assert all(i.seed == seed_of(i.id, 3) for i in items) and len({i.seed for i in items}) == 50
    assert seed_of("1", 0) != seed_of("1", 3)


def test_csv_parquet_and_class_lists(tmp_path):
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "a.csv").write_text("id,class,seed\na,heart,7\nb,time,\n")
    parquet.write_table(
        pyarrow.table({"id": ["a", "b"], "class": ["heart", "time"], "seed": [7, None]}),
        tmp_path / "a.parquet",
    )
    assert list(read_items(tmp_path / "a.csv")) == list(read_items(tmp_path / "a.parquet"))
    (tmp_path / "a.txt").write_text("heart\n\ntime\n")
    wanted = [("000000", "heart"), ("000001", "time")]
    assert [(i.id, i.text) for i in read_items(tmp_path / "a.txt")] == wanted


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "at least one item"),
        ("a.jsonl", '{"id": "a", "class": "x"}\n{"id": "a", "class": "x"}', "'a' twice"),
        (
            "a.jsonl",
            '{"id": "a/1", "class": "x"}\n{"id": "a", "class": "x", "n": 2}',
            "2: ids must",
        ),
        ("a.jsonl", '{"id": "a", "class": "x"} {}', "line 1 must be JSON, got .*Extra data"),
        ("a.jsonl", '{"id": "a", "clas": "x"}', "did you mean 'class'"),
        ("a.jsonl", "[1]", "JSON object, got a list"),
        ("a.jsonl", '{"id": "a"', "line 1 must be JSON, got"),
        ("a.jsonl", '{"id": "a", "class": "x", "prompt": "y"}', "class and prompt"),
        ("a.jsonl", '{"id": "a", "class": "x", "image": "y"}', "with a question"),
        ("a.jsonl", '{"id": "a", "class": "x", "video": "y"}', "video must come with a question"),
        ("a.jsonl", '{"id": "a", "question": "x", "video": 3}', "video must be a path or a list"),
        ("a.jsonl", '{"id": "a", "question": "x", "image": "s3://a.png"}', "https://, got 's3"),
        ("a.jsonl", '{"id": "a", "class": "x", "draw": true}', "draw must come with a question"),
        ("a.jsonl", '{"id": "a", "question": "x", "draw": 1}', "draw must be true or false, got 1"),
        ("a.jsonl", '{"id": "a", "class": "x", "seed": -1}', "seed must be"),
        ("a.csv", "id,class\na,b,c\n", "got more"),
        ("a.csv", "id,class,class\na,b,c\n", "columns of different names, got 'class' twice"),
        ("a.parquet", "no", "must be a Parquet file"),
        ("a.xml", "", "unknown kind of job file"),
    ],
)
def test_mistakes_in_job_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_items(tmp_path / name)


def test_lines_take_what_a_call_takes(tmp_path):
    """Options go into an item's digest, a CSV's as JSON's; ids are made where none is given."""
    rows = [
        {"class": "heart", "guidance_scale": 1.5, "n": 2},
        {"class": "time", "temperature": 0.5, "top_k": 7, "seed": 12, "n": 2},
        {"id": 7, "class": "time", "solver": "ddim", "negative_prompt": "3", "stop": "true"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    items = read_items(tmp_path / "a.jsonl")
    assert list(items) == list(read_items(tmp_path / "a.csv"))
    assert [i.id for i in items] == ["000000/0", "000000/1", "000001/0", "000001/1", "7"]
    assert items[0].seed == seed_of("000000/0", 0) and [i.seed for i in items[2:4]] == [12, 13]
    assert items[0].options == (("guidance_scale", 1.5),)
    assert items[2].options == (("temperature", 0.5), ("top_k", 7))
    words = ("negative_prompt", "3"), ("solver", "ddim"), ("stop", "true")
    assert items[4].options == words
    assert items[4]._replace(options=()).digest != items[4].digest
    for wrong, said in (({"n": 0}, "n must be from 1 to"), ({"nn": 1}, "unknown field 'nn'")):
        with pytest.raises(ValueError, match=f"row 1: {said}"):
            parse("row 1", {"class": "heart"} | wrong, 0, Path(), "a")


def test_items_are_made_when_they_are_asked_for(tmp_path):
    """In any order, and again; a list of a million was a quarter of a gigabyte."""
    rows = [{"class": str(i % 7), **({"n": 3} if i % 4 == 0 else {})} for i in range(2000)]
    (tmp_path / "a.jsonl").write_text("\r\n".join(map(json.dumps, rows)))
    read_items(tmp_path / "a.jsonl")  # what is imported for it is not of the items
    tracemalloc.start()
    items = read_items(tmp_path / "a.jsonl", base=5)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    listed = list(items)
    assert len(listed) == len(items) == 3000 and held / 3000 < 40
    wanted = [one for i, row in enumerate(rows) for one in parse("", row, 5, Path(), f"{i:06d}")]
    assert listed == wanted and items[-1] == wanted[-1] and items.kinds == {"class"}
    assert [items[number] for number in (2999, 4, 0)] == [wanted[number] for number in (2999, 4, 0)]
    assert list(items[5::1000]) == wanted[5::1000] and list(items[1:9][2:4]) == wanted[3:5]
    with pytest.raises(IndexError):
        items[3000]


def test_lines_say_whether_they_draw(tmp_path):
    """As JSON and as text."""
    (tmp_path / "a.csv").write_text("id,question,draw\na,x,true\nb,x,False\nc,x,\n")
    drawn, plain, silent = read_items(tmp_path / "a.csv")
    assert (drawn.draw, plain.draw, silent.draw) == (True, False, None)
    assert len({each._replace(id="a", seed=0).digest for each in (drawn, plain, silent)}) == 3
    row = {"id": "a", "question": "x", "draw": True}
    assert parse("row 1", row, 0, Path()) == [drawn]


# ---- batch sizes


def test_the_batch_grows_while_it_pays():
    sizer = BatchSizer()
    for _ in range(20):
        sizer.observe(sizer.size, 1 + sizer.size / 16)  # saturates
    assert sizer.settled and 16 <= sizer.size <= 256
    sizer.shrink(sizer.size)
    assert sizer.size <= 128


@QUICK
@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0, 100), st.booleans()), max_size=30),
    st.integers(0, 64),
)
def test_the_batch_never_leaves_its_bounds(steps, fixed):
    sizer = BatchSizer(fixed)
    for items, seconds, full in steps:
        if full:
            sizer.shrink(items)
        else:
            sizer.observe(items, seconds)
        assert 1 <= sizer.size <= max(MOST, fixed)


def test_memory_errors_are_known():
    told = RuntimeError("DefaultCPUAllocator: not enough memory")
    assert all(map(out_of_memory, (MemoryError(), torch.OutOfMemoryError(), told)))
    assert not out_of_memory(RuntimeError("shape"))
    assert not out_of_memory(ValueError("out of memory"))


# ---- trees, caches and rules, whatever their shape


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    count = draw(st.integers(1, 12))
    return [-1, *(draw(st.integers(0, n - 1)) for n in range(1, count))]


@QUICK
@given(parents())
def test_trees_agree_with_their_parents(listed):
    shape = TreeShape.from_parents(listed)
    for node, parent in enumerate(listed):
        line = [node]
        while line[-1] > 0:
            line.append(listed[line[-1]])
        assert sorted(line) == shape.ancestors[0, node].nonzero().flatten().tolist()
        assert shape.depths[0, node] == len(line) - 1
        assert shape.ranks[0, node] == listed[:node].count(parent)
        assert sum(int(shape.ancestor_words[0, node, 0]) >> a & 1 for a in line) == len(line)


@QUICK
@given(parents(), st.integers(0, 2**31), st.sampled_from([Recursive(), Traversal()]))
def test_verdicts_are_paths_of_the_tree(listed, seed, rule):
    uniforms, shape = torch.Generator().manual_seed(seed), TreeShape.from_parents(listed)
    probs = torch.rand(2, shape.size, 5, generator=uniforms).softmax(-1)
    tokens = torch.stack(
        [torch.randperm(5, generator=uniforms)[torch.arange(shape.size) % 5] for _ in range(2)]
    )
    verdict = decide(rule, DraftTree(tokens, shape), probs, Uniforms([uniforms, uniforms]))
    for path, kept in zip(verdict.path.tolist(), verdict.kept.tolist(), strict=True):
        assert 1 <= kept <= shape.depth + 1 and path[0] == 0 and set(path[kept:]) <= {-1}
        assert all(listed[node] == before for before, node in itertools.pairwise(path[:kept]))
    assert ((verdict.next_token >= 0) & (verdict.next_token < 5)).all()


@QUICK
@given(
    st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), min_size=1, max_size=4
    )
)
def test_a_cache_keeps_what_was_kept(rounds):
    """Rows that keep different nodes hold, in order, just what they kept."""
    cache, told = Cache(CacheSize(alike(1, 1, 1), 2, 1, 16, 4), torch.float32), [[], []]
    for number, kept in enumerate(rounds):
        values = torch.arange(4.0) + 10 * number + torch.tensor([[0.0], [100.0]])  # [B, N]
        cache.aim(cache.size.capacity, cache.slots)
        cache.layers[0].write(values[..., None, None], -values[..., None, None])
        counts = torch.tensor([len(kept), len(kept) // 2])
        cache.keep(torch.tensor([kept, kept]), counts)
        for row, count in enumerate(counts.tolist()):
            told[row] += [float(values[row, node]) for node in kept[:count]]
    assert [cache.layers[0].keys[r, : len(told[r]), 0, 0].tolist() for r in (0, 1)] == told
    assert cache.lengths.tolist() == [len(t) for t in told]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_broken_files_are_named_errors():
    """A quick round of what benchmarks/soak does a hundred thousand times."""
    found = fuzz(600, seed=1)
    assert sum(found["outcomes"].values()) == 600
    wanted = {"read", "ValueError", "FileError", "OSError", "FileNotFoundError"}
    assert {key.split(": ")[1] for key in found["outcomes"]} <= wanted


def test_an_item_is_the_same_wherever_the_job_file_lies(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs" / "q.jsonl"
    file.write_text('{"id": "a", "question": "what?", "image": "one.png"}\n')
    monkeypatch.chdir(tmp_path)
    near, far = read_items(Path("jobs/q.jsonl"))[0], read_items(file)[0]
    assert near.digest == far.digest and far.pictures == [str(tmp_path / "jobs" / "one.png")]


def test_videos_are_of_an_item_and_of_its_digest(tmp_path):
    rows = [
        {"id": "a", "question": "what?", "video": "one.mp4"},
        {"id": "b", "question": "what?", "video": ["one.mp4", "two.gif"], "image": "a.png"},
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two = read_items(tmp_path / "q.jsonl")
    assert one.films == [str(tmp_path / "one.mp4")] and one.pictures == []
    assert [Path(film).name for film in two.films] == ["one.mp4", "two.gif"]
    assert one.digest != one._replace(videos=()).digest


def test_blank_lines_within_quotes_stay(tmp_path):
    (tmp_path / "a.csv").write_text('id,prompt\n\na,"def f():\n\n    return 1"\n\n')
    assert read_items(tmp_path / "a.csv")[0].text == "def f():\n\n    return 1"


def test_what_is_wrong_is_short_whatever_the_line_holds(tmp_path):
    """A class of 100 MB was told whole, after a minute of looking for names like it."""
    file = tmp_path / "jobs.jsonl"
    file.write_text(json.dumps({"id": "a", "class": ["x"] * 10**6}))
    with pytest.raises(ValueError, match="not empty, got a list"):
        read_items(file)
    start = time.perf_counter()
    message = str(unknown("class", "x" * 10**7, ["heart", "time"]))
    assert message.startswith("unknown class 'xxx") and len(message) < 300
    assert time.perf_counter() - start < 1


def test_digests_of_files_notice_weights_and_sizes(tmp_path):
    file = tmp_path / "model.safetensors"
    data = bytearray(os.urandom(PARTS * PIECE + 99))
    found = set()
    for change in range(4):
        data[change * PIECE] ^= 1
        file.write_bytes(data)
        found.add(digest(file))
    file.write_bytes(data[:-1])
    assert len({*found, digest(file)}) == 5
    assert files_of_models([str(tmp_path)]) == {f"{tmp_path}: model.safetensors": digest(file)}


def test_a_record_of_a_long_job_is_small(tmp_path):
    """Of a million items 5 GB were kept at the end of a job, and before its model was opened."""
    spec, items = Spec("any"), [item(f"item-{i:05d}") for i in range(3000)]
    facts = {"certificate": {"kind": "exact", "settings": {"temperature": 0.7, "cfg": 1.0}}}
    facts |= {"stats": {"tokens": 143, "tau": 1.0, "seconds": 0.4, "batch": 4}, "method": "ar"}
    done = {"state": "done", "file": f"results/00/{'x' * 20}.png", "sha256": "0" * 64, **facts}

    def finished(folder, some):
        (folder / JOURNALS).mkdir(parents=True)
        made = [{"id": i.id, "item": i.digest, "seed": i.seed, **done} for i in some]
        Journal(folder / JOURNALS, "local").append(made)
        tracemalloc.start()
        summary = finish(folder, spec, some, 1000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return summary, peak

    finished(tmp_path / "short", items[:1])  # what is imported for it is not of the record
    summary, peak = finished(tmp_path / "long", items)
    assert summary["done"] == 3000
    assert len((tmp_path / "long/index.jsonl").read_text().splitlines()) == 3000
    assert peak / len(items) < 2000, f"{peak / len(items):.0f} bytes an item"


def test_pictures_of_a_line_may_be_addresses(tmp_path):
    packed = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(packed, "PNG")
    address = "data:image/png;base64," + base64.b64encode(packed.getvalue()).decode()
    file = tmp_path / "jobs.jsonl"
    names = [address, "https://host.example/a.png", "b.png"]
    file.write_text(json.dumps({"id": "a", "question": "what?", "image": names}))
    (one,) = read_items(file)
    assert one.pictures == [address, "https://host.example/a.png", str(tmp_path / "b.png")]
    assert open_image(one.pictures[0]).size == (3, 2)


def test_a_log_holds_the_progress_of_a_long_job(capsys, monkeypatch):
    """Of a night's job without a terminal nothing was told until it ended."""
    with Progress(10, 0) as bar:
        bar.observe(2, [], 0.1)
    assert capsys.readouterr().err == "", "a short one tells nothing"
    monkeypatch.setattr(progress, "EVERY", 0.2)
    with Progress(10, 4) as bar:
        for _ in range(3):
            time.sleep(0.25)
            bar.observe(2, [], 0.1)
    told = capsys.readouterr().err
    assert "8/10" in told and "10/10" in told and "item" in told


def test_a_jobs_threads_are_those_it_began_with(tmp_path, monkeypatch):
    network = torch.nn.Linear(2, 2)
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path / "programs"))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prepare(job := tmp_path / "job", Spec("some"))
    with specmm.threads(2), one_number_of_threads(job, network):
        assert torch.get_num_threads() == 2
    with one_number_of_threads(job, network):  # launchers set the variable
        assert torch.get_num_threads() == 2
    refused = pytest.raises(ValueError, match="continue with its 2 threads, got 1")
    with specmm.threads(1), refused, one_number_of_threads(job, network):
        pass
