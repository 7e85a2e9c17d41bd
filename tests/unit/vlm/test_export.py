"""Export of MSD heads as EAGLE-1 heads, and what that format cannot say."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from specmm import zoo as pocket
from specmm.loading.checkpoints import fingerprint
from specmm.vlm.export import to_eagle
from specmm.vlm.loading import load_model
from specmm.vlm.msd import MSDConfig, MSDHead, drafted_embeddings, load_msd, save_msd
from tests.commands import as_json, refused

LLAVA = pocket.POCKET / "llava"


def test_an_exported_head_is_read_back_as_it_is(tmp_path):
    """Under EAGLE-1's names and sizes, with the target's embeddings."""
    out, own = tmp_path / "out", LLAVA / "drafters" / "msd"
    made = as_json("export", str(own), "--format", "eagle", "--out", str(out))
    assert "which SGLang serves; vLLM leaves out the bias of fc; for text prompts" in made["note"]
    embeddings = drafted_embeddings(load_model(LLAVA))
    before, after = load_msd(own, embeddings), load_msd(out)
    assert after.config == before.config
    for name, weight in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], weight)
    names = load_file(out / "model.safetensors").keys()
    assert {"embed_tokens.weight", "fc.weight", "fc.bias", "layers.0.mlp.up_proj.weight"} <= names
    assert "layers.0.input_layernorm.weight" not in names
    facts = json.loads((out / "config.json").read_text())
    assert facts["architectures"] == ["LlamaForCausalLMEagle"] and facts["model_type"] == "llama"
    assert facts["target_fingerprint"] == fingerprint(embeddings)
    assert facts["rope_parameters"]["rope_theta"] == before.config.rope_theta


def test_what_the_formats_cannot_say_is_refused(tmp_path):
    target = load_model(LLAVA)
    table = drafted_embeddings(target)
    sizes = dict(vocab_size=len(table), hidden_size=table.shape[1], intermediate_size=24)
    head = MSDHead(MSDConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, qwen=True))
    head.embed_tokens.weight.data = table.clone()
    save_msd(head, tmp_path / "head")
    with pytest.raises(ValueError, match="no norm before their first layer, got a Qwen2-VL head"):
        to_eagle(tmp_path / "head", target, tmp_path / "out")
    place = shutil.copytree(LLAVA, tmp_path / "model") / "drafters" / "msd"
    said = refused("export", str(place), "--format", "speculators", "--out", str(tmp_path / "out"))
    assert "MSD head has no form as speculators" in said and "it can be written as eagle" in said
