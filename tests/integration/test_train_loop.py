"""What all trainings of drafters share: runs that go on only as what they were, several processes,
states that take no memory, and drafters that are measured while they learn.
"""

import math
import random
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.config
from safetensors.torch import load_file, save_file

from specmm import zoo
from specmm.core.derived import digest
from specmm.core.processors import Processor
from specmm.hf.models.target import VLMTarget
from specmm.image_ar.tokens.pipeline import LlamaGenSettings
from specmm.recipes import drafter
from specmm.recipes.loop import kept
from specmm.recipes.recipe import train
from specmm.recipes.source import read_rows
from specmm.recipes.training.seen import Seen, SeenRows
from tests.forks import command, ended
from tests.tiny.chats import picture_chats, undrafted
from tests.tiny.mtp_models import save

OPTIONS = dict(rows=12, batch=4, drawn=0.5, scenes=2, rollout=2, inner=16, replace=True)


@pytest.fixture
def model(text_folder, tmp_path):
    return shutil.copytree(text_folder, tmp_path / "model")


@pytest.fixture
def texts(tmp_path):
    """Two of them."""
    lines = {
        "a.txt": "def add{0}(a, b):\n    return a + b + {0}\n",
        "b.txt": "class A{0}: x = {0}\n",
    }
    for name, line in lines.items():
        (tmp_path / name).write_text("".join(line.format(i) for i in range(400)))
    return [tmp_path / name for name in lines]


def weights(model, kind="eagle3"):
    return load_file(model / "drafters" / kind / "model.safetensors")


def test_a_run_goes_on_only_as_what_it_was(model, texts, tmp_path):
    given = dict(model=model, out=tmp_path / "run", **OPTIONS)
    train("eagle3", text=texts[0], steps=2, **given)
    before = weights(model)
    for changes, said in (
        ({"lr": 1e-4, "seed": 7, "rollout": 1}, "lr was None, is 0.0001; .*rollout was 2, is 1"),
        ({"text": texts[1]}, "text was .*a.txt.*, is .*b.txt"),
        ({"max_length": 40}, "max_length was None, is 40"),
    ):
        with pytest.raises(ValueError, match=said):
            train("eagle3", **given | {"text": texts[0], "steps": 2} | changes)
    with pytest.raises(ValueError, match="has 2 steps, more than the 1 asked"):
        train("eagle3", text=texts[0], steps=1, **given)
    texts[0].write_text(texts[1].read_text())
    with pytest.raises(ValueError, match=r"rows learnt was .*, is "):
        train("eagle3", text=texts[0], steps=2, **given)
    after = weights(model)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_another_models_run_is_not_gone_on_with(model, texts, tmp_path):
    """Not even where its weights have the same signs, and its folder the same name."""
    given = dict(model=model, text=texts[0], out=tmp_path / "run", **OPTIONS | {"drawn": 0})
    train("eagle3", steps=2, **given)
    file = model / "model.safetensors"
    save_file({k: 1.5 * v for k, v in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"another training \(target was .*, is .*\): give"):
        train("eagle3", steps=2, **given)


@pytest.mark.slow
def test_a_drafter_that_diverges_leaves_the_good_one(model, texts, tmp_path):
    given = dict(model=model, text=texts[0], layers=1, block=3, rows=8, batch=4, drawn=0, read=1)
    with torch._dynamo.config.patch(disable=True):
        train("dflash", steps=2, out=tmp_path / "a", **given, replace=True)
        before = weights(model, "block")
        with pytest.raises(ValueError, match="give a smaller lr"):
            train("dflash", steps=3, lr=1e30, out=tmp_path / "b", **given, replace=True)
    after = weights(model, "block")
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.slow
def test_two_processes_train_one_drafter(model, texts, tmp_path):
    """As torchrun starts them."""
    words = [f"{name}={value}" for name, value in OPTIONS.items()]
    words += [f"text={texts[0]}", "steps=21", "lr=1e-3"]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    found = {}
    for count in (1, 2):
        out, ranks = tmp_path / str(count), []
        for rank in map(str, range(count)):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(count)}
            streams = (f"{out}-{rank}.out", f"{out}-{rank}.error")
            given = ["train", "eagle3", model, "--set", *words, f"out={out}"]
            ranks.append(command(*given, streams=streams, environment=place | own))
        assert [ended(rank) for rank in ranks] == [0] * count
        said = "".join(file.read_text() for file in tmp_path.glob(f"{count}-*"))
        assert said.count("trained eagle3") == 1
        rows = [line.split(",") for line in (out / "loss.csv").read_text().splitlines()]
        found[count] = [[float(x or 0) for x in row] for row in rows[1:]]
    assert len(found[1]) == 2
    torch.testing.assert_close(found[2], found[1], rtol=0, atol=1e-4)


