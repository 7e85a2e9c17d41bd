"""Recipes: every config file fits what it trains, settings are checked, users' data are read."""

import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from specmm.recipes import recipe as recipes
from specmm.recipes.pictures import pictures
from specmm.recipes.recipe import Count, Open, Recipe, Share, load, train
from tests.commands import as_json, refused, run, succeed


def learn(
    *,
    model: str,
    steps: Count,
    share: Share,
    probs_weight: float,
    lr: float | None,
    text: list[Path],
    replace: bool,
    data: Open,
    recipe: Recipe,
):
    """A training that tells its settings."""
    return {
        "kind": model,
        "steps": steps,
        "outputs": [],
        "all": (share, lr, text, replace, data("x"), sorted(recipe.chosen)),
        "probs_weight": probs_weight,
    }


def read(place, more):
    return place + more


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of recipes with one in it."""
    monkeypatch.setattr(recipes, "SHIPPED", tmp_path)
    monkeypatch.setattr(recipes, "named", {"here:learn": learn, "here:read": read}.__getitem__)
    settings = 'steps = 3\nshare = 1\nprobs_weight = 1.0\ntext = []\nreplace = false\ndata = "d"'
    (tmp_path / "some.toml").write_text(
        f'# so\ntrain = "here:learn"\nopen = "here:read"\n[settings]\n{settings}\n'
    )
    return tmp_path


@pytest.mark.parametrize("name", recipes.recipes())
def test_every_recipe_sets_what_its_function_takes(name):
    """Nothing else, and all but the model, data of one's own, and what may be left out."""
    found = load(name)
    kinds = found.kinds()
    missing = {
        n
        for n, kind in kinds.items()
        if n not in found.settings and type(None) not in typing.get_args(kind)
    }
    assert set(found.settings) <= set(kinds) and missing <= {"model", "data"}
    text = recipes.recipes()[name].read_text()
    # what may be left out, too
    assert "\nrecipe = " in text or all(f"{setting} = " in text for setting in kinds)


def test_settings_are_read_as_they_are_annotated(own):
    found = train("some", model=Path("m"), steps="5", lr="1e-3", text="a", replace="True")
    assert found["kind"] == "m" and found["steps"] == 5
    wanted = (1.0, 1e-3, [Path("a")], True, "dx", ["lr", "model", "replace", "steps", "text"])
    assert found["all"] == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "must be given model, got none"),
        ({"model": "m", "step": 3}, "unknown setting of recipe some 'step'; did you mean 'steps'"),
        ({"model": "m", "steps": 0}, "steps must be at least 1, got 0"),
        ({"model": "m", "steps": True}, "steps must be a whole number, got True"),
        ({"model": "m", "steps": "2.5"}, "steps must be a whole number, got '2.5'"),
        ({"model": "m", "share": "1.5"}, "share must be from 0 to 1, got 1.5"),
        ({"model": "m", "replace": "yes"}, "replace must be true or false, got 'yes'"),
    ],
)
def test_settings_that_do_not_fit(own, settings, message):
    with pytest.raises(ValueError, match=message):
        train("some", **settings)


def test_a_config_file_of_ones_own_stands_on_a_recipe(own):
    file = own / "mine" / "m.toml"
    file.parent.mkdir()
    file.write_text('recipe = "some"\n[settings]\nmodel = "mine"\nsteps = 9\n')
    done = succeed("train", file, "--set", "steps=7", "share=0.5", "--json")
    found = json.loads(done.stdout)
    assert found["steps"] == 7 and found["all"][0] == 0.5 and done.stderr == ""
    assert as_json("train some m --set text=a text=b")["all"][2] == ["a", "b"]
    assert train(str(file))["all"][-1] == ["model", "steps"]
    for text, message in (
        ("[", "must be TOML"),
        ('train = "os:system"', 'must hold recipe = "NAME"'),
        ("steps = 3", "must hold recipe"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load(str(file))


def test_recipes_are_listed_and_shown(own):
    listed = run("train").stdout
    assert "some" in listed and "so\n" in listed
    assert run("train some --show").stdout == (own / "some.toml").read_text()
    assert "KEY=VALUE, got 'steps'" in refused("train some --set steps")


def test_without_a_checkout_its_recipes_are_not_there(tmp_path, monkeypatch):
    assert {"coder", "emoji-drafter", "deer"} <= set(recipes.recipes())
    monkeypatch.setattr(recipes, "CHECKOUT", tmp_path)
    assert set(recipes.recipes()) == {
        *("deer", "dflash", "diffusion", "drafter", "eagle3", "msd", "mtp", "proxy")
    }


@pytest.mark.slow
def test_those_of_the_checkout_run_from_anywhere(tmp_path):
    """Only ``specmm`` is on the path there."""
    (tmp_path / "specmm").symlink_to(Path(recipes.specmm.__file__).parent)
    code = "from specmm.recipes.recipe import load; print(load('coder').function().__module__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "recipes.coder\n", done.stderr


def test_pictures_in_folders_of_their_class(tmp_path):
    for name, value, sides in (("cat", 10, (8, 8)), ("1", 200, (12, 6))):
        (tmp_path / name).mkdir()
        Image.new("RGB", sides, (value,) * 3).save(tmp_path / name / "a.png")
    (tmp_path / "bird").symlink_to(tmp_path / "cat")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a.png").write_text("a copy of the notebook's")
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    found = pictures(str(tmp_path), ("dog", "bird", "cat"), 3, 4)
    assert found.labels.tolist() == [1, 1, 2] and found.images.shape == (3, 4, 4, 3)
    assert found.images.dtype == np.uint8
    assert found.images[:, 0, 0, 0].tolist() == [200, 10, 10]
    alone = pictures("", (), 3, 4)
    assert alone.images is None and alone.labels.tolist() == [0, 1, 2]
    with pytest.raises(
        ValueError, match=r"a folder of pictures for each class, got .*a\.png in none"
    ):
        pictures(str(tmp_path / "cat"), (), 3, 4)
