"""DFlash drafters against the release's numbers over several rounds, in both layouts, in ragged
batches.

Shape letters: B batch, M context positions, K block.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specmm.diffusion_drafters.models.dflash import check_layers, load_dflash

PARITY = Path(__file__).parents[1] / "parity" / "dlm" / "dflash"
META = json.loads((PARITY / "meta.json").read_text())
CASES = load_file(PARITY / "cases.safetensors")
CLOSE = {"rtol": 0, "atol": 2e-5}


def transformers_folder(folder):
    """The same drafter in the other layout."""
    facts = json.loads((PARITY / "config.json").read_text())
    state = load_file(PARITY / "model.safetensors")
    for old, new in META["rename_to_transformers"].items():
        state[new] = state.pop(old)
    facts |= facts.pop("dflash_config")
    facts["rope_parameters"] = {"rope_type": "default", "rope_theta": facts.pop("rope_theta")}
    (folder / "config.json").write_text(json.dumps(facts))
    save_file(state, folder / "model.safetensors")
    return folder


@torch.inference_mode()
def rounds(model, copies=1):
    """States of every recorded round, of ``copies`` of the one row."""
    model.begin(copies, 64, 8)
    for r in range(META["rounds"]):
        context = CASES[f"r{r}_target_hidden"].expand(copies, -1, -1)
        count = torch.full((copies,), context.shape[1])
        model.read(context, count) if r else model.read_prompt(context, count)
        yield model.draft(
            CASES["target_embed_tokens"][CASES[f"r{r}_block_ids"]].expand(copies, -1, -1)
        )


@pytest.mark.parametrize("layout", ["z-lab", "transformers"])
def test_rounds_of_blocks(layout, tmp_path):
    model = load_dflash(PARITY if layout == "z-lab" else transformers_folder(tmp_path))
    for r, states in enumerate(rounds(model)):
        torch.testing.assert_close(states, CASES[f"r{r}_hidden"], **CLOSE)
        logits = states[:, 1:] @ CASES["target_lm_head"].T
        torch.testing.assert_close(logits, CASES[f"r{r}_draft_logits"], **CLOSE)
        assert (
            CASES[f"r{r}_position_ids"][0, -1] + 1 == int(model.cache.lengths) + model.config.block
        )


@torch.inference_mode()
def test_rows_commit_different_numbers():
    model = load_dflash(PARITY)
    prompt = CASES["r0_target_hidden"].expand(2, -1, -1)
    later = CASES["r1_target_hidden"].expand(2, -1, -1)
    block = CASES["target_embed_tokens"][CASES["r1_block_ids"]]
    model.begin(2, 64, 8)
    model.read_prompt(prompt, torch.tensor([9, 5]))
    model.read(later, torch.tensor([4, 2]))
    together = model.draft(block.expand(2, -1, -1))
    torch.testing.assert_close(together[:1], CASES["r1_hidden"], **CLOSE)
    model.begin(1, 64, 8)
    model.read_prompt(prompt[:1, :5], torch.tensor([5]))
    model.read(later[:1, :2], torch.tensor([2]))
    torch.testing.assert_close(together[1:], model.draft(block), **CLOSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {}}, "got no mask_token_id, target_layer_ids"),
        ({"block_size": 1}, "at least 2"),
        ({"dflash_config": {"mask_token_id": 160, "target_layer_ids": [1, 3, 5]}}, "got 160"),
        ({"dflash_config": {"mask_token_id": 159, "target_layer_ids": [1, 1]}}, r"got \[1, 1\]"),
        (
            {"dflash_config": {"mask_token_id": 159, "target_layer_ids": [1, 3]}},
            r"fc.weight \[64, 192\]",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "plain rotary"),
        ({"hidden_size": None}, "none for hidden_size"),
    ],
)
def test_folders_that_are_no_dflash_drafter(change, message, tmp_path):
    facts = json.loads((PARITY / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(facts))
    (tmp_path / "model.safetensors").write_bytes((PARITY / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=message):
        load_dflash(tmp_path)


def test_a_target_with_too_few_layers():
    with pytest.raises(ValueError, match="target's 5"):
        check_layers([1, 3, 5], 5)
