"""The published sizes of VAR, and CoDe's plan for two of them without their weights: time depends
on sizes alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specmm.hardware import MOST, prepack
from specmm.image_ar.scales.loading import PUBLISHED_HEAD_DIM
from specmm.image_ar.scales.planner import Draw, choose_n, forecast, parameters
from specmm.image_ar.scales.sampling import Sampling
from specmm.image_ar.scales.scale_schedule import PATCHES_256, PATCHES_512
from specmm.image_ar.scales.tuning import Plan, calibrate
from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig

LADDERS = {256: PATCHES_256, 512: PATCHES_512}
DEPTHS = {256: (16, 20, 24, 30), 512: (36,)}  # by resolution
PROBE = 2  # blocks that are measured in place of all


def published(depth: int, resolution: int = 256) -> VARConfig:
    """The sizes of VAR-d``depth``; raises ``ValueError`` for a resolution that nobody published."""
    if depth < 1 or resolution not in LADDERS:
        raise ValueError(
            f"depth must be at least 1 and resolution 256 or 512, got {depth} and {resolution}"
        )
    width = PUBLISHED_HEAD_DIM * depth
    return VARConfig(
        depth, width, depth, patch_nums=LADDERS[resolution], shared_aln=resolution == 512
    )


def check_published(large: int, small: int, resolution: int) -> None:
    """Raise ``ValueError`` unless both depths were published at ``resolution`` and the larger model
    comes first.
    """
    known = DEPTHS.get(resolution, ())
    for depth in (large, small):
        if depth not in known:
            every = "; ".join(
                f"{', '.join(f'd{d}' for d in of)} at {size}" for size, of in DEPTHS.items()
            )
            raise ValueError(f"published sizes are {every}, got d{depth} at {resolution}")
    if large < small:
        raise ValueError(
            f"the larger model comes first, got d{large},d{small}; give d{small},d{large}"
        )


def random_var(config: VARConfig, dtype: torch.dtype, whole: VARConfig | None = None) -> VAR:
    """A model of random weights, laid out as a loaded one of the size ``whole`` would be (its own
    if not given).
    """
    model = VAR(config).to(dtype).eval()
    return prepack(model, long=True) if parameters(whole or config) <= MOST else model


def random_vqvae(config: VARConfig) -> VQVAE:
    """A tokenizer that fits ``config`` and, but for its decoder, has the published one's sizes."""
    shared = dict(
        vocab_size=config.vocab_size, z_channels=config.z_channels, patch_nums=config.patch_nums
    )
    return VQVAE(VQVAEConfig(ch=32, ch_mult=(1, 2, 2), **shared)).eval()  # type: ignore[arg-type]


def foresee(
    large: VARConfig, small: VARConfig, batch: int, sampling: Sampling, dtype: torch.dtype
) -> Plan:
    """CoDe by N for models of these sizes: rates of this machine, fitted to ``PROBE`` blocks of
    each width.

    Seconds are those of tokens, without decoding pixels.
    """
    first, second = (
        random_var(replace(config, depth=PROBE), dtype, config) for config in (large, small)
    )
    machine = replace(calibrate(first, second, random_vqvae(large), batch, sampling), decode=0.0)
    forecasts = forecast(large, small, Draw(batch, sampling.cfg > 0, dtype.itemsize), machine)
    return Plan(*choose_n(forecasts), forecasts, machine)
