"""Plain sampling of MAR against the official release's chains and pictures, number for number."""

import pytest
import torch

from specmm.image_ar.continuous.diffusion import ChainSteps, NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import ChainHead, HeadCondition, ancestral
from specmm.image_ar.continuous.mar import unpatchify
from specmm.image_ar.continuous.masked_decode import Ancestral, decode_mar
from specmm.image_ar.continuous.orders import MARSettings
from tests.tiny.recorded import facts, tensors, tiny_mar

FACTS = facts("cspd/mar_tiny")
RUNS = [run for run in FACTS["sample_runs"] if "official_raises" not in run]


@pytest.fixture(scope="module")
def t():
    return tensors("cspd/mar_tiny")


@pytest.fixture
def model():
    return tiny_mar()


def close(got, wanted, relative):
    assert got.shape == wanted.shape
    assert float((got - wanted).abs().max() / wanted.abs().max()) < relative


class Recorded:
    """The release's noise: for each iteration the start and a noise for every step, here by row."""

    def __init__(self, t, run):
        self.t, self.run, self.step = t, run, 0

    def draw(self, rows, width):
        start = self.t[f"sample.{self.run}.step{self.step}.x_T"]
        noises = self.t[f"sample.{self.run}.step{self.step}.noises"][:, : len(start)]
        self.step += 1
        assert sum(rows) == len(start) and len(start[0]) * (len(noises) + 1) == width
        return torch.cat([start[None], noises]).transpose(0, 1).reshape(len(start), width)


class Watching:
    """A sampler that keeps the conditions and what it made."""

    def __init__(self, sampler):
        self.sampler, self.conditions, self.made = sampler, [], []
        self.head = sampler.head

    def sample(self, condition, view):
        made, calls = self.sampler.sample(condition, view)
        self.conditions.append(condition.z)
        self.made.append(made)
        return made, calls


@pytest.mark.parametrize(("name", "how"), FACTS["loop"].items())
def test_chains(t, model, name, how):
    g = {k.removeprefix(f"loop.{name}."): v for k, v in t.items() if k.startswith(f"loop.{name}.")}
    head = ChainHead(model.head, NoiseSchedule.of(how.get("num_sampling_steps", "8")))
    rows = len(g["x_T"])
    z = g["z"].view(-1, rows, 48).transpose(0, 1)
    noise = torch.cat([g["x_T"][None], g["noises"][:, :rows]])
    got = ancestral(
        head.bind(HeadCondition(z, how["cfg"])),
        ChainSteps.ddpm(head.schedule),
        noise,
        how["temperature"],
    )
    close(got, g["result"][:rows], 1e-4)


@pytest.mark.parametrize("i", range(8))
@pytest.mark.parametrize("name", ["psample", "psample_cfg"])
def test_one_step(t, model, name, i):
    x, z = (t[f"{name.replace('psample', 'pmv')}.{k}"] for k in ("x", "z"))
    rows, k = 6, 7 - i
    bound = ChainHead(model.head, NoiseSchedule.of("8")).bind(
        HeadCondition(z.view(-1, rows, 48).transpose(0, 1), FACTS["p_mean_variance_cfg"])
    )
    steps = ChainSteps.ddpm(NoiseSchedule.of("8"))
    eps, v = bound.at(k, x[i][:rows])
    got = steps.keep[k] * x[i][:rows] + steps.noise[k] * eps
    std = FACTS["p_sample_temperature"] * torch.exp(steps.mid[k] + steps.half[k] * v)
    got = got + std * t[f"{name}.noise"][i][:rows] * (i > 0)
    close(got, t[f"{name}.sample"][i][:rows], 1e-4)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_pictures(t, model, run):
    name = run["name"]
    plan = MARSettings(run["num_iter"], run["num_sampling_steps"], run["cfg"], run["cfg_schedule"])
    labels = None if run["labels"] is None else torch.tensor(run["labels"])
    head = ChainHead(model.head, NoiseSchedule.of(plan.head_steps))
    sampler = Watching(Ancestral(head, Recorded(t, name), run["temperature"]))
    *_, last = decode_mar(model, labels, t[f"sample.{name}.orders"], sampler, plan)
    for k, (z, tokens) in enumerate(zip(sampler.conditions, sampler.made, strict=True)):
        if f"sample.{name}.step{k}.z_pred" in t:
            close(z.transpose(0, 1).flatten(0, 1), t[f"sample.{name}.step{k}.z_pred"], 2e-3)
            close(tokens, t[f"sample.{name}.step{k}.tokens_pred"][: len(tokens)], 2e-3)
    close(unpatchify(last.tokens), t[f"sample.{name}.result_latent"], 2e-3)
    assert last.stats.tokens == 48 and last.stats.head_calls_per_token == 8
    assert last.stats.batch_rounds == len(run["n_pred_per_step_total"])


def test_more_iterations_than_tokens(t, model):
    head = ChainHead(model.head, NoiseSchedule.of("8"))

    class Zeros:
        def draw(self, rows, width):
            return torch.zeros(sum(rows), width)

    labels, orders = torch.tensor([1, 2]), torch.arange(16).repeat(2, 1)
    how = Ancestral(head, Zeros()), MARSettings(num_iter=21)
    *_, last = decode_mar(model, labels, orders, *how)
    assert last.count == 16 and last.stats.batch_rounds == 16
