"""Training of MAR and its autoencoder: losses fall, runs resume, results are whole models."""

import math

import pytest
import torch

from recipes.training.kl import encode_moments, latent_std, train_kl
from recipes.training.mar import Averaged, mar_loss, mask_share, train_mar
from specmm.image_ar.continuous.diffusion import NoiseSchedule
from specmm.image_ar.continuous.kl import KLConfig
from specmm.image_ar.continuous.mar import MAR, MARConfig
from tests.tiny.parts import mar_sides

KL = KLConfig(32, (1, 1), 1, z_channels=3, resolution=8, attn_resolutions=(4,), scale=1.0)
SIZES = mar_sides(16, 1) | dict(class_num=2, buffer_size=2, diffloss_d=1, diffloss_w=16)
CONFIG = MARConfig(img_size=8, vae_stride=2, vae_embed_dim=3, **SIZES)


@pytest.fixture(scope="module")
def images():
    """Pictures of one colour each."""
    colours = torch.randint(
        256, (12, 1, 1, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    return colours.expand(-1, 8, 8, -1)


def losses(folder):
    rows = (folder / "loss.csv").read_text().split()[1:]
    return [float(row.split(",")[1]) for row in rows]


@pytest.mark.slow
def test_an_autoencoder_learns_and_knows_its_scale(images, tmp_path):
    model = train_kl(images, KL, tmp_path, steps=41, batch=4, lr=5e-3, compiled=False)
    first, *_, last = losses(tmp_path)
    assert last < 0.8 * first
    scaled = latent_std(encode_moments(model, images)) * model.config.scale
    assert math.isclose(scaled, 1, rel_tol=1e-3)


def test_a_mar_trains_and_its_average_is_kept_with_it(tmp_path):
    moments = torch.randn(12, 2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    model = train_mar(moments, torch.arange(12) % 2, 0.5, CONFIG, tmp_path, steps=6, batch=4)
    assert model.head.final_layer.linear.weight.abs().sum() > 0  # it starts at zero
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert kept["step"] == 6 and "average.mask_token" in kept["model"]
    assert "model.mask_token" in kept["model"]


def test_the_loss_of_a_fresh_model_is_that_of_predicting_no_noise():
    torch.manual_seed(0)
    tokens, labels = torch.randn(8, 16, 3), torch.arange(8) % 2
    found = mar_loss(
        MAR(CONFIG), NoiseSchedule.of(""), tokens, labels, torch.Generator().manual_seed(2)
    )
    assert abs(found["mse"].item() - 1) < 0.1
    assert found["loss"].item() == pytest.approx((found["mse"] + found["bound"]).item())


def test_mask_shares_are_a_truncated_normal():
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([mask_share(generator) for _ in range(2000)])
    assert shares.min() >= 0.7 and shares.max() <= 1
    assert abs(float(shares.mean()) - 0.865) < 0.01  # 1 - σ (φ(0) - φ(1.2)) / (Φ(0) - Φ(-1.2))


def test_an_average_follows_and_lags():
    torch.manual_seed(0)
    both = Averaged(MAR(CONFIG), 0.9)
    for p in both.model.parameters():
        p.data += 1
    both.update(1000)
    gaps = [
        (w - m).mean().item()
        for w, m in zip(both.model.parameters(), both.average.parameters(), strict=True)
    ]
    assert all(abs(gap - 0.9) < 1e-4 for gap in gaps)
    assert not any(p.requires_grad for p in both.average.parameters())
