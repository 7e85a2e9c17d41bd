"""Measured peaks, and that CoDe holds one model's caches at a time."""

import pytest
import torch

from benchmarks.memory import measured_peak
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.image_ar.scales.collaborative import alternate, code_turns
from specmm.image_ar.scales.next_scale import FeatureMap
from specmm.image_ar.scales.sampling import InverseCDF, Sampling
from specmm.image_ar.scales.tuning import model_memory
from specmm.loading.hardware import prepack

CPU = torch.device("cpu")


def test_what_counts():
    kept, before = [], torch.zeros(1000)

    def run():
        kept.append(before.view(10, 100))  # a view is nothing new
        once = torch.zeros(1000)
        once = once + 1  # both for a moment
        kept.append(once.double())  # 8000 bytes beside 4000

    assert measured_peak(run, CPU) == 12000
    assert measured_peak(lambda: None, CPU) == 0


def test_packed_weights_are_no_hindrance():
    layer = prepack(torch.nn.Linear(64, 32, bias=False).bfloat16())
    x = torch.randn(16, 64).bfloat16()
    with torch.no_grad():
        assert measured_peak(lambda: layer(x), CPU) == 2 * 16 * 32


@pytest.mark.parametrize("n", [0, 3, 5])
def test_forecasts(make, vqvae, n):
    large = make.var(0, depth=4, embed_dim=256, num_heads=8)
    small = make.var(1, embed_dim=192, num_heads=6)
    labels = torch.arange(10).repeat(4)
    sampling = Sampling(2.0)
    uniforms = Uniforms.from_seeds(range(40))
    uniforms.draw(1)  # its block is made before

    @torch.inference_mode()
    def run():
        feature_map = FeatureMap(vqvae.quantize, len(labels))
        sampler = InverseCDF(sampling, uniforms, 5)
        turns = code_turns(large, small, n)
        list(alternate(turns, feature_map, labels, sampling, lambda _: sampler, Clock()))

    draw = (40, sampling, torch.float32)
    wanted = max(
        model_memory(large.config, range(n), *draw), model_memory(small.config, range(n, 5), *draw)
    )
    assert measured_peak(run, CPU) == pytest.approx(wanted, rel=0.2)
