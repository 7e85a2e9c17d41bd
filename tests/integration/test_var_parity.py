"""Our VAR, its tokenizer and CoDe against numbers that the official releases produced."""

import zlib
from math import prod

import numpy as np
import pytest
import torch

from recipes.training.vqvae import quantise
from specmm.image_ar.scales.loading import infer_var_config, infer_vqvae_config, load_var
from specmm.image_ar.scales.scale_schedule import PATCHES_512
from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE, MultiScaleQuantizer, VQVAEConfig, phi_of_scale
from specmm.loading.checkpoints import load_strict
from tests.integration.var_cases import RELEASED, TOKENIZER, VARIANTS, close, tiny_vqvae
from tests.tiny.recorded import Case, facts


@pytest.fixture
def vqvae():
    return tiny_vqvae()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    found = {}
    for name in VARIANTS:
        state = RELEASED.state(f"{name}.weights.")
        file = tmp_path_factory.mktemp(name) / "var.pth"
        torch.save({"trainer": {"var_wo_ddp": state}}, file)
        heads = VARConfig(**tiny_sizes(), attn_l2_norm=False) if name == "nol2" else None
        found[name] = load_var(file, heads)
    return found


def tiny_sizes():
    sizes = {k: v for k, v in RELEASED.facts["config"].items() if k != "cond_drop_rate"}
    return sizes | dict(vocab_size=64, z_channels=8, patch_nums=tuple(RELEASED.facts["patch_nums"]))


# --- tokenizer ---


def test_tokenizer_sizes_are_inferred(vqvae):
    sizes = TOKENIZER.facts["config"]
    names = "vocab_size z_channels ch num_res_blocks share_quant_resi quant_resi quant_conv_ks"
    for name in names.split():
        assert getattr(vqvae.config, name) == sizes[name], name
    assert vqvae.config.ch_mult == tuple(sizes["ch_mult"])
    assert vqvae.config.downsampling == sizes["downsample"]


@torch.no_grad()
def test_tokenizer_encodes(vqvae):
    features = vqvae.features(TOKENIZER.t["in.image"])
    close(features, TOKENIZER.t["out.encoder_f"], 2e-4)
    tokens = vqvae.quantize.encode(features)
    for got, wanted in zip(tokens, TOKENIZER.scales("out.idx"), strict=True):
        assert torch.equal(got, wanted)
    quantized = quantise(vqvae.quantize, features)
    assert all(torch.equal(a, b) for a, b in zip(quantized.tokens, tokens, strict=True))
    close(quantized.f_hat, TOKENIZER.t["out.fhat.3"], 2e-4)


@torch.no_grad()
def test_tokenizer_by_angle(vqvae):
    vqvae.quantize.znorm = True
    tokens = vqvae.encode(TOKENIZER.t["in.image"])
    vqvae.quantize.znorm = False
    for got, wanted in zip(tokens, TOKENIZER.scales("out.idx_znorm"), strict=True):
        assert torch.equal(got, wanted)


@torch.no_grad()
def test_tokenizer_decodes(vqvae):
    tokens, t = TOKENIZER.scales("out.idx"), TOKENIZER.t
    sums = vqvae.quantize.f_hats(tokens)
    for k in range(4):
        close(sums[k], t[f"out.fhat.{k}"], 2e-4)
        close(vqvae.decode(sums[k]), t[f"out.img_upto_scale.{k}"], 2e-4)
    close(vqvae.decode_tokens(tokens), t["out.image"], 2e-4)
    close(vqvae.quantize.inputs(tokens), t["out.var_input"], 2e-4)


