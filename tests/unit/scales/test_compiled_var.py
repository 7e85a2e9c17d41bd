"""Scales as compiled programs: the same pictures, CoDe's catching up included; large scales run as
they are.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from specmm import methods
from specmm.image_ar.scales import compiled_var
from specmm.image_ar.scales.collaborative import alternate, code_turns
from specmm.image_ar.scales.compiled_var import CompiledVAR, check_method
from specmm.image_ar.scales.next_scale import FeatureMap
from specmm.image_ar.scales.sampling import InverseCDF, Sampling
from specmm.randomness import Uniforms
from specmm.stats import Clock

LABELS = torch.tensor([3, 7])


@torch.inference_mode()
def draw(large, small, vqvae, n):
    feature_map, sampling = FeatureMap(vqvae.quantize, len(LABELS)), Sampling(2.0, 8)
    uniforms = InverseCDF(sampling, Uniforms.from_seeds([1, 2]), len(feature_map.schedule))
    turns = code_turns(large, small, n)
    list(alternate(turns, feature_map, LABELS, sampling, lambda _: uniforms, Clock()))
    return torch.cat(feature_map.tokens, dim=1)


@pytest.fixture(scope="module")
def pair(make):
    return make.var(0, patch_nums=(1, 2, 3)), make.var(
        1, embed_dim=32, num_heads=2, patch_nums=(1, 2, 3)
    )


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
def test_programs_draw_the_same_pictures(pair, make, monkeypatch):
    vqvae, quick, calls = make.vqvae((1, 2, 3)), [CompiledVAR(model) for model in pair], []
    for model in quick:
        monkeypatch.setattr(
            model, "program", lambda *a, run=model.program: calls.append(a[1].shape[1]) or run(*a)
        )
    assert torch.equal(draw(*quick, vqvae, 1), draw(*pair, vqvae, 1))
    assert calls == [5, 9], (
        "the large model's only scale keeps nothing, the small one's first pass is of two"
    )


def test_scales_of_many_rows_run_as_they_are(pair, make, monkeypatch):
    monkeypatch.setattr(compiled_var, "FEW", 3)
    quick = [CompiledVAR(model) for model in pair]
    for model in quick:
        monkeypatch.setattr(model, "program", None)
    vqvae = make.vqvae((1, 2, 3))
    assert torch.equal(draw(*quick, vqvae, 0), draw(*pair, vqvae, 0))


def test_methods_whose_passes_differ_are_refused():
    check_method(methods.AR()), check_method(methods.CoDe(2))
    with pytest.raises(ValueError, match="ar or code"):
        check_method(methods.Auto())
