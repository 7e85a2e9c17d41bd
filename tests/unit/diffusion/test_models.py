"""Loading of diffusion language models: what is refused, and what is read in another shape.

Shape letters: none.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specmm.diffusion_drafters.models.files import load_diffusion_lm
from specmm.diffusion_drafters.models.masked import block_logits

PARITY = Path(__file__).parents[2] / "parity" / "dlm"


def altered(folder, name, config=None, state=None):
    facts = json.loads((PARITY / name / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(facts))
    save_file(load_file(PARITY / name / "model.safetensors") | (state or {}), folder / "model.safetensors")
    return folder


WRONG = {
    "unknown kind": ("dream", {"model_type": "drem"}, {}, "did you mean 'dream'"),
    "no mask": ("dream", {"mask_token_id": 160}, {}, "got 160"),
    "no size": ("dream", {"hidden_size": None}, {}, "none for hidden_size"),
    "scaled positions": ("dream", {"rope_scaling": {"type": "yarn"}}, {}, "plain rotary"),
    "sliding": ("dream", {"use_sliding_window": True}, {}, "sliding window"),
    "extra": ("dream", {}, {"more": torch.zeros(1)}, "1 unexpected: more"),
    "other layers": ("llada", {"alibi": True}, {}, "Llama's layers, got {'alibi': True}"),
    "misshapen": ("llada", {}, {"model.transformer.ln_f.weight": torch.zeros(3)}, "model.norm.weight"),
    "not finite": ("llada", {}, {"model.transformer.ln_f.weight": torch.full((64,), float("nan"))}, "finite"),
    "time": ("mdlm", {"time_conditioning": True}, {}, "time conditioning"),
    "no width": ("bd3lm", {"hidden_dim": None}, {}, "hidden_dim or hidden_size"),
    "odd heads": ("bd3lm", {"n_heads": 5}, {}, "even parts"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_folders_that_are_refused(case, tmp_path):
    name, config, state, message = case
    with pytest.raises(ValueError, match=message):
        load_diffusion_lm(altered(tmp_path, name, config, state))


def test_weights_in_several_files_and_half_precision(tmp_path):
    state = load_file(PARITY / "dream" / "model.safetensors")
    (tmp_path / "config.json").write_text((PARITY / "dream" / "config.json").read_text())
    names, files = sorted(state), ("a.safetensors", "b.safetensors")
    for i, file in enumerate(files):
        save_file({n: state[n] for n in names[i::2]}, tmp_path / file)
    index = {"weight_map": {n: files[i % 2] for i, n in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model, tokens = load_diffusion_lm(tmp_path), torch.tensor([[3, 4, 5]])
    whole = load_diffusion_lm(PARITY / "dream")
    assert torch.equal(block_logits(model, tokens, 4), block_logits(whole, tokens, 4))
    half = load_diffusion_lm(tmp_path, torch.bfloat16)
    assert half.head(half.states(tokens)).dtype == torch.bfloat16
    assert half.model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("prefix", "block", "message"), [(0, 4, "got 0 and 4"), (3, 0, "got 3 and 0"), (250, 7, "256")]
)
def test_prefixes_and_blocks_that_do_not_fit(prefix, block, message):
    model = load_diffusion_lm(PARITY / "dream")
    with pytest.raises(ValueError, match=message):
        block_logits(model, torch.ones(1, prefix, dtype=torch.int64), block)
