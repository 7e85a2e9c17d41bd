"""MTP layers of a checkpoint are fine-tuned as they draft, written, and read again."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from specmm import TextPipeline
from specmm.core.decode import decode
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.tree import TreeShape
from specmm.hf.drafters.mtp import MtpDrafter
from specmm.hf.drafters.mtp_layers import layers_of, load_layers, save_layers
from specmm.hf.loading.pretrained import load_model
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.recipes.features import RolledMtp
from specmm.recipes.recipe import train
from specmm.runs.export import export
from specmm.verify import Recursive
from tests.tiny.mtp_models import KINDS, save

PROMPT = [9, 20, 31, 12, 25, 8, 17]
DRAFTS = 3


@pytest.fixture
def model_of(tmp_path):
    def found(name, count):
        folder = save(name, tmp_path / name, count)
        return folder, load_model(AutoModelForCausalLM, folder, dtype=torch.float32).eval()

    return found


class Watched(MtpDrafter):
    """Keeps the first chain."""

    def propose(self, feedback, uniforms):
        tree = super().propose(feedback, uniforms)
        self.first = getattr(self, "first", tree)
        return tree


@pytest.mark.parametrize(("name", "count"), [("glm", 1), ("deepseek", 3)])
def test_a_rollout_is_what_drafting_computes(model_of, name, count):
    _, model = model_of(name, count)
    target = VLMTarget(model, Processor(0.0))
    layers = layers_of(model)
    drafter = Watched(layers, target, TreeShape.chain(DRAFTS), False)
    prompt = VLMPrompt({"input_ids": torch.tensor([PROMPT])}, 8)
    for _ in decode(target, drafter, Recursive(), prompt, 4, Uniforms.from_seeds([0])):
        pass
    root, *drafts = drafter.first.tokens[0].tolist()
    text = torch.tensor([[*PROMPT, root, *drafts]])
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=text).last_hidden_state
        embeddings = target.embed(text.roll(-1, 1))
        rolled = RolledMtp(layers, target, DRAFTS)
        past = DynamicCache()
        found = []
        for step in range(DRAFTS):
            states = rolled.advance(step, embeddings, hidden, past)
            found.append(int(rolled.logits(states)[0, len(PROMPT) - 1 + step].argmax()))
            hidden = torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))
    assert found == drafts


@pytest.mark.parametrize("name", ["glm", "qwen3.5 text"])
def test_what_was_fine_tuned_is_read_again(model_of, tmp_path, name):
    _, model = model_of(name, 1)
    layers = layers_of(model)
    with torch.no_grad():
        for weight in layers.model.layers.parameters():
            weight.add_(1)
    save_layers(layers, tmp_path / "tuned", model)
    again = load_layers(tmp_path / "tuned", model)
    for (key, wanted), (_, found) in zip(
        layers.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01, msg=key)
    facts = json.loads((tmp_path / "tuned" / "config.json").read_text())
    facts["target_fingerprint"] = "0" * 12
    (tmp_path / "tuned" / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="drafter must be of this target"):
        load_layers(tmp_path / "tuned", model)


@pytest.mark.slow
def test_the_recipe(model_of, tmp_path):
    folder, _ = model_of("glm", 1)
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g h " * 400)
    options = dict(text=text, rows=4, drawn=0.5, batch=2, scenes=1, lr=1e-3)
    found = train("mtp", model=folder, steps=12, out=tmp_path / "run", **options)
    assert found["outputs"] == [str(folder / "drafters" / "mtp")]
    curve = (tmp_path / "run" / "loss.csv").read_text().splitlines()
    assert curve[0].startswith("step,loss,overlap")
    pipe = TextPipeline.from_pretrained(folder, method="mtp")
    assert pipe.drafter("mtp") is not None  # those that were fine-tuned, not the checkpoint's
    drafted = pipe("a b c", max_new_tokens=12)
    assert drafted.texts == pipe("a b c", method="ar", max_new_tokens=12).texts


def test_rollouts_that_cannot_be(model_of):
    _, model = model_of("deepseek", 3)
    with pytest.raises(ValueError, match="rollout must be at most the 3 MTP layers, got 5"):
        RolledMtp(layers_of(model), VLMTarget(model, Processor()), 5)


def test_a_model_without_layers_is_refused_before_it_answers(text_folder, tmp_path, monkeypatch):
    shutil.copytree(text_folder, tmp_path / "model")
    monkeypatch.setattr("specmm.recipes.source.Source.lessons", None)
    with pytest.raises(ValueError, match="config that names none"):
        train("mtp", model=tmp_path / "model", out=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "count"), [(k, 1 + (k == "deepseek")) for k in KINDS if k != "step3p7"]
)
def test_fine_tuned_layers_are_exported_as_the_checkpoint_has_them(model_of, tmp_path, name, count):
    folder, model = model_of(name, count)
    layers = layers_of(model)
    with torch.no_grad():
        for key, weight in layers.model.layers.named_parameters():
            if name != "ernie" or "post_norm" not in key:  # the decoder's own there
                weight.add_(torch.randn_like(weight))
    save_layers(layers, tmp_path / "tuned", model)
    made = export(str(tmp_path / "tuned"), "checkpoint", tmp_path / "out", str(folder))
    assert f"as the checkpoint of {name} has them" in made["note"]
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() < before.keys() and all(after[k].shape == before[k].shape for k in after)
    assert all(not torch.equal(after[k], before[k]) for k in after if "norm" in k)
    again = load_layers(tmp_path / "out", model)
    tuned = load_layers(tmp_path / "tuned", model)
    for key, wanted in tuned.model.layers.state_dict().items():
        torch.testing.assert_close(again.model.layers.state_dict()[key], wanted, rtol=0, atol=0)
    save_file({**before, **after}, folder / "model.safetensors", {"format": "pt"})
    whole = layers_of(load_model(type(model), folder, dtype=torch.float32))
    for key, wanted in tuned.model.layers.state_dict().items():
        torch.testing.assert_close(whole.model.layers.state_dict()[key], wanted, rtol=0, atol=0)


def test_what_the_checkpoint_has_no_place_for_is_not_exported(model_of, tmp_path):
    folder, model = model_of("ernie", 1)
    layers = layers_of(model)
    with torch.no_grad():
        layers.model.layers[0].post_norm.weight.add_(1)
    save_layers(layers, tmp_path / "tuned", model)
    with pytest.raises(ValueError, match=r"cannot be written .*: layers.0.post_norm.weight would"):
        export(str(tmp_path / "tuned"), "checkpoint", tmp_path / "out", str(folder))
    assert not (tmp_path / "out").exists()