class Counting:
    """What reads rows, and how often."""

    def __init__(self):
        self.calls = 0

    def __call__(self, rows):
        self.calls += 1
        return read_rows(rows)


@pytest.mark.parametrize("keep", [1.0, 0.0, 4000 / 2**30])
def test_states_take_the_disk_that_was_given_and_no_memory(text_target, tmp_path, keep, capsys):
    read, rows = Counting(), [torch.arange(3 + i, 11 + i) for i in range(6)]
    seen = SeenRows(text_target, rows, read, (0,), 2, 0, tmp_path, keep)
    told = capsys.readouterr().err
    batches = [seen.batch(step) for step in range(9)]  # three epochs
    files = list(seen.kept.folder.iterdir())
    size = sum(x.nbytes for x in vars(seen._seen(0)).values())
    kept = min(int(keep * 2**30 // size), 3)
    assert len(files) == len(seen.kept.numbers) == kept
    assert read.calls == {3: 3, 0: 11}.get(kept, read.calls) and "MiB a row" in told
    assert f"those of {min(2 * int(keep * 2**30 // size), 6)} of 6 rows are kept" in told
    held = [x for x in vars(seen.kept).values() if isinstance(x, torch.Tensor | Seen)]
    assert not held
    for epoch in (batches[:3], batches[3:6], batches[6:]):
        assert sorted(int(row[0]) for batch in epoch for row in batch.tokens) == list(range(3, 9))
    folder = seen.kept.folder
    del seen
    assert not folder.exists()


def test_pictures_that_a_target_drew_are_kept_by_what_they_show(tmp_path, monkeypatch):
    drawn = []

    class Drawing:
        def __init__(self, *parts):
            pass

        def set_progress_bar_config(self, disable):
            pass

        def __call__(self, labels, **options):
            drawn.append(labels)
            return SimpleNamespace(tokens=torch.tensor(labels)[:, None])

    monkeypatch.setattr(drafter, "LlamaGenPipeline", Drawing)
    monkeypatch.setattr(drafter, "read_settings", lambda *_: LlamaGenSettings())
    target = torch.nn.Linear(2, 2)
    for labels in ([1, 2], [3, 4], [1, 2]):
        found = drafter._draw(tmp_path, target, None, torch.tensor(labels), tmp_path, None, 0)
        assert found[:, 0].tolist() == labels
    assert drawn == [[1, 2], [3, 4]]


@pytest.fixture
def text_target(text_folder):
    from specmm import TextPipeline

    return VLMTarget(TextPipeline.from_pretrained(text_folder).model, Processor(), "text")


def test_the_last_batch_is_filled_up(text_target, tmp_path):
    rows = [torch.arange(3 + i, 11 + i) for i in range(5)]
    seen = SeenRows(text_target, rows, read_rows, (), 2, 0, tmp_path, 1.0)
    found = [len(seen.batch(step).tokens) for step in range(3)]
    assert found == [2, 2, 2]


def test_what_is_kept_is_whole(tmp_path, monkeypatch):
    """A run that dies while it writes leaves what was there, of its own key."""
    file, made = tmp_path / "new" / "tokens.pt", [torch.tensor([1]), torch.tensor([2])]
    assert torch.equal(kept(file, lambda: made[0], "a"), made[0])
    assert torch.equal(kept(file, lambda: made[1], "a"), made[0])

    def torn(_, stream):
        stream.write(b"PK")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch, "save", torn)
        kept(file, lambda: made[1], "b")
    assert torch.equal(kept(file, lambda: made[1], "a"), made[0])
    assert torch.equal(kept(file, lambda: made[1], "b"), made[1])


def test_all_weights_are_in_a_digest():
    network = torch.nn.Linear(300, 7)
    before = digest(network)
    for change in (lambda x: x[3, 5].mul_(1.01), lambda x: x[:2].copy_(x[:2].flip(0))):
        kept = network.weight.detach().clone()
        change(network.weight.data)
        assert digest(network) != before
        network.weight.data.copy_(kept)
    network.weight.data.copy_(network.weight.data.roll(8, -1))
    assert digest(network) != before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "deer", "mtp", "msd"])
