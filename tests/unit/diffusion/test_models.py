"""Loading of diffusion language models: what is refused, and what is read in another shape.

Shape letters: none.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specmm.diffusion_drafters.assemble import load_diffusion
from specmm.diffusion_drafters.models.diffusion_lms import FullAttention, load_diffusion_lm
from specmm.diffusion_drafters.models.masked import block_logits

PARITY = Path(__file__).parents[2] / "parity" / "dlm"


def altered(folder, name, config=None, state=None):
    facts = json.loads((PARITY / name / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(facts))
    save_file(
        load_file(PARITY / name / "model.safetensors") | (state or {}), folder / "model.safetensors"
    )
    return folder


ENDING = {"mask_token_id": 5, "eos_token_id": 5}
NORM = "model.transformer.ln_f.weight"
WRONG = {
    "unknown kind": ("dream", {"model_type": "drem"}, {}, "did you mean 'dream'"),
    "no mask": ("dream", {"mask_token_id": 160}, {}, "got 160"),
    "a mask by name": ("dream", {"mask_token_id": "<mask>"}, {}, "got '<mask>'; give its id"),
    "half a mask": ("llada", {"mask_token_id": 3.0}, {}, r"one of the \d+ of the model, got 3\.0"),
    "a mask that ends": ("dream", ENDING, {}, "must not be the token that ends"),
    "no mask of mdlm": ("mdlm", {"mask_index": 100000}, {}, "got 100000"),
    "a mask that ends mdlm": ("mdlm", ENDING, {}, "got 5 for both"),
    "no size": ("dream", {"hidden_size": None}, {}, "none for hidden_size"),
    "scaled positions": ("dream", {"rope_scaling": {"type": "yarn"}}, {}, "plain rotary"),
    "sliding": ("dream", {"use_sliding_window": True}, {}, "sliding window"),
    "extra": ("dream", {}, {"more": torch.zeros(1)}, "1 unexpected: more"),
    "other layers": ("llada", {"alibi": True}, {}, "Llama's layers, got {'alibi': True}"),
    "misshapen": ("llada", {}, {NORM: torch.zeros(3)}, "model.norm.weight"),
    "not finite": ("llada", {}, {NORM: torch.full((64,), float("nan"))}, "finite"),
    "time": ("mdlm", {"time_conditioning": True}, {}, "time conditioning"),
    "no width": ("bd3lm", {"hidden_dim": None}, {}, "hidden_dim or hidden_size"),
    "odd heads": ("bd3lm", {"n_heads": 5}, {}, "even parts"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_folders_that_are_refused(case, tmp_path):
    name, config, state, message = case
    with pytest.raises(ValueError, match=message):
        load_diffusion_lm(altered(tmp_path, name, config, state))


@pytest.mark.parametrize("name", ["mdlm", "bd3lm"])
@pytest.mark.parametrize("key", ["mask_token_id", "mask_index"])
def test_masks_are_those_of_the_config(tmp_path, name, key):
    plain = load_diffusion_lm(PARITY / name)
    named = load_diffusion_lm(altered(tmp_path, name, {key: 9}))
    assert (plain.mask, named.mask) == (plain.vocabulary - 1, 9)
    logits = block_logits(named, torch.tensor([[3, 4, 5]]), 2)
    assert torch.isneginf(logits[..., 9]).all() and torch.isfinite(logits[..., plain.mask]).all()


def test_a_model_must_have_a_mask():
    model = load_diffusion_lm(PARITY / "dream").model
    with pytest.raises(ValueError, match=r"mask token must be one of the .* got None; give its id"):
        FullAttention(model, None, None, 1)


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


@pytest.mark.parametrize("name", ["dream", "llada", "mdlm", "bd3lm"])
def test_a_drafter_is_where_its_target_is(name):
    target = SimpleNamespace(device=torch.device("meta"), dtype=torch.float32)  # all that is read
    model = load_diffusion(PARITY / name, target, "diffuspec").model
    states = model.states(torch.zeros(1, 3, dtype=torch.int64, device="meta"))
    assert states.device == model.head(states).device == target.device
