"""MAR, its head, diffusion and autoencoder against numbers that the official release produced.

The ``.json`` beside each file in tests/parity/cspd says which call made which tensor.
"""

import pytest
import torch

from recipes.training.diffusion import denoised, diffusion_loss, noised, step_distribution
from specmm.image_ar.continuous.diffusion import NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import ChainHead, HeadCondition, sinusoid
from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig
from specmm.image_ar.continuous.mar import patchify, unpatchify
from specmm.image_ar.continuous.orders import MARSettings, mask_lengths
from specmm.loading.checkpoints import load_strict
from tests.tiny import recorded
from tests.tiny.recorded import tiny_mar, under


def facts(name):
    return recorded.facts(f"cspd/{name}")


def tensors(name):
    return recorded.tensors(f"cspd/{name}")


@pytest.fixture(scope="module")
def t():
    return tensors("mar_tiny")


@pytest.fixture
def model():
    return tiny_mar()


def close(got, wanted, relative=1e-5):
    """Within ``relative`` of the largest wanted magnitude, the README's measure."""
    assert got.shape == wanted.shape
    worst = float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    assert worst < relative, worst


# --- transformer ---


@torch.no_grad()
@pytest.mark.parametrize("case", ["part", "all", "one", "most"])
def test_encoder_and_decoder(t, model, case):
    g = under(t, f"encdec.{case}.")
    known = (g["mask"] == 0).nonzero()[:, 1].view(3, -1)
    condition = g["class_embedding"]
    if "labels" in g:
        torch.testing.assert_close(model.embed_classes(g["labels"]), condition)
    else:
        torch.testing.assert_close(model.embed_classes(None, 3)[1:], condition[1:])
    encoded = model.encode(g["tokens"], known, condition)
    close(encoded, g["encoder_out"])
    close(model.decode(encoded, known), g["z"])
    wanted = torch.tensor([[3, 0], [1, 2], [15, 7]])
    close(
        model(g["tokens"], known, condition, wanted),
        g["z"].gather(1, wanted[:, :, None].expand(-1, -1, 48)),
    )


def test_patches(t):
    torch.testing.assert_close(patchify(t["patchify.img"]), t["patchify.tokens"])
    latents = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    tokens = patchify(latents, 2)
    assert torch.equal(unpatchify(tokens, 2), latents)
    assert torch.equal(tokens[0, 1], latents[0, :, :2, 2:4].flatten())  # channel, row, column


# --- head and diffusion ---


@torch.no_grad()
def test_head(t, model):
    # one rounding of an angle of up to 1,000: processors' exp() differ by as much
    turns = 1000 * 2**-23
    torch.testing.assert_close(
        sinusoid(t["head.t"]), t["head.time_embedding_sinusoid"], atol=turns, rtol=0
    )
    close(model.head.time_embed(t["head.t"]), t["head.time_embed"])
    close(model.head(t["head.x"], t["head.t"], t["head.z"]), t["head.out"])


@torch.no_grad()
@pytest.mark.parametrize("cfg", [1.0, 1.75, 4.0])
def test_guided_head(t, model, cfg):
    g = under(t, "head_cfg.")
    half = len(g["x"]) // 2
    z = g["z"].view(2, half, -1).transpose(0, 1)
    bound = ChainHead(model.head, NoiseSchedule.of("")).bind(HeadCondition(z, cfg))
    eps, v = bound.window(range(half), (999 - g["t"][:half]).tolist(), g["x"][:half, None])
    close(torch.cat([eps[:, 0], v[:, 0]], dim=-1), g[f"out.cfg{cfg}"][:half])


@pytest.mark.parametrize("spec", ["8", "50", "100"])
def test_tables(spec):
    g, schedule = (under(tensors("gaussian_diffusion_tables"), f"{spec}."), NoiseSchedule.of(spec))
    names = ["timestep_map", "betas", "alphas_cumprod", "alphas_cumprod_prev"]
    parts = ("variance", "log_variance_clipped", "mean_coef1", "mean_coef2")
    for name in (*names, *(f"posterior_{part}" for part in parts)):
        torch.testing.assert_close(getattr(schedule, name), g[name], atol=1e-12, rtol=1e-11)
    assert len(schedule) == int(spec)


