"""The recorded numbers of VAR's and CoDe's releases, and their tiny models."""

from dataclasses import replace
from functools import cache

import torch

from specmm.image_ar.scales.loading import infer_var_config, infer_vqvae_config
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.vqvae import VQVAE
from specmm.loading.checkpoints import load_strict
from tests.tiny.recorded import Case

VARIANTS = ("noshared", "shared", "nol2")
RELEASED = Case("var/var_tiny")
TOKENIZER = Case("var/vqvae_tiny")


@cache
def tiny_vqvae():
    model = VQVAE(infer_vqvae_config(TOKENIZER.state(), (1, 2, 3, 4)))
    load_strict(model, TOKENIZER.state(), ())
    return model.eval()


def var_of(state, heads):
    """A VAR of ``state``; its sizes do not tell the heads without attn_l2_norm at this width."""
    scale = "blocks.0.attn.scale_mul_1H11"
    config = infer_var_config(state | {scale: torch.zeros(1, heads, 1, 1)})
    model = VAR(replace(config, attn_l2_norm=scale in state))
    model.load_state_dict(state)
    return model.eval()


@cache
def tiny_vars():
    return {name: var_of(RELEASED.state(f"{name}.weights."), 4) for name in VARIANTS}


def close(got, wanted, atol=5e-4):
    torch.testing.assert_close(got, wanted, atol=atol, rtol=0)
