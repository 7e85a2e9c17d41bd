"""What a picture's file records draws it again, bit for bit, whatever it was drawn beside."""

import functools
import json
from contextlib import nullcontext
from importlib.metadata import version

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from specmm.image_ar.pipeline import FAMILIES, open_pictures
from specmm.image_ar.records import DESCRIPTION, KEY, read_record, sealed, set_as_recorded
from specmm.methods import label
from specmm.methods.making import parse_methods
from specmm.programs.batch_invariant import batch_invariant
from specmm.runs.again import KINDS as KINDS_OF
from specmm.runs.again import checked_record, draw_again, draw_like
from tests.commands import as_json, refused, succeed
from tests.golden.calls import CONTINUOUS, IMAGES, SCALES

SHORT = {"pocket/mar": dict(num_iter=6, head_steps=8), "pocket/var": {}, "tiny": {}}
KINDS = [
    ("tiny", "ar"),
    ("tiny", "speculative"),
    ("tiny", "lantern++"),
    ("tiny", "sjd"),
    ("pocket/var", "ar"),
    ("pocket/var", "code(n=2)"),
    ("pocket/var", "code(n=2, release=true)"),
    ("pocket/mar", "ar"),
    ("pocket/mar", "cspd"),
    ("pocket/mar", "cspd(variant=release)"),
]


@pytest.fixture(scope="module")
def opened(tiny):
    """Pipelines by name."""
    found = {}

    def pipe(name):
        if name not in found:
            place = tiny if name == "tiny" else name
            found[name] = open_pictures(place, "ar", {"dtype": torch.float32}, "alone")
            found[name].set_progress_bar_config(disable=True)
        return found[name]

    return pipe


def same(one, other):
    return np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("name", "method"), KINDS)
def test_every_picture_of_a_call_is_drawn_again_from_its_file(
    opened, tmp_path, name, method, invariant
):
    pipe = opened(name)
    method = parse_methods(pipe.registry, method)[0]
    count = 4 if method.one_generator else 5
    context = batch_invariant if invariant else nullcontext
    with context():
        out = pipe(
            classes=[i % 3 for i in range(count)],
            seed=7 if method.one_generator else [7, 3, 3, 8, 1],
            method=method,
            batch_size=count if method.one_generator else 2,
            **SHORT[name],
        )
    kinds = ["png", "webp", "jpg", "jpeg", "png"][:count]
    files = [tmp_path / f"{i}.{kind}" for i, kind in enumerate(kinds)]
    out.save(*files)
    assert not list(tmp_path.glob("*.part"))
    for file, image in zip(files, out.images, strict=True):
        assert same(draw_again(checked_record(file), pipe), image)
    record = read_record(files[2])
    alone = invariant and pipe.batch_invariant and not method.one_generator
    assert ("batch" in record) is not alone
    assert record["seed"] == (7 if method.one_generator else 3)
    others = {k: v for k, v in record.items() if k != "batch"} | {"seed": 12345, "place": 0}
    assert not same(draw_again(others, pipe), out.images[2])


@pytest.mark.parametrize("name", SHORT)
def test_pictures_know_what_the_users_torch_was_set_to(opened, tmp_path, name):
    """What rounds otherwise is recorded; a default dtype changes nothing."""
    pipe = opened(name)
    draw = functools.partial(pipe, classes=[0, 2], seed=[3, 4], **SHORT[name])
    plain = draw().images
    settings = [
        {"autocast": "bfloat16"},
        {"float32_matmul": "medium"},  # which some processors alone heed
        {"autocast": "bfloat16", "float32_matmul": "high"},
    ]
    for setting in settings:
        with set_as_recorded(setting, "cpu"), batch_invariant():
            out = draw()
        assert "autocast" not in setting or not all(map(same, out.images, plain))
        out.save(*(files := [tmp_path / "0.png", tmp_path / "1.png"]))
        for file, image in zip(files, out.images, strict=True):
            record = checked_record(file)
            assert {k: v for k, v in record.items() if k in settings[-1]} == setting
            assert same(draw_again(record, pipe), image)
    torch.set_default_dtype(torch.float64)
    try:
        assert all(map(same, draw().images, plain))
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_name_of_a_method_reads_as_it_was():
    """Records hold names with options: what is typed must make the same method."""
    for registry, found in (
        (FAMILIES["llamagen"].methods, IMAGES),
        (FAMILIES["var"].methods, SCALES),
        (FAMILIES["mar"].methods, CONTINUOUS),
    ):
        for method in found.values():
            text = method if isinstance(method, str) else label(method)
            (made,) = parse_methods(registry, text)
            assert made == method or made.name == method
            assert parse_methods(registry, label(made)) == [made]


