"""The command line on a tiny random model: pictures, JSON, seeds, interruptions, and every user's
mistake.
"""

import errno
import functools
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from tqdm import tqdm

from specmm import zoo
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.loading.files import slug
from specmm.methods import GSD, Speculative
from specmm.recipes.recipe import train
from specmm.runs import run as drawing
from specmm.runs.demo import COLUMNS, in_letters
from specmm.runs.race import Quickest
from tests.cases import some
from tests.commands import as_json, refused, run, succeed
from tests.tiny.chats import undrafted

MAIN = [sys.executable, "-c", "from specmm.cli import main; main()"]
Maker = Callable[..., LlamaGenPipeline]
METHODS = ("ar", "sjd", "speculative", "eagle", "lantern++")


def sets(**settings: object) -> list[str]:
    """Settings of a recipe as a command takes them."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def pictures(folder: Path) -> list[bytes]:
    """Pixels: records also tell what pictures were drawn beside."""
    return [Image.open(f).tobytes() for f in sorted(folder.glob("*.png"))]


# ---- what it prints


def test_help_is_quick_and_light():
    start = time.perf_counter()
    done = subprocess.run([*MAIN, "--help"], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 3  # a tenth of a second on an idle machine
    assert "generate" in done.stdout
    light = "import sys, specmm.cli; assert not {'torch', 'numpy', 'diffusers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", light], check=True)


@pytest.mark.slow
def test_json_is_all_there_is_on_stdout(tiny, tmp_path):
    command = [*MAIN, *f"generate {tiny} --class heart -n 2 --method lantern++ --json".split()]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    wanted = "model method seed seconds tokens rounds tau certificate outputs host_overhead"
    assert set(wanted.split()) <= set(found)
    assert set(found["certificate"]) == {"kind", "reason", "tv", "settings"}
    assert found["certificate"]["kind"] == "bounded" and found["certificate"]["tv"] > 0
    assert found["tau"] == pytest.approx((found["tokens"] - 2) / found["rounds"])
    assert all(Path(p).is_file() for p in found["outputs"])
    assert json.loads((tmp_path / "run.json").read_text()) == found


def test_a_drawn_seed_is_printed_and_repeats_the_run(tiny, tmp_path):
    found = as_json("generate", tiny, "--class", 0, "--out", tmp_path / "a")
    again = run("generate", tiny, "--class", 0, "--seed", found["seed"], "--out", tmp_path / "b")
    assert f"seed {found['seed']}" in again.stdout and "certificate  exact" in again.stdout
    assert pictures(tmp_path / "a") == pictures(tmp_path / "b")


# ---- pictures


@pytest.mark.parametrize("method", some(METHODS, ("sjd", "speculative")))
def test_a_picture_is_the_same_whatever_the_batch(tiny, tmp_path, method):
    words = f"--class heart --class 2 -n 2 --method {method} --seed 5 --dtype float32"
    common = words.split()
    for size in (1, 3):
        found = as_json(
            "generate", tiny, *common, "--batch-size", size, "--out", tmp_path / str(size)
        )
    assert found["certificate"]["kind"] == ("bounded" if method == "lantern++" else "exact")
    assert len(pictures(tmp_path / "1")) == 4
    assert pictures(tmp_path / "1") == pictures(tmp_path / "3")


def test_the_command_draws_what_python_draws(tiny, tmp_path):
    common = ("--class", "time", "-n", 3, "--seed", 1, "--batch-size", 2, "--dtype", "float32")
    found = as_json("generate", tiny, *common, "--out", tmp_path)
    pipe = LlamaGenPipeline.from_pretrained(tiny, torch_dtype=torch.float32)
    out = pipe(
        classes=["time"], num_images_per_prompt=3, generator=torch.Generator().manual_seed(1)
    )
    names = [slug(Path(p).name) for p in found["outputs"]]
    assert names == [f"{i:04d}-time.png" for i in range(3)]
    for i, image in enumerate(out.images):
        assert image.tobytes() == Image.open(tmp_path / names[i]).tobytes()


def test_ctrl_c_leaves_the_finished_pictures(tiny, tmp_path, monkeypatch):
    batches = []

    def interrupt(pipe: Any, step: int, counts: int, state: dict[str, Any]) -> dict[str, Any]:
        batches.extend([step] if step == 0 else [])
        if len(batches) == 2 and step == 3:
            raise KeyboardInterrupt
        return state

    monkeypatch.setattr(drawing, "draw", functools.partial(drawing.draw, callback=interrupt))
    common = ("generate", tiny, "--class", "heart", "-n", 5, "--batch-size", 2, "--seed", 3)
    result = run(*common, "--out", tmp_path / "cut", "--json")
    assert result.exit_code == 130
    assert "2 of 5 pictures are finished" in result.stderr
    found = json.loads(result.stdout)
    assert found["interrupted"] and len(found["outputs"]) == 2
    assert json.loads((tmp_path / "cut/run.json").read_text()) == found
    monkeypatch.undo()
    as_json(*common, "--out", tmp_path / "whole")
    assert pictures(tmp_path / "cut") == pictures(tmp_path / "whole")[:2]


def test_ctrl_c_before_the_first_batch(tiny, tmp_path, monkeypatch):
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(drawing, "draw", functools.partial(drawing.draw, callback=interrupt))
    result = run("generate", tiny, "--class", "heart", "--out", tmp_path)
    assert result.exit_code == 130 and "0 of 1 pictures" in result.stderr


def test_a_full_disk(tiny, tmp_path, monkeypatch):
    save, saved = drawing.write_pictures, []

    def full(images: Any, records: Any, files: list[Path]) -> None:
        saved.extend(files)
        if len(saved) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(images, records, files)

    monkeypatch.setattr(drawing, "write_pictures", full)
    line = refused(
        "generate", tiny, "--class", "heart", "-n", 4, "--batch-size", 2, "--out", tmp_path
    )
    assert "No space left on device" in line and "2 of 4 pictures" in line
    assert len(pictures(tmp_path)) == 2


# ---- the other commands


def test_bench_interleaves_and_compares(tiny):
    words = f"bench {tiny} --methods lantern++(lambda=3),ar -n 2 --batch 2 --dtype float32"
    rows = as_json(*words.split())
    assert [r["method"] for r in rows] == ["ar", "lantern++"]
    wanted = (
        "baseline_seconds speedup tau host_overhead ideal quality seed certificate tokens rounds "
        "model outputs"
    )
    assert all(set(wanted.split()) <= set(r) for r in rows)
    assert rows[0]["speedup"] == 1 and rows[0]["tau"] == 1
    assert rows[1]["speedup"] == pytest.approx(rows[0]["seconds"] / rows[1]["seconds"])
    assert rows[1]["quality"]["log_likelihood"] < 0
    assert "did you mean" in refused("bench", tiny, "--methods", "ar,lantrn")


def test_bench_compiles_what_can_be(tiny, taped, monkeypatch):
    monkeypatch.setattr(GSD, "static_shapes", False)
    given = ("bench", tiny, "--methods", "sjd,gsd", "-n", 2, "--dtype", "float32", "--seed", 0)
    rows = as_json(*given, "--compile")
    assert {r["method"]: r["compiled"] for r in rows} == {"ar": True, "sjd": True, "gsd": False}
    assert taped.replays and not any(r["compiled"] for r in as_json(*given))
    said = run(*given, "--compile").stdout.splitlines()[-2:]
    assert said[0] == "compiled: ar, sjd"
    assert said[1].startswith("not gsd: compiled=True needs ar, sjd or a method with a block")


def test_what_is_wrong_with_a_call_is_said_once():
    calls = []

    def broken(*given: Any, compiled: bool) -> None:
        calls.append(compiled)
        raise ValueError("classes must be known")

    with pytest.raises(ValueError, match="classes"):
        Quickest(broken)(Speculative(), ["hart"], 0)
    assert calls == [True]


class Shown(tqdm):
    """A bar that is shown wherever it goes, and where it has been."""

    places: ClassVar[list[float]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "disable": False, "file": io.StringIO()})

    def update(self, n: float = 1) -> bool | None:
        self.places.append(self.n + n)
        return super().update(n)

    def refresh(self, *given: Any, **options: Any) -> None:
        self.places.append(self.n)
        super().refresh(*given, **options)


def test_the_bar_moves_within_a_picture(tiny, tmp_path, monkeypatch):
    Shown.places.clear()
    monkeypatch.setattr("specmm.runs.run.tqdm", Shown)
    monkeypatch.setattr("specmm.image_ar.calls.OFTEN", 0)
    plain = as_json("generate", tiny, "--class", 0, "-n", 3, "--batch-size", 2, "--out", tmp_path)
    assert len(plain["outputs"]) == 3 and Shown.places[-1] == 3
    inside = [place for place in Shown.places if place % 1]
    assert inside == sorted(inside) and min(inside) < 0.5 < 2 < max(inside) < 3


@pytest.mark.slow
def test_plan_says_what_it_measured(copy):
    without = as_json("plan", copy, "--dtype", "float32")
    usual = [one["choice"] for one in without["candidates"] if one["choice"].startswith("specul")]
    assert usual == ["speculative"]
    settings = json.loads((copy / "settings.json").read_text())
    (copy / "settings.json").write_text(json.dumps(settings | {"acceptance": [[0.9, 0.05]] * 4}))
    found = as_json("plan", copy, "--dtype", "float32")
    assert found["costs"]["step"] > 0 and found["choice"].startswith(("ar", "specul", "sjd"))
    trees = [one for one in found["candidates"] if one["choice"].startswith("speculative(tree")]
    assert len(trees) > 1 and all(one["forecast"] > 1 and one["tau"] >= 1 for one in trees)
    speeds = [one["speedup"] for one in found["candidates"] if not one["left"]]
    assert found["choice"] == "ar" or max(speeds) > 1.05
    shown = run("plan", copy).stdout
    assert "ms a token" in shown and "plain decoding, tau" in shown.partition("candidate ")[2]


@pytest.mark.parametrize("tv", [None, 1e-9], ids=str)
@pytest.mark.slow
def test_plan_shows_how_far_it_is_and_what_it_chose_from(copy, tv, monkeypatch):
    """Of a model whose methods are raced; some leave where little total variation is allowed."""
    Shown.places.clear()
    monkeypatch.setattr("specmm.runs.run.tqdm", Shown)
    option = [] if tv is None else ["--tv", tv]
    found = as_json("plan", copy, *option)
    assert len(Shown.places) >= 3 and min(filter(None, Shown.places)) == 1
    names = {one["choice"].partition("(")[0] for one in found["candidates"]}
    assert "sjd" in names if tv is None else {"gsd", "lantern", "lantern++"} <= names
    off = [one for one in found["candidates"] if "total variation" in one["left"]]
    assert all(one["tv"] > 1e-9 for one in off)
    assert bool(off) == (tv == 1e-9)
    if tv == 1e-9:
        assert (
            "; left, since its total variation is above 1e-09" in run("plan", copy, *option).stdout
        )


def test_demo_makes_table_sheet_and_page(tiny, tmp_path):
    result = succeed("demo", "--model", tiny, "--out", tmp_path, "-n", 1)
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["ar", "speculative", "lantern++"]
    assert "1.00" in lines[2] and "exact" in lines[3] and "bounded, tv" in lines[4]
    explained = [line.partition(":")[0] for line in lines if ": " in line]
    assert explained == [*COLUMNS, "side by side"], "a sentence a column"
    assert lines[-1].endswith((tmp_path / "index.html").as_uri())
    assert len(pictures(tmp_path)) == 3 * 4 + 1
    told = [file for line in result.stderr.splitlines() if (file := line.partition(".png")[0])]
    assert all(any(str(p.with_suffix("")) in t for t in told) for p in tmp_path.glob("ar-*.png"))
    page = (tmp_path / "index.html").read_text()
    assert "data:image/png;base64," in page and "lantern++" in page and "://" not in page


def test_a_terminal_shows_a_picture_in_letters():
    image = Image.new("RGB", (96, 96), (255, 0, 0))
    image.paste((0, 0, 255), (0, 48, 96, 96))
    lines = in_letters(image).splitlines()
    assert len(lines) == 12 and all(line.count("▀") == 24 for line in lines)
    assert "38;2;255;0;0m\x1b[48;2;255;0;0m" in lines[0]
    assert "38;2;0;0;255m\x1b[48;2;0;0;255m" in lines[-1] and lines[0].endswith("\x1b[0m")


def test_zoo_prints_the_card(tiny, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(tiny, tmp_path / "some"))
    row = {"method": "lantern++(lambda_=2.0, k=10)", "samples": 2000, "fid": 12.5, "kid": 0.01}
    facts = {"data": "emoji", "licence": "CC-BY-4.0", "seed": 0, "metrics": {"quality": [row]}}
    (folder / "card.json").write_text(json.dumps(facts))
    monkeypatch.setattr(zoo, "POCKET", tmp_path)
    head, line, listed, _ = run("zoo").stdout.splitlines()
    assert listed.split()[0] == "pocket/some" and "CC-BY-4.0" in listed
    assert head.split()[0] == "model" and set(line) == {"-", " "}
    text = run("zoo", "pocket/some").stdout
    assert all(word in text for word in ("pocket/some", "MB", "emoji", "CC-BY-4.0", "fid 12.5"))
    assert "face-smiling" in text and "by id from 0 to 4" in text
    assert as_json("zoo")[0]["name"] == "pocket/some"
    assert as_json("zoo", "pocket/some")["metrics"]["quality"] == [row]
    assert "did you mean 'pocket/some'" in refused(
        "generate", "pocket/som", "--class", 0, "--out", tmp_path / "o"
    )


@pytest.mark.slow
def test_training_makes_a_model_that_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    data = tmp_path / "data"
    images = np.random.default_rng(0).integers(0, 256, (12, 48, 48, 3), np.uint8)
    data.mkdir()
    names = np.array([f"n/{i}" for i in range(12)])
    np.savez(data / "emoji48.npz", images=images, labels=np.arange(12) % 32, names=names)
    common = dict(data=data, batch=2)
    vq, target = tmp_path / "vq", tmp_path / "target"
    train("tokenizer", **common, codes=32, steps=2, out=vq)
    settings = sets(tokenizer=vq, **common, dim=32, heads=2, layers=1, steps=2)
    as_json(f"train target --out {target}", *settings)
    model = target / "model"
    for kind in ("block", "eagle"):
        settings = sets(kind=kind, **common, levels=3)
        how = (f"train emoji-drafter {model} --out {tmp_path / kind}", *settings)
        assert Path(as_json(*how, *sets(steps=2))["outputs"][0]) == model / "drafters" / kind
        assert "replace=true" in refused(*how, *sets(steps=4))
    own = sets(replace="true", drawn=3, cfg=1.5)  # with the target's own pictures
    assert "drawn was 0, is 3" in refused(*how, *sets(steps=3), *own)
    how = (f"train emoji-drafter {model} --out {tmp_path / 'own'}", *settings)
    steps = []
    for count in (2, 3):
        as_json(*how, *sets(steps=count), *own)
        steps.append(torch.load(tmp_path / "own/checkpoint.pt", weights_only=True)["step"])
    assert steps == [2, 3] and len(list((tmp_path / "own/drawn").rglob("*.pt"))) == 1
    alone = dict(batch=2, steps=1, levels=3, replace="true", out=tmp_path / "alone")
    assert "drawn=N" in refused("train", "drafter", model, *sets(**alone))
    as_json("train", "drafter", model, *sets(**alone, drawn=3))
    assert not (tmp_path / "alone/tokens.pt").exists()  # the data was not looked at
    pipe = LlamaGenPipeline.from_pretrained(model)
    assert set(pipe.parts.drafters) == {"block", "eagle"} and len(pipe.settings.acceptance) == 3
    assert as_json("plan", model)["reason"]
    seeded, method = torch.Generator().manual_seed(0), Speculative(tree=(2, 1, 1))
    out = pipe(classes=["zodiac"], method=method, generator=seeded)
    assert out.images[0].size == (48, 48)


@pytest.mark.slow
def test_a_drafter_learns_from_pictures_of_ones_own(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    model = undrafted(tiny, tmp_path / "model")
    for name in ("heart", "time", "heart/more"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (40, 30), "red").save(tmp_path / "data" / name / "a.png")
    settings = dict(data=tmp_path / "data", steps=2, batch=2, levels=2, layers=1, cfg=1.0)
    as_json("train", "drafter", model, "--out", tmp_path / "run", *sets(**settings))
    assert torch.load(tmp_path / "run/tokens.pt", weights_only=True)["tokens"].shape == (3, 2, 36)
    assert set(LlamaGenPipeline.from_pretrained(model).parts.drafters) == {"block"}
    (tmp_path / "data" / "heart").rename(tmp_path / "data" / "hart")
    assert "did you mean 'heart'" in refused(
        "train", "drafter", model, *sets(**settings, replace="true")
    )


def test_training_refuses_unknown_kinds_and_missing_models(tiny, tmp_path):
    assert "did you mean 'block'" in refused("train", "drafter", tiny, *sets(kind="blok"))
    assert "replace=true" in refused("train", "drafter", tiny, "--out", tmp_path)
    eagle = sets(kind="eagle", replace="true", out=tmp_path, start=tmp_path, drawn=2)
    assert "goes with kind=block" in refused("train", "drafter", tiny, *eagle)
    assert "give --set data=FOLDER or --set drawn=N" in refused(
        "train", "drafter", tiny, *sets(replace="true", out=tmp_path)
    )
    assert "no checkpoint" in refused(
        "train", "target", *sets(tokenizer=tmp_path / "no"), "--out", tmp_path / "t"
    )


@pytest.mark.slow
def test_ctrl_c_says_one_thing(tiny, tmp_path):
    """A real process, stopped once its first picture lies there."""
    words = f"generate {tiny} --class heart -n 3000 --batch-size 1 --dtype float32"
    command = [*MAIN, *words.split()]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # where tests run in the background a shell has them ignore Ctrl-C, and children inherit
        # that
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    while not any(tmp_path.glob("*.png")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert [line for line in told.splitlines() if "interrupted" in line] == [told.splitlines()[-1]]
    assert "of 3000 pictures are finished" in told


def test_training_does_not_write_into_a_shipped_model():
    for command in ("drafter", "deer", "dflash", "diffusion", "proxy", "scenes-msd", "text"):
        shipped = {"drafter": "llamagen", "scenes-msd": "llava", "text": "llava"}
        model = f"pocket/{shipped.get(command, 'coder')}"
        assert "is shipped with the package and is not written to; copy it" in refused(
            "train", command, model
        )
