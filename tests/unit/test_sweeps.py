"""The tables of MAR and VAR: what is timed, compared and kept on disk; on tiny random models."""

import dataclasses

import pytest
import torch

from benchmarks import mar, sweep, var
from benchmarks.bars import mar_bars
from benchmarks.common import Budget
from benchmarks.samples import SampleSet
from specmm.core.randomness import seeded
from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig
from specmm.image_ar.continuous.mar import MAR, MARConfig
from specmm.image_ar.continuous.orders import MARSettings
from specmm.image_ar.continuous.pipeline import MARPipeline
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from tests.tiny.parts import mar_sides

SMALL = mar_sides(16, 1) | dict(buffer_size=2, diffloss_d=1, diffloss_w=16)
MAR_SIZES = MARConfig(img_size=8, vae_stride=2, vae_embed_dim=3, class_num=4, **SMALL)
VAR_SIZES = VARConfig(2, 32, 2, vocab_size=32, z_channels=8, num_classes=4, patch_nums=(1, 2, 4))


@pytest.fixture(scope="module")
def continuous():
    vae = KLConfig(32, (1, 2), 1, 3, 8, (), 1.0)
    with seeded(0):
        networks = [MAR(MAR_SIZES), AutoencoderKL(vae), MAR(MAR_SIZES)]
        made = MARPipeline(*(network.eval() for network in networks), MARSettings(8, "8"))
    made.set_progress_bar_config(disable=True)
    return made


def test_settings_of_compiled_mar_are_all_ways_in_both_dtypes():
    settings = mar.settings_compiled("pocket/mar")
    names = {s.name for s in settings}
    both = {"ar", "exact", "ar, bfloat16", "exact, bfloat16"}
    assert settings[0].name == "ar" and names == both | {f"{name}, compiled" for name in both}
    for s in settings:
        assert s.call["compiled"] == s.name.endswith("compiled")
        assert (s.pipe.dtype == torch.bfloat16) == ("bfloat16" in s.name)


@pytest.fixture(scope="module")
def scales():
    with seeded(0):
        vae = VQVAE(VQVAEConfig(32, 8, 32, (1, 2), 1, (1, 2, 4))).eval()
        large, small = (VAR(dataclasses.replace(VAR_SIZES, depth=depth)).eval() for depth in (2, 1))
        made = VARPipeline(large, vae, small)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.slow
def test_every_setting_of_mar_runs_and_is_counted(continuous):
    settings = mar.settings_of(continuous)
    sweep.time_settings(settings, 4, 1, 1, Budget())
    rows = {s.name: mar.row(s, settings[0]) for s in settings}
    assert rows["ar"]["head_calls_per_token"] == 8 and rows["ar"]["target_passes"] == 8
    assert rows["ar"]["speedup"] == 1 and rows["exact"]["certificate"] == "exact"
    assert rows["ar, 4 iterations"]["target_passes"] == 4
    for window in mar.WINDOWS:
        assert rows[f"release, window {window}"]["target_passes"] == mar.passes(8, window, 0.05)


def test_every_setting_of_var_runs_and_has_its_ideal(scales):
    settings = var.settings_of(scales, [])
    sweep.time_settings(settings, 4, 2, 1, Budget())
    rows = {s.name: var.row(s, settings[0], 2) for s in settings}
    ideals = [rows[f"code, N = {n}"]["ideal"] for n in range(3)]
    # more scales by the small model, less arithmetic
    assert ideals == sorted(ideals, reverse=True) and ideals[-1] > 1
    assert all(r["peak_mib"] > 0 for r in rows.values())
    assert rows["ar"]["certificate"] == "exact"


def test_samples_are_made_once(scales, tmp_path):
    (tmp_path / "model").mkdir()
    real = type("Real", (), {"labels": torch.tensor([0, 1, 2, 3]).numpy()})
    settings = var.settings_of(scales, [])[:2]

    def draw():
        return sweep.draw_all(settings, tmp_path, tmp_path / "model", real, 5, 3, Budget())

    found = draw()
    first = {f: f.stat().st_mtime_ns for made in found.values() for f in made.folder.iterdir()}
    assert [found[s.name].count() for s in settings] == [5, 5]
    draw()
    assert {f: f.stat().st_mtime_ns for f in first} == first
    assert isinstance(found["ar"], SampleSet)


def test_the_front():
    rows = [dict(seconds=s, fid=f) for s, f in ((1, 9), (2, 5), (3, 6), (4, 4), (1, 10))]
    assert sweep.on_front(rows) == [True, True, False, True, False]


def test_the_front_bar_of_mar_names_what_is_on_it():
    common = {"head_calls_per_token": 12.0}
    rows = [
        {"method": "ar", "speedup": 1.0, "fid": 100.0, "front": True, **common},
        {"method": "exact", "speedup": 1.9, "fid": 100.5, "front": True, **common},
        {"method": "exact, window 8", "speedup": 1.7, "fid": 101.0, "front": False, **common},
        {"method": "paper, window 4", "speedup": 0.3, **common},
    ]
    held = mar_bars(rows)[-1]
    assert held.met and held.found == "exact (1.90×, FID 100.5)"
    rows[1]["front"] = False
    assert mar_bars(rows)[-1].met is False and mar_bars(rows)[-1].found == "none of it"
    assert mar_bars([{k: v for k, v in r.items() if k != "fid"} for r in rows])[-1].met is None
