"""Export to speculators folders, and what the format cannot say."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specmm.vlm.export import Verifier, export_speculators, speculators_config
from specmm.vlm.msd import MSDConfig, MSDHead

SIZES = dict(vocab_size=20, hidden_size=16, intermediate_size=24)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2)
VERIFIER = Verifier("some/llava", ["LlavaForConditionalGeneration"])


@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_written_under_the_formats_names(tmp_path, bias):
    torch.manual_seed(0)
    head, output = MSDHead(MSDConfig(**SIZES, bias=bias)), torch.randn(20, 16)
    export_speculators(head, output, tmp_path, VERIFIER, text_only=True)
    found = load_file(tmp_path / "model.safetensors")
    assert {"embed_tokens.weight", "transformer.mlp.up_proj.weight"} <= found.keys()
    assert torch.equal(found.pop("lm_head.weight"), output)
    theirs = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    for name, weight in head.state_dict().items():
        for old, new in theirs.items():
            name = name.replace(old, new)
        assert torch.equal(found.pop(name), weight)
    assert not found
    assert json.loads((tmp_path / "config.json").read_text())["fusion_bias"] == bias


def test_the_config_says_what_engines_read():
    config = speculators_config(MSDConfig(**SIZES), VERIFIER, tokens=3)
    inner = config["speculators_config"]
    assert config["speculators_model_type"] == inner["algorithm"] == "eagle"
    wanted = {"name_or_path": "some/llava", "architectures": ["LlavaForConditionalGeneration"]}
    assert inner["verifier"] == wanted
    assert inner["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert config["transformer_layer_config"]["hidden_size"] == 16 and config["fusion_bias"] is True
    json.dumps(config)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"text_only": False}, "no field for MSD's raw image slots"),
        ({"num_hidden_layers": 2}, {}, "have 1 layer, got 2"),
        ({"qwen": True}, {}, "no first norm, got a Qwen2-VL head"),
        ({}, {"algorithm": "eagle3"}, r"got 'eagle3' \(its layer is as wide"),
        ({}, {"tokens": 0}, "tokens must be at least 1"),
        ({"vocab_size": 30}, {}, r"target's head \[30, 16\], got \[20, 16\]"),
    ],
)
def test_what_the_format_cannot_say_is_refused(tmp_path, changes, options, message):
    head = MSDHead(MSDConfig(**(SIZES | changes)))
    with pytest.raises(ValueError, match=message):
        export_speculators(
            head, torch.randn(20, 16), tmp_path, VERIFIER, **({"text_only": True} | options)
        )