@torch.no_grad()
def test_tokenizer_of_the_real_layout():
    case = Case("var/vqvae_fulllayout")
    sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in case.facts["config"].items()}
    model = VQVAE(VQVAEConfig(**sizes | dict(ch=32)))
    assert {k: list(v.shape) for k, v in model.state_dict().items()} == case.facts["keys"]
    load_strict(model, {k: by_rule(k, v.shape) for k, v in model.state_dict().items()}, ())
    model.eval()
    features = model.features(case.t["in.image"].float())
    close(features, case.t["out.encoder_f"])
    tokens = model.quantize.encode(features)
    for got, wanted in zip(tokens, case.scales("out.idx"), strict=True):
        assert torch.equal(got, wanted)
    close(model.quantize.f_hats(tokens)[-1], case.t["out.fhat"])
    close(model.decode_tokens(tokens), case.t["out.image"])


def by_rule(key, shape):
    """The weights that ``vqvae_fulllayout.json`` describes."""
    seed = (zlib.crc32(key.encode()) + 102) % 2**32
    z = np.random.RandomState(seed).standard_normal(tuple(shape))
    if key.endswith("ema_vocab_hit_SV"):
        z = 0 * z
    elif "norm" in key:
        z = 1 + 0.1 * z if key.endswith("weight") else 0.05 * z
    elif key != "quantize.embedding.weight":
        z = z / prod(shape[1:]) ** 0.5 if len(shape) == 4 else 0.05 * z
    return torch.from_numpy(z).float()


def test_phi_of_every_scale():
    table = facts("var/phi_table")
    for name, wanted in table["table"].items():
        shared, scales = (int(part.split("=")[1]) for part in name.split(","))
        assert phi_of_scale(shared, scales) == wanted, name
    for name, keys in table["state_dict_keys"].items():
        shared = int(name.split("=")[1])
        config = VQVAEConfig(8, 4, patch_nums=(1, 2, 3, 4), share_quant_resi=shared)
        quantizer = MultiScaleQuantizer(config)
        assert set(quantizer.state_dict()) == set(keys)


def test_names_and_shapes_of_the_published_files():
    specs = facts("var/state_dict_specs")
    with torch.device("meta"):
        vqvae = VQVAE(VQVAEConfig())
    wanted = specs.pop("vae_ch160v4096z32.pth")
    assert described(vqvae) == wanted
    state = {k: torch.empty(s, device="meta") for k, (s, _) in wanted.items()}
    assert infer_vqvae_config(state) == VQVAEConfig()
    large = dict(depth=36, embed_dim=2304, num_heads=36, patch_nums=PATCHES_512, shared_aln=True)
    for spec, config in zip(specs.values(), (VARConfig(), VARConfig(**large)), strict=True):
        with torch.device("meta"):
            found = described(VAR(config))
        wanted = {k: v for k, v in spec["keys"].items() if not k.startswith("blocks.")}
        for key, value in spec["keys"].items():
            for i in range(config.depth if key.startswith("blocks.") else 0):
                wanted[key.replace("blocks.0.", f"blocks.{i}.")] = value
        assert found == wanted


def described(model):
    return {
        k: [list(v.shape), str(v.dtype).removeprefix("torch.")]
        for k, v in model.state_dict().items()
    }


# --- transformer ---


def test_transformer_sizes_are_inferred(models):
    for name in ("noshared", "shared"):
        heads = RELEASED.facts["variants"][name]
        wanted = VARConfig(
            **tiny_sizes(), shared_aln=heads["shared_aln"], attn_l2_norm=heads["attn_l2_norm"]
        )
        assert models[name].config == infer_var_config(RELEASED.state(f"{name}.weights.")) == wanted


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_teacher_forcing(models, name):
    model, labels = models[name], torch.tensor(RELEASED.facts["labels"])
    inputs = TOKENIZER.t["out.var_input"]
    close(model(labels, inputs), RELEASED.t[f"{name}.tf.logits_cond"])
    close(model(torch.full_like(labels, 10), inputs), RELEASED.t[f"{name}.tf.logits_null"])
    # the first scales alone
    close(model(labels, inputs[:, :4]), RELEASED.t[f"{name}.tf.logits_cond"][:, :5])
