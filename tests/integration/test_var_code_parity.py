"""VAR's sampling and CoDe's runs against what the official releases drew, greedy and from seeds."""

import dataclasses

import pytest
import torch

from specmm.checkpoints import load_strict
from specmm.image_ar.scales.collaborative import Turn, alternate, code_turns
from specmm.image_ar.scales.loading import infer_var_config, infer_vqvae_config
from specmm.image_ar.scales.next_scale import FeatureMap
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import (
    ReleaseSampler,
    Sampling,
    VARSettings,
    soften,
    sorted_mask,
)
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.vqvae import VQVAE
from specmm.methods import CoDe
from specmm.stats import Clock
from tests.integration.var_cases import VARIANTS, Case, close


@pytest.fixture(scope="module")
def vqvae():
    state = Case("vqvae_tiny").state()
    model = VQVAE(infer_vqvae_config(state, (1, 2, 3, 4)))
    load_strict(model, state, ())
    return model.eval()


def load(state, heads):
    """A VAR of ``state``; its sizes do not tell the heads without attn_l2_norm at this width."""
    config = infer_var_config(state | {"blocks.0.attn.scale_mul_1H11": torch.zeros(1, heads, 1, 1)})
    model = VAR(dataclasses.replace(config, attn_l2_norm="blocks.0.attn.scale_mul_1H11" in state))
    model.load_state_dict(state)
    return model.eval()


@pytest.fixture(scope="module")
def var():
    return Case("var_tiny")


@pytest.fixture(scope="module")
def models(var):
    return {name: load(var.state(f"{name}.weights."), 4) for name in VARIANTS}


# --- sampling ---


@pytest.mark.parametrize("i", range(36))
def test_filters_and_draws(i):
    case = Case("sampling")
    facts, logits = case.facts["cases"][i], case.t["logits"]
    top_k, top_p, temperature = facts["top_k"], facts["top_p"] or 1.0, float(facts["temp"])
    sampling = Sampling(0.0, top_k, top_p, temperature)
    kept = case.t[f"case{i}.kept"]
    assert torch.equal(sorted_mask(logits, top_k, top_p).isfinite(), kept)
    drawn = ReleaseSampler(sampling, torch.Generator().manual_seed(7), 4).draw(logits, 0)
    assert torch.equal(drawn.tokens, case.t[f"case{i}.idx"])
    ours = sampling.masked(logits).isfinite()
    assert (ours | ~kept).all()  # ours keeps all equals of a kept token, the release some of them
    least = logits.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    assert torch.equal(ours, logits >= least)


@pytest.mark.parametrize("i", range(3))
def test_gumbel_softmax(i):
    case = Case("sampling")
    temperature, scale = case.facts["gumbel"][i]
    noise = (
        torch.empty_like(case.t["logits"])
        .exponential_(generator=torch.Generator().manual_seed(9))
        .log_()
        .neg_()
    )
    close(
        ((case.t["logits"] * scale + noise) / temperature).softmax(-1), case.t[f"gumbel{i}"], 1e-5
    )
    if temperature != 0.1:  # the others are temperatures that go with their scale
        close(soften(case.t["logits"], noise, scale - 1), case.t[f"gumbel{i}"], 1e-5)


# --- decoding ---


class Recorder:
    """A sampler that keeps the logits it is given."""

    def __init__(self, sampler):
        self.sampler, self.logits = sampler, []

    def draw(self, logits, k):
        self.logits.append(logits)
        return self.sampler.draw(logits, k)


@torch.no_grad()
def drawn(vqvae, labels, turns, sampling, sampler):
    """The feature map of a run of ``turns``."""
    feature_map = FeatureMap(vqvae.quantize, len(labels))
    list(alternate(turns, feature_map, labels, sampling, sampler, Clock()))
    return feature_map


def alone(model, vqvae, labels, cfg, sampler=None):
    labels, sampling = torch.tensor(labels), Sampling(cfg, 1)
    recorder = Recorder(sampler or ReleaseSampler(sampling, torch.Generator().manual_seed(0), 4))
    turns = [Turn("large", model, range(4))]
    return drawn(vqvae, labels, turns, sampling, lambda steps: recorder), recorder.logits


def image(vqvae, feature_map):
    with torch.no_grad():
        return (vqvae.decode(feature_map.f_hats[-1]) + 1) / 2