@pytest.fixture(scope="module")
def drawn(tiny, tmp_path_factory):
    """Three pictures of the command line."""
    out = tmp_path_factory.mktemp("drawn")
    given = ["--class", "2", "--class", "1", "--class", "1", "--method", "speculative"]
    succeed("generate", str(tiny), *given, "--seed", "5", "--dtype", "float32", "--out", str(out))
    return out


def test_the_command_draws_a_picture_again(tiny, drawn, tmp_path):
    for i, file in enumerate(sorted(drawn.glob("*.png"))):
        told = as_json("generate", "--like", str(file), "--out", str(tmp_path))
        assert told["equal"] and not told["differences"]
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
        assert read_record(file)["seed"] == 5 + i
    run = json.loads((drawn / "run.json").read_text())
    assert run["seeds"] == [5, 6, 7] and run["versions"]["torch"] == version("torch")
    record = read_record(file)
    names = ("model", "files", "processor", "versions", "dtype", "device", "threads")
    assert {name: run[name] for name in names} == {name: record[name] for name in names}
    # its own seed alone draws it where it is drawn alone
    alone = tmp_path / "alone"
    given = ["--class", "1", "--method", "speculative", "--seed", "7", "--dtype", "float32"]
    succeed("generate", str(tiny), *given, "--out", str(alone))
    (one,) = alone.glob("*.png")
    assert same(Image.open(one), Image.open(file))


def rewritten(file, place, /, **changes):
    """The picture ``file`` with ``changes`` of its record, sealed anew unless "sum" is given."""
    record = {k: v for k, v in read_record(file).items() if k != "sum"} | changes
    info = PngInfo()
    info.add_text(KEY, json.dumps(record) if "sum" in changes else sealed(record))
    with Image.open(file) as image:
        image.save(place, pnginfo=info)
    return place


def test_what_differs_is_said(drawn, tmp_path):
    file = sorted(drawn.glob("*.png"))[0]
    told = []
    versions = read_record(file)["versions"] | {"torch": "1.13"}
    other = rewritten(file, tmp_path / "older.png", versions=versions, processor="m68k", files="0")
    found = draw_like(other, tmp_path / "again", tell=told.append)
    assert found.equal and len(told) == 3
    assert found.differences[0] == f"torch was 1.13 and is {version('torch')}"
    assert "the processor was m68k and is" in told[1] and "are others than they were" in told[2]
    other = rewritten(file, tmp_path / "seed.png", seed=99, batch=None)
    found = draw_like(other, tmp_path / "again", tell=told.append)
    assert not found.equal and "not equal to it: nothing else differs" in str(found)


