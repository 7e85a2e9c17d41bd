"""Scales as compiled programs: the same pictures, CoDe's catching up included; large scales run as
they are.
"""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.image_ar.scales import next_scale
from specmm.image_ar.scales.collaborative import alternate, code_turns
from specmm.image_ar.scales.next_scale import FeatureMap
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import InverseCDF, Sampling
from specmm.image_ar.scales.var import VAR
from specmm.programs.compiled import compiled, prepare_compiler

LABELS = torch.tensor([3, 7])


@torch.inference_mode()
def draw(pair, vqvae, n, blocks=(None, None)):
    feature_map, sampling = FeatureMap(vqvae.quantize, len(LABELS)), Sampling(2.0, 8)
    uniforms = InverseCDF(sampling, Uniforms.from_seeds([1, 2]), len(feature_map.schedule))
    turns = [
        dataclasses.replace(turn, blocks=own)
        for turn, own in zip(code_turns(*pair, n), blocks, strict=True)
    ]
    list(alternate(turns, feature_map, LABELS, sampling, lambda _: uniforms, Clock()))
    return feature_map.tokens


@pytest.fixture(scope="module")
def pair(make):
    return make.var(0, patch_nums=(1, 2, 3)), make.var(
        1, embed_dim=32, num_heads=2, patch_nums=(1, 2, 3)
    )


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
def test_programs_draw_the_same_pictures(pair, make):
    prepare_compiler(LABELS.device)
    vqvae, calls, made = make.vqvae((1, 2, 3)), [], [compiled(VAR.run) for _ in pair]
    blocks = [
        lambda *given, run=run: calls.append(given[1].shape[1]) or run(*given) for run in made
    ]
    assert torch.equal(draw(pair, vqvae, 1, blocks), draw(pair, vqvae, 1))
    assert calls == [5, 9], (
        "the large model's only scale keeps nothing, the small one's first pass is of two"
    )


def test_scales_of_many_rows_run_as_they_are(pair, make, monkeypatch):
    monkeypatch.setattr(next_scale, "FEW", 3)
    vqvae, none = make.vqvae((1, 2, 3)), [lambda *given: 1 / 0] * 2
    assert torch.equal(draw(pair, vqvae, 0, none), draw(pair, vqvae, 0))


def test_methods_whose_passes_differ_are_refused(pair, make):
    pipe = VARPipeline(pair[0], make.vqvae((1, 2, 3)), pair[1])
    with pytest.raises(ValueError, match="ar or code"):
        pipe(classes=[1], method="auto", compiled=True)
