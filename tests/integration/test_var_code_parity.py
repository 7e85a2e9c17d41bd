"""VAR's sampling and CoDe's runs against what the official releases drew, greedy and from seeds."""

import pytest
import torch

from specmm.core.stats import Clock
from specmm.image_ar.scales.collaborative import Turn, alternate, code_turns
from specmm.image_ar.scales.next_scale import FeatureMap
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import (
    ReleaseSampler,
    Sampling,
    VARSettings,
    soften,
    sorted_mask,
)
from specmm.methods import CoDe
from tests.integration.var_cases import RELEASED, VARIANTS, close, tiny_vars, tiny_vqvae, var_of
from tests.tiny.recorded import Case


@pytest.fixture
def vqvae():
    return tiny_vqvae()


@pytest.fixture
def models():
    return tiny_vars()


CODE = Case("var/code_tiny")


# --- sampling ---


@pytest.mark.parametrize("i", range(36))
def test_filters_and_draws(i):
    case = Case("var/sampling")
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
    case = Case("var/sampling")
    temperature, scale = case.facts["gumbel"][i]
    logits, wanted = case.t["logits"], case.t[f"gumbel{i}"]
    noise = torch.empty_like(logits).exponential_(generator=torch.Generator().manual_seed(9))
    noise = noise.log_().neg_()
    close(((logits * scale + noise) / temperature).softmax(-1), wanted, 1e-5)
    if temperature != 0.1:  # the others are temperatures that go with their scale
        close(soften(logits, noise, scale - 1), wanted, 1e-5)


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
        return (vqvae.decode(feature_map.f_hat) + 1) / 2


def same_tokens(feature_map, wanted):
    assert all(torch.equal(a, b) for a, b in zip(feature_map.scales, wanted, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy(models, vqvae, name):
    feature_map, logits = alone(models[name], vqvae, RELEASED.facts["labels"], 1.5)
    same_tokens(feature_map, RELEASED.scales(f"{name}.greedy.idx"))
    sums = vqvae.quantize.f_hats(feature_map.scales)
    for k in range(4):
        close(logits[k], RELEASED.t[f"{name}.greedy.cfg_logits.{k}"])
        close(sums[k], RELEASED.t[f"{name}.greedy.fhat.{k}"])
    close(image(vqvae, feature_map), RELEASED.t[f"{name}.greedy.image01"])


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
def test_greedy_at_other_options(models, vqvae, name, run, labels, cfg):
    feature_map, _ = alone(models[name], vqvae, labels or RELEASED.facts["labels"], cfg)
    same_tokens(feature_map, RELEASED.scales(f"{name}.{run}.idx"))


@pytest.mark.parametrize("name", VARIANTS)
def test_seeded_runs(models, vqvae, name):
    for run, smooth in (("stoch", False), ("smooth", True)):
        sampling = Sampling(1.5, 20, 0.9, 1.0, smooth)
        sampler = ReleaseSampler(sampling, torch.Generator().manual_seed(123), 4)
        feature_map, _ = alone(models[name], vqvae, RELEASED.facts["labels"], 1.5, sampler)
        same_tokens(feature_map, RELEASED.scales(f"{name}.{run}.idx"))
        close(image(vqvae, feature_map), RELEASED.t[f"{name}.{run}.image01"])
    pipe = VARPipeline(models[name], vqvae, None, VARSettings(1.5, 1.0, 20, 0.9))
    seeded = torch.Generator().manual_seed(123)
    released = dict(generator=seeded, method=CoDe(4, release=True), output_type="latent")
    wanted = torch.cat(RELEASED.scales(f"{name}.stoch.idx"), dim=1)
    assert torch.equal(pipe(RELEASED.facts["labels"], **released).tokens, wanted), (
        "no small model is needed for the large one"
    )


# --- CoDe ---


@pytest.fixture(scope="module")
def pair():
    heads = {role: CODE.facts[f"{role}_config"]["num_heads"] for role in ("draft", "refine")}
    return [var_of(CODE.state(f"{role}.weights."), count) for role, count in heads.items()]


def collaborate(pair, vqvae, n, samplers):
    """A run of CoDe whose two models have a sampler each."""
    labels, made = torch.tensor(CODE.facts["labels"]), iter(samplers)
    return drawn(vqvae, labels, code_turns(*pair, n), Sampling(1.5), lambda steps: next(made))


def release(seed, *options):
    return ReleaseSampler(Sampling(1.5, *options), torch.Generator().manual_seed(seed), 4)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_code_greedy(pair, vqvae, n):
    samplers = [Recorder(release(0, 1, 1.0, 1.1)) for _ in range(2)]
    feature_map = collaborate(pair, vqvae, n, samplers)
    same_tokens(feature_map, CODE.scales(f"N{n}.idx"))
    for k, logits in enumerate(samplers[0].logits + samplers[1].logits):
        close(logits, CODE.t[f"N{n}.cfg_logits.{k}"])
    close(feature_map.inputs(1, n), CODE.t[f"N{n}.draft_token_hub"])
    close(vqvae.quantize.f_hats(feature_map.scales)[n - 1], CODE.t[f"N{n}.draft_fhat"])
    close(feature_map.f_hat, CODE.t[f"N{n}.final_fhat"])
    close(image(vqvae, feature_map), CODE.t[f"N{n}.image01"])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_code_seeded(pair, vqvae, n):
    """As anyone would ask for it: the pipeline with the release's seed."""
    pipe = VARPipeline(pair[0], vqvae, pair[1], VARSettings(1.5, 1.1, 20, 0.95))
    pipe.set_progress_bar_config(disable=True)
    how = dict(method=CoDe(n, release=True), output_type="uint8")
    ways = dict(seed=42), dict(generator=torch.Generator().manual_seed(42))
    drawn = [pipe(CODE.facts["labels"], **how, **way) for way in ways]
    wanted = torch.cat(CODE.scales(f"N{n}.stoch.idx"), dim=1)
    assert all(torch.equal(made.tokens, wanted) for made in drawn)
    image = CODE.t[f"N{n}.stoch.image01"].permute(0, 2, 3, 1) * 255
    apart = image - drawn[0].images.astype("float32")
    assert apart.abs().max() < 1


@pytest.mark.parametrize(("n", "run"), [(0, "plain_refine"), (4, "plain_draft")])
def test_code_at_its_ends_is_plain_decoding(pair, vqvae, n, run):
    feature_map = collaborate(pair, vqvae, n, [release(0, 1, 1.0, 1.1)])
    same_tokens(feature_map, CODE.scales(f"{run}.idx"))
    close(image(vqvae, feature_map), CODE.t[f"{run}.image01"])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_code_of_one_model_is_plain_decoding(pair, vqvae, n):
    samplers = [release(0, 1, 1.0, 1.1) for _ in range(2)]
    feature_map = collaborate([pair[0], pair[0]], vqvae, n, samplers)
    same_tokens(feature_map, CODE.scales("plain_draft.idx"))
