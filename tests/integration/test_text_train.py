"""The training commands of text models from end to end: a target, its drafters, and what they draft."""

import json

import pytest
import torch
import torch._dynamo.config
from typer.testing import CliRunner

import specmm
from specmm.cli import app
from specmm.diffusion_drafters.data import code

TEXT = "".join(f"def add_{i}(a, b):\n    return a + b + {i}\n\n\n" for i in range(300))
DRAFTERS = {
    "deer": ["--layers", "1", "--block", "4", "--rows", "8", "--batch", "2", "--drawn", "0.5"],
    "dflash": ["--layers", "1", "--block", "4", "--rows", "8", "--batch", "2", "--drawn", "0.5", "--read", "2"],
    "diffusion": ["--layers", "1", "--dim", "16", "--heads", "2", "--batch", "2"],
    "proxy": ["--least", "1"],
}


def run(*args):
    done = CliRunner().invoke(app, [*map(str, args), "--json"])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model trained for three steps on one text, with everything trained for it."""
    place = tmp_path_factory.mktemp("coder")
    (place / "text.py").write_text(TEXT)
    (place / "held-out.py").write_text(TEXT.upper())
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(disable=True):
        patch.setattr(code, "find_files", lambda: {name: place / name for name in ("text.py", "held-out.py")})
        patch.setattr(code, "is_held_out", lambda name: name == "held-out.py")
        sizes = ["--dim", "16", "--layers", "3", "--heads", "2", "--vocabulary", "300", "--batch", "2"]
        found = run("train", "coder", "--steps", 3, "--out", place / "run", *sizes)
        model = place / "run" / "model"
        assert found["outputs"] == [str(model)] and found["train_tokens"] > 1000
        for kind, options in DRAFTERS.items():
            steps = [] if kind == "proxy" else ["--steps", 2]
            run("train", kind, model, "--text", place / "text.py", *steps, *options, "--out", place / kind)
    return model


@pytest.mark.parametrize("method", ["deer", "block", "diffuspec", "specdiff"])
def test_what_was_trained_drafts(folder, method):
    pipe = specmm.TextPipeline.from_pretrained(folder)
    out = pipe("def add(", method=method, max_new_tokens=8)
    assert out.texts == pipe("def add(", max_new_tokens=8).texts and out.certificate.kind == "exact"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["deer"], "give --replace"),
        (["deer", "--replace", "--mask", "4000"], "mask token must be one of the"),
        (["proxy", "--text", "nowhere"], "got nothing at nowhere"),
        (["dflash", "--replace", "--read", "9"], "1 to the target's 3 layers, got 9"),
    ],
)
def test_mistakes(folder, args, message, tmp_path):
    done = CliRunner().invoke(app, ["train", args[0], str(folder), *args[1:], "--out", str(tmp_path)])
    assert done.exit_code == 2 and message in done.stderr