def same_tokens(feature_map, wanted):
    assert len(feature_map.tokens) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(feature_map.tokens, wanted, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy(var, models, vqvae, name):
    feature_map, logits = alone(models[name], vqvae, var.facts["labels"], 1.5)
    same_tokens(feature_map, var.scales(f"{name}.greedy.idx"))
    for k in range(4):
        close(logits[k], var.t[f"{name}.greedy.cfg_logits.{k}"])
        close(feature_map.f_hats[k], var.t[f"{name}.greedy.fhat.{k}"])
    close(image(vqvae, feature_map), var.t[f"{name}.greedy.image01"])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("run", "labels", "cfg"),
    [
        ("greedy_cfg0", None, 0.0),
        ("greedy_cfg4", None, 4.0),
        ("int_label4", [4, 4], 1.5),
        ("null_label", [10], 1.5),
    ],
)
def test_greedy_at_other_options(var, models, vqvae, name, run, labels, cfg):
    feature_map, _ = alone(models[name], vqvae, labels or var.facts["labels"], cfg)
    same_tokens(feature_map, var.scales(f"{name}.{run}.idx"))


@pytest.mark.parametrize("name", VARIANTS)
def test_seeded_runs(var, models, vqvae, name):
    for run, smooth in (("stoch", False), ("smooth", True)):
        sampler = ReleaseSampler(
            Sampling(1.5, 20, 0.9, 1.0, smooth), torch.Generator().manual_seed(123), 4
        )
        feature_map, _ = alone(models[name], vqvae, var.facts["labels"], 1.5, sampler)
        same_tokens(feature_map, var.scales(f"{name}.{run}.idx"))
        close(image(vqvae, feature_map), var.t[f"{name}.{run}.image01"])
    pipe = VARPipeline(models[name], vqvae, None, VARSettings(1.5, 1.0, 20, 0.9))
    released = dict(
        generator=torch.Generator().manual_seed(123),
        method=CoDe(4, release=True),
        output_type="latent",
    )
    wanted = torch.cat(var.scales(f"{name}.stoch.idx"), dim=1)
    assert torch.equal(pipe(var.facts["labels"], **released).tokens, wanted), (
        "no small model is needed for the large one"
    )


# --- CoDe ---


@pytest.fixture(scope="module")
def code():
    return Case("code_tiny")


@pytest.fixture(scope="module")
def pair(code):
    return [
        load(code.state(f"{role}.weights."), code.facts[f"{role}_config"]["num_heads"])
        for role in ("draft", "refine")
    ]


def collaborate(code, pair, vqvae, n, samplers):
    """A run of CoDe whose two models have a sampler each."""
    labels, made = torch.tensor(code.facts["labels"]), iter(samplers)
    return drawn(vqvae, labels, code_turns(*pair, n), Sampling(1.5), lambda steps: next(made))


def release(seed, *options):
    return ReleaseSampler(Sampling(1.5, *options), torch.Generator().manual_seed(seed), 4)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_code_greedy(code, pair, vqvae, n):
    samplers = [Recorder(release(0, 1, 1.0, 1.1)) for _ in range(2)]
    feature_map = collaborate(code, pair, vqvae, n, samplers)
    same_tokens(feature_map, code.scales(f"N{n}.idx"))
    for k, logits in enumerate(samplers[0].logits + samplers[1].logits):
        close(logits, code.t[f"N{n}.cfg_logits.{k}"])
    close(feature_map.inputs(1, n), code.t[f"N{n}.draft_token_hub"])
    close(feature_map.f_hats[n - 1], code.t[f"N{n}.draft_fhat"])
    close(feature_map.f_hats[-1], code.t[f"N{n}.final_fhat"])
    close(image(vqvae, feature_map), code.t[f"N{n}.image01"])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_code_seeded(code, pair, vqvae, n):
    """As anyone would ask for it: the pipeline with the release's seed."""
    pipe = VARPipeline(pair[0], vqvae, pair[1], VARSettings(1.5, 1.1, 20, 0.95))
    pipe.set_progress_bar_config(disable=True)
    seeded, method = torch.Generator().manual_seed(42), CoDe(n, release=True)
    drawn = [
        pipe(code.facts["labels"], generator=seeded, method=method, output_type="uint8")
        for _ in range(2)
    ]
    wanted = torch.cat(code.scales(f"N{n}.stoch.idx"), dim=1)
    assert all(torch.equal(made.tokens, wanted) for made in drawn), (
        "the generator is left as it was"
    )
    apart = code.t[f"N{n}.stoch.image01"].permute(0, 2, 3, 1) * 255 - drawn[0].images.astype(
        "float32"
    )
    assert apart.abs().max() < 1


@pytest.mark.parametrize(("n", "run"), [(0, "plain_refine"), (4, "plain_draft")])
def test_code_at_its_ends_is_plain_decoding(code, pair, vqvae, n, run):
    feature_map = collaborate(code, pair, vqvae, n, [release(0, 1, 1.0, 1.1)])
    same_tokens(feature_map, code.scales(f"{run}.idx"))
    close(image(vqvae, feature_map), code.t[f"{run}.image01"])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_code_of_one_model_is_plain_decoding(code, pair, vqvae, n):
    feature_map = collaborate(
        code, [pair[0], pair[0]], vqvae, n, [release(0, 1, 1.0, 1.1) for _ in range(2)]
    )
    same_tokens(feature_map, code.scales("plain_draft.idx"))
