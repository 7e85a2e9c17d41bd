"""The recipes of text models from end to end: a target, its drafters, and what they draft."""

import json
import os
import shutil

import pytest
import torch
import torch._dynamo.config
from transformers import AutoTokenizer

import specmm
from specmm.diffusion_drafters.models.dflash import load_dflash
from specmm.diffusion_drafters.ngram import NGram
from specmm.recipes.recipe import train
from specmm.recipes.training import drawn_rows as chats
from specmm.recipes.training import texts as code
from tests.commands import as_json
from tests.tiny.chats import undrafted

TEXT = "".join(f"def add_{i}(a, b):\n    return a + b + {i}\n\n\n" for i in range(300))
DRAFTERS = {
    "deer": dict(layers=1, block=4, rows=8, batch=2, drawn=0.5),
    "dflash": dict(layers=1, block=4, rows=8, batch=2, drawn=0.5, read=2, markov=4, vocabulary=12),
    "diffusion": dict(layers=1, dim=16, heads=2, batch=2),
    "proxy": dict(least=1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model trained for three steps on one text, with everything trained for it."""
    place = tmp_path_factory.mktemp("coder")
    (place / "text.py").write_text(TEXT)
    (place / "held-out.py").write_text(TEXT.upper())
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(disable=True):
        patch.setattr(
            code, "find_files", lambda: {name: place / name for name in ("text.py", "held-out.py")}
        )
        patch.setattr(code, "is_held_out", lambda name: name == "held-out.py")
        sizes = dict(dim=16, layers=3, heads=2, vocabulary=300, batch=2)
        found = train("coder", steps=3, out=place / "run", **sizes)
        model = place / "run" / "model"
        assert found["outputs"] == [str(model)] and found["train_tokens"] > 1000
        for kind, options in DRAFTERS.items():
            steps = {} if kind == "proxy" else {"steps": 2}
            train(kind, model=model, text=place / "text.py", out=place / kind, **steps, **options)
    return model


@pytest.mark.parametrize("method", ["deer", "block", "diffuspec", "specdiff"])
@pytest.mark.slow
def test_what_was_trained_drafts(folder, method):
    pipe = specmm.TextPipeline.from_pretrained(folder)
    out = pipe("def add(", method=method, max_new_tokens=8)
    assert out.texts == pipe("def add(", max_new_tokens=8).texts and out.certificate.kind == "exact"


@pytest.mark.slow
def test_a_drafter_begins_with_another(folder, tmp_path):
    place = shutil.copytree(folder, tmp_path / "model")
    before = place / "drafters" / "block"
    begun, texts = shutil.copytree(before, tmp_path / "before"), folder.parents[1] / "text.py"
    common = dict(
        model=place, text=texts, rows=8, batch=2, steps=1, lr=0, replace=True, start=begun
    )
    with torch._dynamo.config.patch(disable=True):
        train("dflash", **common, recurrent=4, out=tmp_path / "run")
    old, new = load_dflash(begun, torch.float32), load_dflash(before, torch.float32)
    weights = new.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in old.state_dict().items())
    assert new.config.recurrent == 4 and torch.equal(new.t2d, old.t2d)
    assert new.config.layers == old.config.layers
    for added, message in (
        ({"inner": 24}, "start brings the drafter's own sizes, leave out inner"),
        ({"recurrent": 5, "start": before}, "recurrent must be the drafter's own 4 or 0, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            train("dflash", **common | added, out=tmp_path / "other")
    pipe = specmm.TextPipeline.from_pretrained(place)
    found = pipe("def a", method="block", max_new_tokens=8).texts
    assert found == pipe("def a", max_new_tokens=8).texts


@pytest.fixture
def packaged(text_folder, tmp_path, monkeypatch):
    """A folder that names a package in place of weights, which lie unpacked already."""
    monkeypatch.setenv("HOME", str(tmp_path))
    unpacked = tmp_path / ".cache" / "specmm" / "unpacked" / "tiny.gguf"
    place = tmp_path / "packaged"
    undrafted(text_folder, unpacked)
    place.mkdir()
    facts = {"package": "no_such_package", "file": unpacked.name, "install": ""}
    facts["mask_token"] = "<|mask|>"
    (place / "package.json").write_text(json.dumps(facts))
    return place


@pytest.mark.slow
def test_packaged_targets_get_proxies_and_diffusion_drafters(packaged, tmp_path):
    text = tmp_path / next(name for i in range(200) if code.is_held_out(name := f"{i}.txt"))
    text.write_text(TEXT)
    with torch._dynamo.config.patch(disable=True):
        kept = train("proxy", model=packaged, **DRAFTERS["proxy"], text=text, out=tmp_path / "a")
        options = dict(model=packaged, steps=1, text=text, out=tmp_path / "b")
        train("diffusion", **DRAFTERS["diffusion"], **options)
    file = packaged / "drafters" / "diffusion" / "ngram.safetensors"
    assert kept["outputs"] == [str(file)] and len(NGram.load(file).counts) > 20
    plain, drafted = (
        as_json("complete", packaged, "-p", "def", "--method", m) for m in ("ar", "diffuspec")
    )
    assert drafted["outputs"] == plain["outputs"] and drafted["rounds"] > 0


@pytest.fixture
def talker(folder, tmp_path):
    """The model with a chat template, its folder."""
    place = shutil.copytree(folder, tmp_path / "talker")
    shutil.rmtree(place / "drafters")
    words = AutoTokenizer.from_pretrained(place)
    words.chat_template = "{% for m in messages %}def {{ m['content'] }}\n{% endfor %}"
    words.save_pretrained(place)
    return place


@pytest.mark.slow
def test_conversations_are_questions_and_answers_of_the_models_own(talker, tmp_path, monkeypatch):
    for name, value in {"CHATS_AT_ONCE": 3, "QUESTION": 6, "ANSWER": 8}.items():
        monkeypatch.setattr(chats, name, value)
    pipe = specmm.TextPipeline.from_pretrained(talker)
    rows = chats.drawn_chats(pipe, 2, 40, tmp_path)
    asked = (
        pipe(["def "] * 3, max_new_tokens=6, temperature=chats.QUESTION_TEMPERATURE, seed=[0, 1, 2])
        .texts[0]
        .strip()
    )
    wanted = (
        pipe.encode(asked, chat=True)[0]
        + pipe(asked, chat=True, max_new_tokens=8).tokens[0].tolist()
    )
    assert rows.shape == (2, 40) and rows.flatten()[: len(wanted)].tolist() == wanted
    files = sorted(tmp_path.glob("chats-*/*.pt"))
    assert len(files) > 1
    files[-1].unlink()
    assert torch.equal(chats.drawn_chats(pipe, 2, 40, tmp_path), rows)  # goes on where it was
    assert not torch.equal(chats.drawn_chats(pipe, 2, 40, tmp_path, seed=1), rows)


def test_models_that_cannot_converse(talker, tmp_path, monkeypatch):
    pipe = specmm.TextPipeline.from_pretrained(talker)
    pipe.tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    with pytest.raises(ValueError, match="chat template must begin with more than the question"):
        chats.drawn_chats(pipe, 1, 8, tmp_path)
    pipe.tokenizer.chat_template = "Q {{ messages[0]['content'] }}"
    monkeypatch.setattr(chats, "QUESTION", 1)
    monkeypatch.setattr(pipe.texts, "decode", lambda *ids: "")
    said = f"must ask questions of its own, got none in {chats.CHATS_AT_ONCE}"
    with pytest.raises(ValueError, match=said):
        chats.drawn_chats(pipe, 1, 8, tmp_path)


@pytest.mark.slow
def test_a_drafter_learns_from_conversations(talker, tmp_path):
    with torch._dynamo.config.patch(disable=True):
        sizes = dict(layers=1, block=3, rows=2, batch=2, read=1, steps=1)
        train("dflash", model=talker, chats=True, **sizes, out=tmp_path / "run")
    pipe = specmm.TextPipeline.from_pretrained(talker)
    found = pipe("x", chat=True, method="block", max_new_tokens=6).texts
    assert found == pipe("x", chat=True, max_new_tokens=6).texts


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("deer", {}, "give --set replace=true"),
        ("deer", {"replace": True, "mask": 4000}, "mask token must be one of the"),
        ("proxy", {"text": "nowhere"}, "got nothing at nowhere"),
        ("proxy", {"text": os.devnull}, "readable as UTF-8 and not empty, got none at"),
        (
            "dflash",
            {"replace": True, "read": 9},
            "1 to 2, the number of the target's layers before its last, got 9",
        ),
        (
            "dflash",
            {"replace": True, "chats": True, "read": 2},
            "must have a chat template for chat, got none",
        ),
        ("deer", {"replace": True, "chats": True, "text": "."}, "give text or chats, not both"),
    ],
)
def test_mistakes(folder, recipe, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(recipe, model=folder, out=tmp_path, **settings)
