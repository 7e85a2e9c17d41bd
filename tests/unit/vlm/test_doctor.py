"""The doctor: its forecast is what decoding has, each way of reading a drafter wrongly is undone by
the change of its name, and what it says and refuses.
"""

import json
import shutil
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.doctor import decoded, spoils
from specmm import zoo as pocket
from specmm.diffusion_drafters.models.dflash import DFlash
from specmm.diffusion_drafters.models.dflash_config import Reach
from specmm.hf.drafters.mtp_layers import MtpLayers, layers_of
from specmm.hf.loading.pretrained import load_model
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.recipes import doctor, misreadings
from specmm.recipes.dflash import build_block
from specmm.recipes.doctor import diagnose
from specmm.recipes.following import evidence, followed, reading_of
from specmm.recipes.msd import msd_config
from specmm.vlm.msd import MSDHead
from tests.commands import as_json, refused, succeed
from tests.integration.conftest import save_text
from tests.integration.mtp_rounds import PROMPTS
from tests.noisy import noisy
from tests.tiny import mtp_models
from tests.tiny.chats import undrafted
from tests.tiny.parts import shaken
from tests.unit.vlm.test_eagle3 import KINDS, MROPE, ROWS, head_for

HEADS = {
    "llava": {"plain": {}, "own tables": KINDS["own tables"], "pictures": KINDS["pictures"]},
    "qwen2-vl": {"m-rope": MROPE},
}


REACHES = {
    "block": (),
    "windows": (Reach(3), Reach(2, causal=True)),
    "from the anchor": (Reach(4, moving=False), Reach(causal=True)),
}
MTP = {"glm": 1, "deepseek": 3, "mimo": 2, "qwen3.5 text": 1}
CASES = [(model, kind) for model, kinds in HEADS.items() for kind in kinds]
CASES += [("llava", kind) for kind in ("msd", *REACHES)]
CASES += [(name, "mtp") for name in MTP]


@pytest.fixture(scope="module")
def mtp_model(tmp_path_factory):
    """Tiny models with MTP layers."""

    @cache
    def made(name):
        folder = mtp_models.save(name, tmp_path_factory.mktemp("mtp"), MTP[name])
        model = load_model(AutoModelForCausalLM, folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        with torch.no_grad():  # or a norm before it and after it are one
            model.get_decoder().norm.weight.copy_(torch.linspace(0.3, 1.7, 32))
        return model

    return made


@pytest.fixture(params=CASES, ids=str)
def case(request, zoo, mtp_model):
    """What a tiny model answered to texts with pictures, and a random head of it."""
    name, kind = request.param
    if kind == "mtp":
        model = mtp_model(name)
        prompt = VLMPrompt(padded(PROMPTS), 24)
        return layers_of(model), evidence(model, prompt, []), prompt
    model = zoo.model(name)
    for last in range(5, 20):  # until no answer has tokens that stand for pictures
        prompt = VLMPrompt(zoo.batch(name, [[*row, last] for row in ROWS]), 24)
        seen = evidence(model, prompt, [])
        if bool((seen.long == 24).all()):
            break
    if kind == "msd":
        torch.manual_seed(1)
        head = shaken(MSDHead(msd_config(seen.target)))
    elif kind in REACHES:
        made = build_block(seen.target, 2, 5, 3, read=1, markov=4).config
        head = shaken(DFlash(replace(made, layers=(0, 1), normed=False, reaches=REACHES[kind])))
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
    assert found >= (6 if isinstance(head, MtpLayers) else 9)


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
    assert "data must be chats that show pictures" in refused("doctor", "pocket/llava")
    coder, alone = pocket.POCKET / "coder", tmp_path / "model"
    undrafted(coder, alone)
    said = refused("doctor", str(alone))
    assert "must have one drafter of eagle3, msd, block, mtp beside it, got none" in said
    deer = str(coder / "drafters" / "deer")
    said = refused("doctor", "pocket/coder", "--drafter", deer)
    assert (
        "read the target's states (eagle3, msd, block, mtp), got" in said and "method deer" in said
    )
    assert "temperature is for --trace" in refused("doctor", "pocket/coder", "--temperature", "1")


def test_the_layers_of_the_checkpoint_are_examined(tmp_path, monkeypatch):
    """They are the target's own drafter, where none lies beside it."""
    folder = mtp_models.save("glm", tmp_path / "glm")
    questions = doctor.Questions(VLMPrompt(padded(PROMPTS), 6), [], lambda: iter(()))
    monkeypatch.setattr(doctor, "asked", lambda *_: questions)
    for drafter in (None, str(folder)):
        found = doctor.examined(str(folder), drafter)
        assert found.kind == "mtp" and found.place == folder
    assert found.diagnosis().own.tau > 1


def test_a_weak_drafter_is_named_weak(case):
    """A random head: no change is worth much, none is named for noise alone."""
    head, seen, _ = case
    found = diagnose(seen, reading_of(head, seen.target), 1)
    assert found.changes == sorted(found.changes, key=lambda pair: -pair[1].sampled)
    best = found.best
    assert best is None or best[1].sampled > doctor.WORTH * found.own.sampled


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def test_questions_are_asked_otherwise(tmp_path, monkeypatch):
    """With and without system prompt and thinking, where the template knows them."""
    folder = tmp_path / "model"
    folder.mkdir()
    words = AutoTokenizer.from_pretrained(save_text(folder))
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    told = {"role": "system", "content": "Write Python."}
    rows = [
        [told, {"role": "user", "content": f"add {i}"}, {"role": "assistant", "content": "x + 1"}]
        for i in range(6)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    found = doctor.examined(str(folder), None, [str(file)], 2).questions
    own, others = found.prompt, dict(found.others())
    without, system, thinking = others.values()
    assert list(others) == [
        "without a system prompt",
        "with the system prompt 'You are a helpful assistant.'",
        "with thinking",
    ]
    texts = [words.decode(prompt.rows()[0]) for prompt in (own, without, system, thinking)]
    asked = texts[0].removeprefix("system:Write Python.<|end|>")
    assert asked.startswith("user:add") and texts[1] == asked
    assert texts[2] == f"system:{doctor.SYSTEM}<|end|>{asked}"
    assert texts[3] == f"{texts[0]}<think>"
    monkeypatch.setattr(misreadings, "changes", lambda *_: [])
    monkeypatch.setattr(doctor, "changes", lambda *_: [])
    words = ["doctor", str(folder), "--data", str(file), "--questions", "2"]
    facts = as_json(*words)
    assert [one["how"] for one in facts["asked"]] == list(others)
    assert "asked otherwise" in succeed(*words).stdout


def test_a_better_way_to_ask_is_told():
    kept = [SimpleNamespace(sampled=value) for value in (2.0, 2.02, 2.5)]
    asked = [("a", kept[1]), ("b", kept[2])]
    assert doctor.Diagnosis(kept[0], [], asked).better_asked == asked[1]
    assert doctor.Diagnosis(kept[0], [], asked[:1]).better_asked is None
