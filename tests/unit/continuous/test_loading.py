"""Files of MAR and its autoencoder: ours go round, the release's are read without running code."""

import argparse
from pathlib import Path

import pytest
import torch

from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig
from specmm.image_ar.continuous.loading import (
    infer_kl_config,
    infer_mar_config,
    kl_fingerprint,
    load_kl,
    load_mar,
)
from specmm.image_ar.continuous.mar import MAR, PUBLISHED, MARConfig
from specmm.image_ar.files import save_module
from tests.tiny.parts import mar_sides, same_weights

SMALL = mar_sides(16, 1) | dict(decoder_depth=2, class_num=3)
SMALL |= dict(buffer_size=2, diffloss_d=1, diffloss_w=8)
TINY = MARConfig(img_size=64, vae_stride=16, vae_embed_dim=4, **SMALL)
KL = KLConfig(32, (1, 2), 1, z_channels=4, resolution=256, attn_resolutions=(128,))


@pytest.fixture(scope="module")
def mar():
    torch.manual_seed(0)
    return MAR(TINY).eval()


@pytest.fixture(scope="module")
def kl():
    torch.manual_seed(0)
    return AutoencoderKL(KL).eval()


def test_our_folders_go_round(mar, kl, tmp_path):
    save_module(mar, tmp_path / "mar")
    save_module(kl, tmp_path / "kl")
    assert same_weights(load_mar(tmp_path / "mar"), mar)
    assert load_mar(tmp_path / "mar").config == TINY
    assert same_weights(load_kl(tmp_path / "kl"), kl) and load_kl(tmp_path / "kl").config == KL
    assert kl_fingerprint(load_kl(tmp_path / "kl", dtype=torch.bfloat16)) == kl_fingerprint(kl)


def test_the_averaged_weights_of_a_release_are_taken(mar, tmp_path):
    trained = {k: torch.zeros_like(v) for k, v in mar.state_dict().items()}
    args = argparse.Namespace(lr=1e-4, output_dir="x")
    file = tmp_path / "checkpoint-last.pth"
    torch.save({"model": trained, "model_ema": mar.state_dict(), "args": args, "epoch": 399}, file)
    assert same_weights(load_mar(file, heads=2), mar)
    with pytest.raises(ValueError, match="heads must be given"):
        load_mar(file)


def test_a_file_that_would_run_code_is_refused(tmp_path):
    torch.save({"model_ema": {}, "args": Path("x")}, tmp_path / "checkpoint-last.pth")
    with pytest.raises(ValueError, match="got a pickle that asks for pathlib"):
        load_mar(tmp_path / "checkpoint-last.pth")


def test_autoencoder_of_a_release(kl, tmp_path):
    file = tmp_path / "kl16.ckpt"
    torch.save({"model": {**kl.state_dict(), "loss.discriminator.weight": torch.zeros(2)}}, file)
    assert same_weights(load_kl(file), kl)
    assert infer_kl_config(kl.state_dict()) == KL


def test_sizes_are_told_by_shapes(mar):
    assert infer_mar_config(mar.state_dict(), heads=2) == TINY
    bare = {k: v for k, v in mar.state_dict().items() if k != "fake_latent"}
    assert not infer_mar_config(bare, heads=2).fake_latent


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_need_no_heads(name):
    config = MARConfig(**PUBLISHED[name])
    with torch.device("meta"):
        state = MAR(config).state_dict()
    assert infer_mar_config(state) == config
    count = sum(v.numel() for v in state.values())
    assert round(count / 1e6) == {"MAR-B": 208, "MAR-L": 478, "MAR-H": 942}[name]


def test_wrong_files_are_named(mar, tmp_path):
    save_module(mar, tmp_path / "mar")
    with pytest.raises(ValueError, match="must describe a KLConfig"):
        load_kl(tmp_path / "mar")
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="must hold encoder_norm"):
        load_mar(tmp_path / "other.pt")
    state = mar.state_dict()
    del state["mask_token"]
    torch.save(state, tmp_path / "part.pt")
    with pytest.raises(ValueError, match="1 missing: mask_token"):
        load_mar(tmp_path / "part.pt", TINY)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [(dict(encoder_num_heads=5), "multiple of its heads"), (dict(img_size=65), "img_size must")],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        MARConfig(**{**SMALL, "img_size": 64, **sizes})


def test_a_model_without_fake_latent_cannot_be_guided():
    from dataclasses import replace

    model = MAR(replace(TINY, fake_latent=False))
    with pytest.raises(ValueError, match="cfg must be 1 for a model without fake_latent"):
        model.embed_classes(None, 2)
