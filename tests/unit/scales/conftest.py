"""Small random VARs that are sure of nothing in particular, and a tokenizer they share."""

import dataclasses

import pytest
import torch

from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.image_ar.scales.collaborative import Turn, alternate
from specmm.image_ar.scales.next_scale import FeatureMap
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import InverseCDF, VARSettings
from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig

SIDES = (1, 2, 3, 4, 6)
TINY = VARConfig(2, 64, 4, vocab_size=32, z_channels=8, num_classes=10, patch_nums=SIDES)


@torch.no_grad()
def make_var(seed=0, **sizes):
    """A VAR whose distributions are far from uniform and depend on everything they should."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = VAR(dataclasses.replace(TINY, **sizes)).eval()
        for name, weight in model.named_parameters():
            if weight.ndim > 1 or "bias" in name:
                weight.copy_(
                    torch.randn_like(weight)
                    * (0.5 if "emb" in name else 1.5 / weight.shape[-1] ** 0.5)
                )
    return model


@torch.no_grad()
def make_vqvae(sides=SIDES, codes=32, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = VQVAEConfig(codes, 8, 32, (1, 2), 1, sides, 4)
        model = VQVAE(config).eval()
        model.quantize.embedding.weight.normal_()
    return model


@pytest.fixture(scope="session")
def large():
    return make_var(0, depth=3)


@pytest.fixture(scope="session")
def small():
    return make_var(1, embed_dim=32, num_heads=2)


@pytest.fixture(scope="session")
def vqvae():
    return make_vqvae()


@pytest.fixture
def pipe(large, small, vqvae):
    made = VARPipeline(
        large,
        vqvae,
        small,
        VARSettings(2.0, 1.0, 20, 0.95, classes=tuple(f"class{i}" for i in range(10))),
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="session")
def make():
    """``make.var(seed, **sizes)`` and ``make.vqvae(sides, codes)``."""
    return type("Make", (), {"var": staticmethod(make_var), "vqvae": staticmethod(make_vqvae)})


@pytest.fixture(scope="session")
def plain():
    """``plain(model, vqvae, labels, sampling, seeds)``: tokens by scale of our plain decoding."""

    @torch.inference_mode()
    def run(model, vqvae, labels, sampling, seeds, sampler=InverseCDF):
        feature_map = FeatureMap(vqvae.quantize, len(labels))
        uniforms = (
            InverseCDF(sampling, Uniforms.from_seeds(seeds), len(feature_map.schedule))
            if sampler is InverseCDF
            else sampler
        )
        steps = range(len(feature_map.schedule))
        turns = [Turn("large", model, steps)]
        list(alternate(turns, feature_map, labels, sampling, lambda _: uniforms, Clock()))
        return feature_map

    return run
