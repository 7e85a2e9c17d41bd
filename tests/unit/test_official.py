"""Others' code beside ours: how it is imported, and that only equal pictures are compared."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.common import Budget, git_sha, merged, read_results, write_results
from benchmarks.official import lantern, scales
from benchmarks.official.__main__ import KEYS, NAME, compare, main, measured
from benchmarks.official.contests import Contest, open_model
from benchmarks.official.duel import Duel, Program
from specmm import methods


def clone(folder, body):
    """A folder with a package ``models`` that has the files of VAR's release."""
    for file in scales.FILES:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    return folder


def test_releases_with_modules_of_the_same_names_are_imported_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # they stay on the CPU there, too
    kept = sys.modules.get("models")
    path = list(sys.path)
    first = clone(tmp_path / "a", "import torch\nprint('loud')\nAT = torch.ones(1).cuda()\n")
    second = clone(tmp_path / "b", "from models import vqvae\nAT = 'b'\n")
    one, two = (scales.VAR_SOURCE.load(folder) for folder in (first, second))
    assert one["models.var"].AT.device.type == "cpu"
    assert two["models.var"].AT == "b" and two["models.var"].vqvae is two["models.vqvae"]
    assert sys.modules.get("models") is kept and "models.var" not in sys.modules
    assert sys.path == path and not list(tmp_path.rglob("*.pyc"))


def test_what_is_left_out_is_not_run(tmp_path):
    """LANTERN's package imports another model, and its target a text encoder."""
    texts = "models.base_models.llamagen.t5"
    for name in (*lantern.MODULES, texts):
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "models/__init__.py").write_text("import not_there_at_all")
    (tmp_path / f"{texts.replace('.', '/')}.py").write_text("import not_there_at_all")
    target = tmp_path / f"{lantern.TARGET.replace('.', '/')}.py"
    target.write_text(f"from {texts} import T5Embedder\nfrom models.drafters import choices")
    kept = sys.modules.get("models")
    release = lantern.SOURCE.load(tmp_path)
    assert release[lantern.TARGET].T5Embedder is None
    assert release[lantern.TARGET].choices is release[lantern.CHOICES]
    assert sys.modules.get("models") is kept and texts not in sys.modules


@pytest.mark.parametrize(
    "body, said", [(None, "without models/var.py"), ("import not_there_at_all", "not_there_at_all")]
)
def test_a_wrong_folder_is_named_in_one_sentence(tmp_path, body, said):
    if body is not None:
        clone(tmp_path, body)
    with pytest.raises(ValueError, match=said) as caught:
        scales.VAR_SOURCE.load(tmp_path)
    assert "FoundationVision/VAR" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_programs_are_timed_in_turn_once_their_greedy_pictures_agree():
    pipe = open_model("pocket/var")
    sampling = pipe.target(temperature=1.0)
    plain, coarse = (
        scales.ours(pipe, method, sampling) for method in (methods.AR(), methods.CoDe(7))
    )
    duel = Duel("ar", plain, coarse, 2, 32)
    row = compare(duel, 2, Budget())
    assert row["token_equal"] == 1 and row["pixel_gap"] == 0 and row["repeats"] == 2
    assert min(row["theirs"], row["ours_mib"]) > 0
    assert row["speedup"] is row["speedup_low"] is row["speedup_high"] is None  # of two repeats
    other = scales.ours(pipe, methods.CoDe(0), replace(sampling, cfg=0.0))
    with pytest.raises(ValueError, match="must draw the release's greedy tokens, got"):
        compare(Duel("ar", plain.fresh(), other, 2, 32), 1, Budget())
    with pytest.raises(ValueError, match=r"must compute what the release does within 0\.0001, got"):
        compare(Duel("ar", plain, plain, 2, 32, {"network_gap": 2e-4}), 1, Budget())


def test_a_ratio_is_the_median_of_pairs_and_needs_five():
    def row(*pairs):
        theirs, ours = (Program(None, None, list(seconds)) for seconds in zip(*pairs, strict=True))
        return Duel("ar", theirs, ours, 1, 2).row()

    pairs = [(1.0, 1.0), (3.0, 1.0), (8.0, 4.0), (10.0, 5.0)]  # medians: 5.5 over 2.5
    assert row(*pairs)["speedup"] is None
    found = row(*pairs, (20.0, 8.0))
    assert found["speedup_low"] == found["speedup"] == 2.0 and found["speedup_high"] == 2.5


def test_a_row_is_measured_where_it_is_wanted_and_both_can_draw_as_many(tmp_path, monkeypatch):
    ran = []

    def contest(*_):
        for name in ("ar", "lantern"):
            yield Contest("LANTERN", name, Program(None, None), Program(None, None), 2, {}, most=1)

    def compared(duel, *_):
        ran.append((duel.method, duel.batch))
        return {"method": duel.method, "batch": duel.batch}

    monkeypatch.setattr("benchmarks.official.__main__.contests", contest)
    monkeypatch.setattr("benchmarks.official.__main__.compare", compared)
    call = dict(lantern=tmp_path, model=["m"], n="5", batches="1,16", out=tmp_path)
    call |= dict(threads=torch.get_num_threads())
    main(**call)
    assert ran == [("ar", 1), ("lantern", 1)]
    main(**call, only="ar")
    assert ran[2:] == [("ar", 1)]


def test_a_row_keeps_its_own_commit_and_date(tmp_path):
    names = {"release": "VAR", "model": "m", "method": "ar", "threads": 2}
    earlier = names | {"batch": 1} | measured() | {"git": "earlier"}
    write_results(tmp_path, NAME, [earlier], {})
    now = names | {"batch": 16} | measured()
    assert [row["git"] for row in merged(tmp_path, NAME, [now], KEYS)] == ["earlier", git_sha()]
    assert all(now[name] for name in ("machine", "torch", "date"))
    table = Path(__file__).parents[2] / "benchmarks" / "results"
    assert all(row["git"] and row["date"] for row in read_results(table, NAME)["rows"])


def test_a_release_must_be_given(tmp_path):
    with pytest.raises(ValueError, match="at least one release must be given"):
        main(out=tmp_path)
