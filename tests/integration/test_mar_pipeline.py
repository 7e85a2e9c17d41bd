"""``MARPipeline``: methods and certificates, seeds and batches, folders, and the mistakes that are
named.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from specmm import methods
from specmm.cli.bench import bench
from specmm.cli.generate import generate
from specmm.core.randomness import seeded
from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig
from specmm.image_ar.continuous.mar import MAR, MARConfig
from specmm.image_ar.continuous.orders import MARSettings
from specmm.image_ar.continuous.pipeline import MARPipeline
from specmm.image_ar.pipeline import ImagePipeline
from tests.tiny.parts import mar_sides

KL = KLConfig(32, (1, 2), 1, z_channels=3, resolution=12, attn_resolutions=(), scale=1.0)
SIZES = dict(img_size=12, vae_stride=2, vae_embed_dim=3)
SIZES |= dict(class_num=4, buffer_size=2, diffloss_d=2, diffloss_w=16)
CLASSES = ("heart", "face-smiling", "food-fruit", "time")
# "12" would begin where alphas_cumprod is 1e-9: an untrained head's tokens are then of 1e4, and the
# rounding of such numbers decides which drafts are kept
FAST = MARSettings(num_iter=6, head_steps="ddim12", classes=CLASSES)


def transformer(dim=16, depth=2, **changes):
    model = MAR(MARConfig(**SIZES | mar_sides(dim, depth) | changes))
    blocks = [block.adaLN_modulation[1] for block in model.head.res_blocks]
    for layer in (model.head.final_layer.linear, *blocks):
        torch.nn.init.normal_(layer.weight, std=0.05)  # the release starts them at zero
    return model.eval()


def pipeline(seed=0, small=True, settings=FAST, **changes):
    with seeded(seed):
        vae = AutoencoderKL(KL).eval()
        return MARPipeline(
            transformer(**changes), vae, transformer(8, 1) if small else None, settings
        )


@pytest.fixture(scope="module")
def pipe():
    made = pipeline()
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipe, tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "mar"
    place.mkdir()
    pipe.save_pretrained(place)
    return place


def seeds(*numbers):
    return [torch.Generator().manual_seed(n) for n in numbers]


VARIANTS = [methods.AR(), *(methods.CSpD(variant=v) for v in ("exact", "release"))]


@pytest.mark.parametrize("method", VARIANTS, ids=lambda m: getattr(m, "variant", m.name))
@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_methods_and_their_certificates(pipe, method, cfg):
    out = pipe(["heart", 3], generator=seeds(1, 2), method=method, cfg=cfg)
    assert [image.size for image in out.images] == [(12, 12)] * 2
    assert out.tokens.shape == (2, 36, 3) and out.stats.tokens == 72 and out.method == method.name
    wanted = "exact" if getattr(method, "variant", "exact") == "exact" else "heuristic"
    assert out.certificate.kind == wanted and len(out.certificate.reason) > 20
    assert out.stats.head_calls > 0 and out.stats.tau > 1


def test_speculation_makes_fewer_head_calls(pipe):
    plain = pipe(["heart"], generator=seeds(1), output_type="latent", head_steps=50)
    fast = pipe(["heart"], generator=seeds(1), output_type="latent", head_steps=50, method="cspd")
    assert plain.stats.head_calls_per_token == 50
    assert fast.stats.head_calls_per_token < 25


@pytest.mark.parametrize("method", VARIANTS, ids=lambda m: getattr(m, "variant", m.name))
def test_a_picture_does_not_depend_on_its_batch(pipe, method):
    given = dict(method=method, cfg=1.5, output_type="uint8")
    together = pipe([0, 1, 2], generator=seeds(1, 2, 3), **given)
    for i in range(3):
        alone = pipe([i], generator=seeds(i + 1), **given)
        torch.testing.assert_close(together.tokens[i : i + 1], alone.tokens, atol=1e-3, rtol=1e-3)
        assert np.abs(together.images[i].astype(int) - alone.images[0]).max() <= 1
    apart = pipe([0, 1, 2], generator=seeds(1, 2, 3), batch_size=2, **given)
    torch.testing.assert_close(together.tokens, apart.tokens, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", VARIANTS, ids=lambda m: getattr(m, "variant", m.name))
def test_half_precision(folder, method):
    half = MARPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
    half.set_progress_bar_config(disable=True)
    out = half(["heart"], generator=seeds(1), method=method, cfg=2.0, output_type="uint8")
    assert out.tokens.dtype == torch.float32 and out.images.shape == (1, 12, 12, 3)


def test_folders_go_round(pipe, folder):
    again = MARPipeline.from_pretrained(folder, method="cspd", torch_dtype=torch.float32)
    assert again.settings == FAST and again.small is not None and again.method == methods.CSpD()
    same = [
        p(["time"], generator=seeds(5), method="ar", output_type="latent").tokens
        for p in (pipe, again)
    ]
    assert torch.equal(*same)


def test_a_small_model_may_come_from_elsewhere(pipe, folder, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    pipeline(small=False).save_pretrained(alone)
    assert MARPipeline.from_pretrained(alone).small is None
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    assert MARPipeline.from_pretrained(alone, small=other).small is not None


def test_a_solver_of_another_distribution_says_so(pipe):
    out = pipe(["heart"], generator=seeds(1), solver="ddim", head_steps=4, output_type="latent")
    assert out.certificate.kind == "heuristic" and "DDIM" in out.certificate.reason
    with pytest.raises(ValueError, match="solver must be 'ddpm' for cspd"):
        pipe(["heart"], solver="ddim", method="cspd")


def test_a_chain_without_noise_is_run_plainly(pipe):
    cold = [
        pipe(["heart"], generator=seeds(1), temperature=0.0, method=m, output_type="latent")
        for m in ("ar", "cspd")
    ]
    assert torch.equal(cold[0].tokens, cold[1].tokens) and cold[1].certificate.kind == "exact"
    with pytest.raises(ValueError, match="temperature must be above 0"):
        pipe(["heart"], temperature=0.0, method=methods.CSpD(variant="release"))


def test_the_command_line_draws(folder, tmp_path):
    for i, options in enumerate(([], ["variant=release", "window=4"], ["window=5"])):
        place = tmp_path / str(i)
        generate(str(folder), ["heart", "2"], method="cspd", option=options, seed=1, out=place)
        run = json.loads((place / "run.json").read_text())
        assert run["tokens"] == 72
        assert run["certificate"]["kind"] == ("heuristic" if i == 1 else "exact")
    with pytest.raises(ValueError, match="unknown option"):
        generate(str(folder), ["heart"], top_k=3, seed=1, out=tmp_path / "x")
    assert isinstance(ImagePipeline.from_pretrained(folder, method="cspd"), MARPipeline)


def test_bench_on_the_command_line(folder, capsys):
    bench(str(folder), n=1, seed=1, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [r["method"] for r in rows] == ["ar", "cspd"]
    # continuous tokens have densities at most
    assert all(r["quality"]["log_likelihood"] is None for r in rows)
    bench(str(folder), n=1, seed=1)
    assert "cspd" in capsys.readouterr().out


def test_callbacks_see_every_iteration(pipe):
    seen = []
    pipe(["heart"], generator=seeds(1), output_type="latent",
         callback_on_step_end=lambda _, i, count, state: seen.append((i, count)))  # fmt: skip
    assert seen[-1] == (6, 36) and [i for i, _ in seen] == list(range(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(cfg=-1.0), "cfg must be finite and at least 0, got -1.0"),
        (dict(cfg=float("nan")), "cfg must be finite and at least 0, got nan"),
        (dict(num_iter=0), "num_iter must be at least 1"),
        (dict(temperature=-0.5), "temperature must be finite and at least 0"),
        (dict(head_steps="many"), "head steps must be a number"),
        (dict(cfg_schedule="cubic"), "cfg_schedule must be"),
        (dict(solver="euler"), "solver must be"),
        (dict(method="cspdd"), "did you mean 'cspd'"),
        (dict(method=methods.CSpD(window=1)), "window must be at least 2"),
        (dict(method=methods.CSpD(variant="release", window=-1)), "window must be at least 1"),
        (dict(classes=["hart"]), "did you mean 'heart'"),
    ],
)
def test_options_out_of_range(pipe, options, message):
    with pytest.raises(ValueError, match=message):
        pipe(**dict(classes=["heart"], output_type="latent") | options)


def test_an_option_that_cspd_has_not():
    with pytest.raises(ValueError, match="unknown option of cspd 'windo'; did you mean 'window'"):
        methods.make(methods.CONTINUOUS, "cspd", windo=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(cfg=2.0), "cfg must be 1 for a model without fake_latent"),
        (dict(method=methods.CSpD(variant="release")), "needs a small model"),
    ],
)
def test_what_guidance_and_drafts_need(options, said):
    with pytest.raises(ValueError, match=said):
        pipeline(small=False, fake_latent=False)(["heart"], **options)


def test_models_that_do_not_go_together(folder, tmp_path):
    vae = AutoencoderKL(dataclasses.replace(KL, z_channels=4))
    with pytest.raises(ValueError, match="autoencoder's channels must be"):
        MARPipeline(transformer(), vae)
    with pytest.raises(ValueError, match="drafter's token width must be"):
        MARPipeline(transformer(), AutoencoderKL(KL), transformer(vae_embed_dim=4))
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "small" / "pair.json").write_text('{"vae": "0123456789ab"}')
    with pytest.raises(ValueError, match="drafter's VAE must be the target's"):
        MARPipeline.from_pretrained(other)


@pytest.mark.parametrize("method", VARIANTS, ids=lambda m: getattr(m, "variant", m.name))
def test_weights_that_are_no_numbers(method):
    broken = pipeline()
    broken.transformer.head.final_layer.linear.bias.data[:] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        broken(["heart"], method=method, output_type="latent")


def test_variances_that_overflow():
    broken = pipeline()
    broken.transformer.head.final_layer.linear.bias.data[3:] = 1e5
    with pytest.raises(ValueError, match="log-variances must be finite"):
        broken(["heart"], method="cspd", output_type="latent")
    with pytest.raises(ValueError, match="finite"):
        broken(["heart"], method="ar", output_type="latent")