def test_targets_in_bfloat16(kind, model, texts, tmp_path):
    """They teach, their drafters are measured, and learn in float32."""
    own = dict(text=texts[0], rows=8, drawn=0.5)
    own |= {"eagle3": dict(rollout=2, inner=16), "mtp": dict(rollout=2), "msd": dict(width=32)}.get(
        kind, dict(layers=1, block=3)
    )
    if kind == "dflash":
        own["read"] = 1
    if kind == "mtp":
        model = save("glm", tmp_path / "glm", 1)
        texts[0].write_text("a b c d e f g h " * 400)
    if kind == "msd":
        model = undrafted(zoo.POCKET / "llava", tmp_path / "llava")
        own["data"] = picture_chats(tmp_path)
        del own["text"], own["rows"], own["drawn"]
    given = dict(model=model, steps=2, batch=4, scenes=2, replace=True, out=tmp_path / "run")
    with torch._dynamo.config.patch(disable=True):
        train(kind, **given, dtype="bfloat16", **own)
    last = (tmp_path / "run" / "loss.csv").read_text().splitlines()[-1].split(",")
    assert all(math.isfinite(float(value)) for value in last) and float(last[-1]) >= 1
    kept = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"]
    assert {x.dtype for x in kept.values() if x.is_floating_point()} == {torch.float32}


@pytest.mark.slow
def test_ten_kills_change_nothing(model, texts, tmp_path):
    """At ten random moments, while data are read or in the midst of a step or a checkpoint: losses
    and weights are those of an undisturbed run, bit for bit.
    """
    words = [f"{name}={value}" for name, value in OPTIONS.items()]
    words += [f"text={texts[0]}", "steps=160", "lr=1e-3", "save_every=0", "measure_every=80"]

    def started(out):
        return command("train", "eagle3", model, "--set", *words, f"out={out}")

    begin = time.monotonic()
    assert ended(started(tmp_path / "whole")) == 0
    seconds = time.monotonic() - begin
    wanted = weights(model)
    moments = random.Random(50)
    kept = tmp_path / "killed" / "checkpoint.pt"
    begun = []  # the steps at which runs went on
    for number in range(10):
        before = kept.stat().st_mtime_ns if kept.exists() else 0
        process = started(kept.parent)
        if number % 4:  # others are killed before their first step, or where that takes long
            while not kept.exists() or kept.stat().st_mtime_ns == before:
                time.sleep(0.01)
                assert process.is_alive()
        time.sleep(moments.uniform(0, seconds / 25))
        assert process.is_alive(), "it has ended before it was killed"
        process.terminate() if number % 2 else process.kill()
        process.join()
        begun += [torch.load(kept, weights_only=True)["step"]] if kept.exists() else []
    assert ended(started(kept.parent)) == 0
    assert len(set(begun)) >= 5 and begun == sorted(begun) and 0 < begun[0] < begun[-1] < 160
    found = weights(model)
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    curves = [(tmp_path / name / "loss.csv").read_text() for name in ("whole", "killed")]
    assert curves[0] == curves[1] and len(curves[0].splitlines()) > 8