def test_full_tables_and_strides():
    g, schedule = (under(tensors("gaussian_diffusion_tables"), "full1000."), NoiseSchedule.of(""))
    for name in ("betas", "alphas_cumprod", "posterior_log_variance_clipped"):
        torch.testing.assert_close(getattr(schedule, name), g[name], atol=1e-12, rtol=1e-12)
    assert NoiseSchedule.of("ddim8").timestep_map.tolist() == facts("cspd_accept")["timestep_map"]


@pytest.mark.parametrize(
    ("spec", "message"), [("ddim600", "strides"), ("2000", "at most 1000"), ("many", "number")]
)
def test_steps_that_do_not_fit(spec, message):
    with pytest.raises(ValueError, match=message):
        NoiseSchedule.of(spec)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "cfg"), [("pmv", 1.0), ("pmv_cfg", facts("mar_tiny")["p_mean_variance_cfg"])]
)
def test_distributions(t, model, name, cfg):
    g, schedule, rows = under(t, f"{name}."), NoiseSchedule.of("8"), 6
    branches = g["z"].split(rows)
    for i in range(8):
        x, steps = g["x"][i][:rows], torch.full((rows,), i)
        outs = [model.head(x, schedule.timestep_map[steps], z) for z in branches]
        eps, v = outs[0].chunk(2, dim=-1)
        eps = torch.lerp(outs[-1].chunk(2, dim=-1)[0], eps, cfg)
        out = torch.cat([eps, v], dim=-1)
        mean, log_var = step_distribution(schedule, out, x, steps)
        close(mean, g["mean"][i][:rows], 1e-4)
        close(log_var, g["log_variance"][i][:rows])
        close(log_var.exp(), g["variance"][i][:rows])
        close(
            denoised(schedule, x, steps, out.chunk(2, dim=-1)[0]), g["pred_xstart"][i][:rows], 1e-4
        )


@torch.no_grad()
def test_training_loss(t, model):
    g, schedule = under(t, "train."), NoiseSchedule.of("")
    x = noised(schedule, g["target"], g["t"], g["noise"])
    mse, vb = diffusion_loss(
        schedule, model.head(x, g["t"], g["z"]), g["target"], x, g["t"], g["noise"]
    )
    close(mse, g["mse"])
    close(vb, g["vb"], 1e-4)
    close(mse + vb, g["loss"], 1e-4)


# --- orders ---


@pytest.mark.parametrize(("name", "lengths"), facts("cspd_accept")["mask_len_schedules"].items())
def test_mask_lengths(name, lengths):
    length, iterations = (int(part[1:]) for part in name.split("."))
    assert mask_lengths(length, iterations) == lengths


@pytest.mark.parametrize("run", facts("mar_tiny")["sample_runs"], ids=lambda run: run["name"])
def test_iterations_and_guidance(run):
    own = {name: run[name] for name in ("num_iter", "cfg", "cfg_schedule") if name in run}
    got = MARSettings(**own).iterations(16)
    before = [n for n in run["n_masked_before_step"] if n]
    assert [i.last for i in got] == before[: len(got)]
    assert sum(i.last - i.first for i in got) == 16
    if "official_raises" not in run:
        assert [3 * (i.last - i.first) for i in got] == run["n_pred_per_step_total"]
        assert [i.scale for i in got] == pytest.approx(run["cfg_iter_per_step"])


# --- autoencoder ---


@torch.no_grad()
def test_autoencoder():
    sizes, t = facts("kl_vae_tiny"), tensors("kl_vae_tiny")
    names = ("ch", "z_channels", "num_res_blocks", "resolution")
    lists = {k: tuple(sizes[k]) for k in ("ch_mult", "attn_resolutions")}
    config = KLConfig(**{k: sizes[k] for k in names}, **lists, scale=sizes["scale_factor"])
    kl = AutoencoderKL(config).eval()
    load_strict(kl, recorded.floats(tensors("kl_vae_tiny_state_fp16")), ())
    close(kl.encoder(t["x"]), t["encoder_out"])
    posterior = kl.encode(t["x"])
    close(posterior.mean, t["mean"])
    close(posterior.log_var, t["logvar"])
    close(posterior.sample(t["sample_noise"]), t["sample"])
    close(posterior.kl(), t["kl"])
    close(kl.decode(t["decode_in"]), t["decode_out"])
    close(kl.decode(t["mean"]), t["decode_mean_out"])
    close(kl.decode_scaled(t["scaled_latent"]), t["decode_scaled_out"])
