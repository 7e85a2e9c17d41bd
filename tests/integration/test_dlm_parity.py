"""Diffusion language models against numbers that their releases produced; ``meta.json`` says how
each came about.

Shape letters: B batch, L positions, K masks, v vocabulary.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specmm.diffusion_drafters.models.diffusion_lms import load_diffusion_lm
from specmm.diffusion_drafters.models.masked import block_logits

PARITY = Path(__file__).parents[1] / "parity" / "dlm"
CLOSE = {"rtol": 0, "atol": 2e-5}
NEVER = -1e6  # the log-probability SUBS gives what cannot be


def subs(logits, tokens, mask):
    """Log-probabilities [B, L, v] by SUBS (MDLM, section 3.2): never the mask, and a token that is
    no mask stays what it is.
    """
    barred = logits.clone()
    barred[..., mask] += NEVER
    filled = barred.log_softmax(-1)
    kept = torch.full_like(filled, NEVER).scatter(-1, tokens[..., None], 0.0)
    return torch.where((tokens == mask)[..., None], filled, kept)


def two_copies(length, block):
    """Who sees whom [2·L, 2·L] bool when BD3LM trains on [noisy | clean] copies of a text.

    Noisy tokens see their own noisy block and the clean blocks before it; clean ones are causal
    between blocks.
    """
    which = torch.arange(length) // block
    same, before = which[:, None] == which, which[:, None] > which
    none = torch.zeros_like(same)
    return torch.cat([torch.cat([same, before], 1), torch.cat([none, same | before], 1)])


@pytest.fixture(scope="module", params=["dream", "llada", "mdlm", "bd3lm"])
def any_model(request):
    return request.param, *read(request.param)


def read(name):
    meta = json.loads((PARITY / name / "meta.json").read_text())
    return load_diffusion_lm(PARITY / name), load_file(PARITY / name / "cases.safetensors"), meta


@torch.inference_mode()
def logits(model, tokens, valid=None):
    return model.head(model.states(tokens, valid))


@pytest.mark.parametrize(("name", "cases", "shift"), [("dream", "ABD", 1), ("llada", "ABC", 0)])
def test_both_sides_are_read_and_the_next_token_or_each_itself_is_scored(name, cases, shift):
    model, t, _ = read(name)
    for case in cases:
        found = logits(model, t[f"{case}_input_ids"])
        torch.testing.assert_close(found, t[f"{case}_logits"], **CLOSE)
    assert model.shift == shift


def test_dream_shifts_its_logits():
    _, t, _ = read("dream")
    shifted = torch.cat([t["B_logits"][:, :1], t["B_logits"][:, :-1]], 1)
    assert torch.equal(shifted, t["B_shifted_logits"])


def test_dream_reads_a_padded_batch():
    model, t, _ = read("dream")
    valid = t["C_attention_mask"].bool()
    got = logits(model, t["C_input_ids"], valid).masked_fill(~valid[..., None], 0)
    torch.testing.assert_close(got, t["C_logits"], **CLOSE)


@torch.inference_mode()
def test_mdlm_and_its_substitution():
    model, t, meta = read("mdlm")
    got = logits(model, t["A_input_ids"])
    torch.testing.assert_close(got, t["A_logits"], **CLOSE)
    filled = subs(got, t["A_input_ids"], meta["mask_index"])
    torch.testing.assert_close(filled, t["A_log_x_theta"], rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(
        model.network(t["B_input_ids"], t["B_sigma"]), t["B_logits"], **CLOSE
    )


@torch.inference_mode()
def test_bd3lm_samples_and_trains():
    model, t, meta = read("bd3lm")
    torch.testing.assert_close(logits(model, t["sample_input_ids"]), t["sample_logits"], **CLOSE)
    tokens, length = t["train_input_ids"], meta["model_length"]
    order, seen = torch.arange(length).repeat(2)[None], two_copies(length, meta["block_size"])
    got = model.network(tokens, torch.zeros(1), seen, order)[:, :length]
    torch.testing.assert_close(got, t["train_logits"], **CLOSE)


@pytest.mark.parametrize("name", ["dream", "llada"])
def test_the_block_after_a_prefix(name):
    model, t, meta = read(name)
    prefix, block = t["A_input_ids"][:, : meta["prefix_len"]], meta["block_len"]
    got, wanted = block_logits(model, prefix, block), t["A_block_logprobs"]
    # the mask is barred before the softmax
    others = torch.arange(got.shape[-1]) != meta["mask_token_id"]
    wanted = wanted[..., others].log_softmax(-1)
    torch.testing.assert_close(got[..., others].log_softmax(-1), wanted, **CLOSE)
    assert torch.isneginf(got[..., ~others]).all()


def test_a_row_of_a_ragged_batch_is_read_alone(any_model):
    _, model, _, _ = any_model
    tokens = torch.randint(3, 150, (3, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([9, 4, 6])
    together = block_logits(model, tokens, 5, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = block_logits(model, tokens[row : row + 1, :length], 5)
        torch.testing.assert_close(together[row : row + 1], alone, **CLOSE)
