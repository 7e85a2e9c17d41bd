"""The doctor: its forecast is what decoding has, each way of reading a drafter wrongly is undone by
the change of its name, and what it says and refuses.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.doctor import decoded, spoils
from specmm import zoo as pocket
from specmm.diffusion_drafters.models.dflash import DFlash
from specmm.hf.prompt import VLMPrompt
from specmm.recipes import doctor, misreadings
from specmm.recipes.dflash import build_block
from specmm.recipes.doctor import diagnose
from specmm.recipes.following import evidence, followed, reading_of
from specmm.recipes.msd import msd_config
from specmm.vlm.msd import MSDHead
from tests.commands import as_json, refused, succeed
from tests.noisy import noisy
from tests.tiny.parts import shaken
from tests.unit.vlm.test_eagle3 import KINDS, MROPE, ROWS, head_for

HEADS = {
    "llava": {"plain": {}, "own tables": KINDS["own tables"], "pictures": KINDS["pictures"]},
    "qwen2-vl": {"m-rope": MROPE},
}


@pytest.fixture(
    params=[
        *((m, k) for m, kinds in HEADS.items() for k in kinds),
        ("llava", "msd"),
        ("llava", "block"),
    ]
)
def case(request, zoo):
    """What a tiny model answered to texts with pictures, and a random head of it."""
    name, kind = request.param
    model = zoo.model(name)
    for last in range(5, 20):  # until no answer has tokens that stand for pictures
        prompt = VLMPrompt(zoo.batch(name, [[*row, last] for row in ROWS]), 24)
        seen = evidence(model, prompt, [])
        if bool((seen.long == 24).all()):
            break
    if kind == "msd":
        torch.manual_seed(1)
        head = shaken(MSDHead(msd_config(seen.target)))
    elif kind == "block":
        made = build_block(seen.target, 2, 5, 3, read=1, markov=4).config
        head = shaken(DFlash(replace(made, layers=(0, 1), normed=False)))
    else:
        head = head_for(seen.target, **HEADS[name][kind])
    return head.eval(), seen, prompt


def test_the_forecast_is_what_decoding_has(case):
    head, seen, prompt = case
    found = followed(seen, reading_of(head, seen.target))
    assert found.tau == pytest.approx(decoded(head, seen, prompt, []), rel=1e-6)
    assert 1 <= found.sampled < 6 and all(0 <= share <= 1 for share in found.by_depth)
    assert all(0 <= share <= 1 for share in found.parts().values())


def test_every_way_of_reading_it_wrongly_is_undone_by_its_change(case):
    head, seen, _ = case
    reading = reading_of(head, seen.target)
    own = followed(seen, reading, 2).overlap
    found = 0
    for name, wrong in spoils(reading, head, seen):
        assert not torch.allclose(followed(seen, wrong, 2).overlap, own, atol=1e-5), name
        back = [
            change.reading for change in misreadings.changes(wrong, seen) if change.named == name
        ]
        assert back, f"nothing is tried that is called {name}"
        roots = seen.roots
        undone = followed(seen, back[0], 2).overlap[:, roots]
        torch.testing.assert_close(undone, own[:, roots], rtol=1e-4, atol=1e-5, msg=name)
        found += 1
    assert found >= 9


def chats(folder, count=10):
    rows = []
    for i in range(count):
        noisy((96, 96), i).save(folder / f"{i}.png")
        asked = "What is it?" if i % 2 else f"What do you see in picture {i}?"
        rows.append({"question": asked, "answer": "I see noise.", "image": f"{i}.png"})
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_what_it_says_of_a_drafter(tmp_path, monkeypatch):
    """pocket/llava's own, as it is and with its halves swapped."""
    file = chats(tmp_path)
    monkeypatch.setattr(misreadings, "WINDOWS", ())
    monkeypatch.setattr(misreadings, "THETAS", ())
    words = ["doctor", "pocket/llava", "--data", str(file), "--questions", "2"]
    said = succeed(*words).stdout
    assert "tokens a round: " in said and "No other way of reading it is worth more" in said
    facts = as_json(*words)
    assert facts["change"] is None and facts["tau"] > 1 and len(facts["by_depth"]) == 5
    spoilt = tmp_path / "spoilt"
    shutil.copytree(pocket.POCKET / "llava" / "drafters" / "msd", spoilt)
    state = load_file(spoilt / "model.safetensors")
    state["fc.weight"] = torch.cat(state["fc.weight"].chunk(2, 1)[::-1], 1)
    save_file(state, spoilt / "model.safetensors")
    said = succeed(*words, "--drafter", str(spoilt)).stdout
    assert "Read it with state before embedding: it reads token and state" in said


def test_what_it_refuses(tmp_path):
    assert "data must be given of chats that show pictures" in refused("doctor", "pocket/llava")
    assert "must have one drafter of eagle3, msd, block beside it, got none" in refused(
        "doctor", "pocket/smollm2"
    )
    deer = str(pocket.POCKET / "coder" / "drafters" / "deer")
    said = refused("doctor", "pocket/coder", "--drafter", deer)
    assert "read the target's states (eagle3, msd, block), got" in said and "method deer" in said
    assert "temperature is for --trace" in refused("doctor", "pocket/coder", "--temperature", "1")


def test_a_weak_drafter_is_named_weak(case):
    """A random head: no change is worth much, none is named for noise alone."""
    head, seen, _ = case
    found = diagnose(seen, reading_of(head, seen.target), 1)
    assert found.changes == sorted(found.changes, key=lambda pair: -pair[1].sampled)
    best = found.best
    assert best is None or best[1].sampled > doctor.WORTH * found.own.sampled
