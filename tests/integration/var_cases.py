"""The recorded numbers of VAR's and CoDe's releases, and their tiny models."""

from functools import cache

import torch

from specmm.checkpoints import load_strict
from specmm.image_ar.scales.loading import infer_vqvae_config
from specmm.image_ar.scales.vqvae import VQVAE
from tests.tiny.recorded import Case

VARIANTS = ("noshared", "shared", "nol2")
RELEASED = Case("var/var_tiny")
TOKENIZER = Case("var/vqvae_tiny")


@cache
def tiny_vqvae():
    model = VQVAE(infer_vqvae_config(TOKENIZER.state(), (1, 2, 3, 4)))
    load_strict(model, TOKENIZER.state(), ())
    return model.eval()


def close(got, wanted, atol=5e-4):
    torch.testing.assert_close(got, wanted, atol=atol, rtol=0)