def test_bad_records_are_one_sentence(drawn, tmp_path):
    file = sorted(drawn.glob("*.png"))[0]
    edited = rewritten(file, tmp_path / "edited.png", seed=6, sum=read_record(file)["sum"])
    bare = tmp_path / "bare.png"
    Image.open(file).save(bare)
    text = tmp_path / "text.png"
    text.write_text("no picture")
    card = rewritten(file, tmp_path / "card.png", device="cuda:7")
    numbers = rewritten(file, tmp_path / "numbers.png", device="meta")
    camera = tmp_path / "camera.tiff"
    exif = Image.Exif()
    exif[DESCRIPTION] = "OLYMPUS DIGITAL CAMERA"
    Image.open(file).save(camera, exif=exif)
    other = tmp_path / "other.tiff"
    exif[DESCRIPTION] = sealed({k: v for k, v in read_record(file).items() if k != "sum"})
    Image.open(file).save(other, exif=exif)
    for place, said in (
        (edited, "was edited since"),
        (bare, "got one without a record"),
        (text, "must be a picture that specmm saved"),
        (card, "device must be one of this machine's"),
        (numbers, "must hold device as specmm writes it, got 'meta'"),
        (camera, "got one without a record"),
        (other, "must be PNG, WebP or JPEG, got TIFF"),
    ):
        with pytest.raises(ValueError, match=said) as told:
            draw_like(place, tmp_path / "again")
        assert "\n" not in str(told.value)
    with pytest.raises(ValueError, match="whose files are others than those of pocket/var"):
        draw_like(file, tmp_path, "pocket/var")
    with pytest.raises(ValueError, match="unknown pocket model 'pocket/nope'"):
        draw_like(file, tmp_path, "pocket/nope")
    before = file.read_bytes()
    with pytest.raises(ValueError, match="is there already; choose another --out"):
        draw_like(file, drawn)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, [1]) for name in KINDS_OF],
        *[("options", {"output_type": "latent"}), ("options", {"method": "ar"})],
        *[("threads", 10**5), ("rows", 0), ("rows", 10**12), ("place", 5), ("place", -1)],
        *[("batch", [1]), ("batch", [{"class": "heart"}]), ("batch", "x"), ("drafter", 3)],
        *[("autocast", [1]), ("autocast", "float64"), ("autocast", None)],
        *[("float32_matmul", "x"), ("float32_matmul", "highest")],
        *[("dtype", "load"), ("class", 3), ("class", None), ("method", "ar(x=1)")],
    ],
)
def test_records_of_strangers_are_one_sentence(drawn, tmp_path, name, value):
    """Sealed as ours are, but with other fields: nothing is drawn, run or written."""
    file = sorted(drawn.glob("*.png"))[0]
    odd = [rewritten(file, tmp_path / "odd.png", **{name: value})]
    if name in KINDS_OF:
        bare = {k: v for k, v in read_record(file).items() if k not in ("sum", name)}
        info = PngInfo()
        info.add_text(KEY, sealed(bare))
        Image.open(file).save(tmp_path / "bare.png", pnginfo=info)
        odd.append(tmp_path / "bare.png")
    said = {"options": "option", "method": "method|option"}.get(name, name)
    for place in odd:
        with pytest.raises(ValueError, match=said) as told:
            draw_like(place, tmp_path / "again")
        assert "\n" not in str(told.value)
        assert not (tmp_path / "again" / place.name).exists()


def test_options_beside_like_are_refused(drawn, tmp_path):
    file = sorted(drawn.glob("*.png"))[0]
    for option in (["--seed", "3"], ["-n", "2"], ["--method", "ar"], ["--class", "2"]):
        said = refused("generate", "--like", str(file), *option)
        assert "does not serve pictures that are drawn --like one" in said


def test_saving_says_what_it_takes(opened, tmp_path):
    out = opened("tiny")(classes=[1], seed=0)
    for files, said in (
        ([], "files must be one for each of 1 pictures, got 0"),
        ([tmp_path / "a.gif"], "unknown kind of picture 'gif'"),
    ):
        with pytest.raises(ValueError, match=said):
            out.save(*files)
    with pytest.raises(ValueError, match="output_type must be 'pil' to save pictures"):
        opened("tiny")(classes=[1], seed=0, output_type="np").save(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_picture_is_not_drawn_again(opened, tmp_path):
    def stop(pipe, step, fewest, state):
        pipe._interrupt = True
        return state

    opened("tiny")(classes=[1], seed=0, callback_on_step_end=stop).save(tmp_path / "part.png")
    with pytest.raises(ValueError, match="was interrupted: it shows what was drawn until then"):
        draw_like(tmp_path / "part.png", tmp_path / "again")
