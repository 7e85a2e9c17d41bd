"""Export to speculators folders, and what the format cannot say."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from specmm.vlm.export import to_speculators
from specmm.vlm.msd import MSDConfig, MSDHead, save_msd

SIZES = dict(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class LlavaForConditionalGeneration:
    """A target with the embeddings of ``head``, and ``rows`` of an output head."""

    config = SimpleNamespace(name_or_path="some/llava")
    device = torch.device("cpu")

    def __init__(self, head, rows=20):
        self.output = SimpleNamespace(weight=torch.randn(rows, 16))
        self.get_output_embeddings = lambda: self.output
        self.get_input_embeddings = lambda: head.embed_tokens


@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_written_under_the_formats_names(tmp_path, bias):
    torch.manual_seed(0)
    head = MSDHead(MSDConfig(**SIZES, bias=bias))
    target = LlavaForConditionalGeneration(head)
    save_msd(head, tmp_path / "head")
    assert "text prompts" in to_speculators(tmp_path / "head", target, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {"embed_tokens.weight", "transformer.mlp.up_proj.weight"} <= found.keys()
    assert torch.equal(found.pop("lm_head.weight"), target.output.weight)
    theirs = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    for name, weight in head.state_dict().items():
        for old, new in theirs.items():
            name = name.replace(old, new)
        assert torch.equal(found.pop(name), weight)
    assert not found
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    inner = config["speculators_config"]
    assert config["speculators_model_type"] == inner["algorithm"] == "eagle"
    assert inner["verifier"] == {
        "name_or_path": "some/llava",
        "architectures": ["LlavaForConditionalGeneration"],
    }
    assert inner["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    assert config["transformer_layer_config"]["hidden_size"] == 16
    assert config["fusion_bias"] == bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "have 1 layer, got 2"),
        ({"qwen": True}, "no first norm, got a Qwen2-VL head"),
    ],
)
def test_what_the_format_cannot_say_is_refused(tmp_path, changes, message):
    head = MSDHead(MSDConfig(**(SIZES | changes)))
    save_msd(head, tmp_path / "head")
    with pytest.raises(ValueError, match=message):
        to_speculators(tmp_path / "head", LlavaForConditionalGeneration(head), tmp_path / "out")
