"""CSpD between two models against numbers that its official release produced."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specmm.image_ar.continuous import cspd
from specmm.image_ar.continuous.cspd import (
    ChainEnd,
    CSpDBatch,
    CSpDModel,
    CSpDRun,
    DraftWindow,
    ReleaseRule,
    accept,
    decode_release,
    resample,
    verify_tokens,
)
from specmm.image_ar.continuous.loading import check_models
from specmm.image_ar.continuous.mar import MAR, unpatchify
from specmm.image_ar.continuous.orders import MARSettings
from tests.tiny import recorded

FACTS = recorded.facts("cspd/cspd_accept")


@pytest.fixture(scope="module")
def t():
    return recorded.tensors("cspd/cspd_accept")


def load(side):
    config = FACTS["config"]
    sizes = config["common"] | config[side] | {"class_num": config["class_emb_rows"]}
    return recorded.mar_of(sizes, f"cspd_{side}")


@pytest.fixture(scope="module")
def pair():
    return load("target"), load("draft")


def close(got, wanted, relative):
    assert got.shape == wanted.shape
    got, wanted = torch.as_tensor(got).double(), wanted.double()
    assert float((got - wanted).abs().max() / wanted.abs().max()) < relative


def group(t, prefix):
    return {k.removeprefix(prefix): v for k, v in t.items() if k.startswith(prefix)}


def trace(g, side):
    return ChainEnd(*(g[f"{side}_{k}"].double().numpy() for k in ("mean", "std", "log_var")))


class PictureNumbers:
    """Recorded numbers, handed out in turn."""

    def __init__(self, uniforms, normals):
        self.uniforms, self.normals = iter(uniforms), iter(normals)

    def uniform(self, rows):
        return next(self.uniforms).double().numpy()

    def normal(self, rows, width):
        return next(self.normals).double().numpy()


def cases(t):
    for i, facts in enumerate(FACTS["dp_cases"]):
        yield group(t, f"dp.{i:02d}."), facts["inner_temperature"]
    for i in range(len(FACTS["trajectories"])):
        for tau in (42, 5, 1):
            yield group(t, f"traj.{i:02d}.tau{tau}."), float(tau)


def test_ratios_of_the_release(t):
    for g, tau in cases(t):
        x, p, q = g["x"].double().numpy(), trace(g, "x2"), trace(g, "x1")
        ours = torch.from_numpy(ReleaseRule(tau).log_ratio(x, p, q))
        close(ours, g["derived.log_ratio_code"], 1e-4) if g[
            "derived.log_ratio_code"
        ].any() else None
        sure = (g["ratio"] > 1e-3) & g["ratio"].isfinite()
        torch.testing.assert_close(
            ours[sure], g["ratio"][sure].double().log(), atol=2e-3, rtol=1e-3
        )


def test_acceptance_and_resampling_of_the_release(t):
    for g, tau in cases(t):
        x, p, q = g["x"].double().numpy(), trace(g, "x2"), trace(g, "x1")
        kept = accept(ReleaseRule(tau), x, p, q, PictureNumbers([g["uniform"]], []))
        assert np.array_equal(kept, g["accept"].bool().numpy())
        if int(g["n_tries"]) in (0, 100):
            continue
        numbers = PictureNumbers(g["resample.uniform"], g["resample.noise"])
        made, found = resample(ReleaseRule(tau), p, q, numbers)
        close(made, g["resample.output"], 1e-5)
        assert np.array_equal(found, g["resample.accepted_any"].bool().numpy())


class Fresh:
    """Numbers of a seed."""

    def __init__(self, seed):
        self.random = np.random.Generator(np.random.PCG64(seed))

    def uniform(self, rows):
        return self.random.random(rows)

    def normal(self, rows, width):
        return self.random.standard_normal((rows, width))


@pytest.mark.parametrize("i", [11, 28])
def test_residuals_without_mass_are_told(t, i):
    g = group(t, f"dp.{i:02d}.")  # the release returns zeros here
    made, found = resample(ReleaseRule(), trace(g, "x2"), trace(g, "x1"), Fresh(i))
    assert np.array_equal(found, g["resample.accepted_any"].bool().numpy())
    assert not made[~found].any()
    x, second, first = g["x"].double().numpy() + 1, trace(g, "x2"), trace(g, "x1")
    settled, kept = verify_tokens(ReleaseRule(), x, second, first, Rejecting())
    assert not kept.any() and settled.any(1).all()  # never silently zero


class Rejecting(Fresh):
    def __init__(self):
        super().__init__(0)

    def uniform(self, rows):
        return np.full(rows, 1e9)


@pytest.mark.parametrize("std", [0.0, np.inf, np.nan])
def test_widths_that_no_density_has(std):
    ends = ChainEnd(np.zeros((1, 2)), np.full((1, 2), std), np.zeros((1, 2)))
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        accept(ReleaseRule(), np.zeros((1, 2)), ends, ends, Fresh(0))


@pytest.mark.parametrize(("size", "prefill"), [(0, 0.05), (4, -0.1), (4, 1.5)])
def test_windows_that_make_no_sense(size, prefill):
    with pytest.raises(ValueError, match="window must be at least 1"):
        DraftWindow(size, prefill)


@pytest.mark.parametrize("facts", FACTS["trajectories"], ids=lambda f: f["name"])
def test_chains_of_both_models(t, pair, facts):
    for model, name in zip(pair, ("target", "draft"), strict=True):
        g = group(t, f"traj.{facts['index']:02d}.{name}.")
        plan = MARSettings(head_steps="ddim8", cfg=facts["cfg"], temperature=facts["temperature"])
        side = CSpDModel(model, torch.tensor(facts["labels"]), facts["N"], plan)
        noise = torch.cat([g["x_T"][None], g["inter_noise"].flip(0)])
        z = g["z"].view(-1, facts["N"], g["z"].shape[-1]).transpose(0, 1)
        tokens, ends = side.chains(z, facts["cfg"], noise)
        close(tokens, g["manager.sample"], 1e-4)
        close(ends.mean, g["manager.mean"], 1e-4)
        close(ends.log_stds, g["manager.log_var"], 1e-4)
        close(ends.std, g["std_times_temp"][-1], 1e-4)


@pytest.mark.parametrize("run", FACTS["runs"], ids=lambda run: run["name"])
def test_whole_runs_of_the_release(t, pair, run, monkeypatch):
    runs = []
    monkeypatch.setattr(cspd, "CSpDRun", lambda batch: runs.append(CSpDRun(batch)) or runs[-1])
    g = group(t, f"run.{run['name']}.")
    plan = MARSettings(
        run["num_iter"], "ddim8", run["cfg"], run["cfg_schedule"], run["temperature"]
    )
    sides = [CSpDModel(model, torch.tensor(run["labels"]), run["bsz"], plan) for model in pair]
    noise = torch.cat([g["noise"][:, :, None], g["inter_noise"].flip(2)], dim=2)
    verifies = sum("uniform" in k and k.startswith("verify") and "resample" not in k for k in g)
    numbers = []
    for b in range(run["bsz"]):
        uniforms, normals = [], []
        for v in range(verifies):
            r = group(g, f"verify{v:02d}.")
            rows = r["index"][0] == b
            kept = (r["ratio"] > r["uniform"])[rows]
            uniforms += [r["uniform"][rows]] + (
                [] if kept.all() else [r["resample_uniform"][0][rows]]
            )
            normals += [] if kept.all() else [r["resample_noise"][0][rows]]
        numbers.append(PictureNumbers(uniforms, normals))
    window = DraftWindow(run["num_draft"], run["ratio"])
    states = []
    given = CSpDBatch(*sides, g["orders"], noise, numbers)
    for shown in decode_release(given, ReleaseRule(run["inner_temperature"]), window):
        states.append(runs[-1].tokens.clone())  # with those that are only drafted
        last = shown.tokens
    assert torch.equal(last, states[-1])
    close(unpatchify(states[-1]), g["result_latent"], 2e-3)
    follow(g, run, states)
    assert len(states) == len(plan.iterations(16)) + 1
    *_, last = decode_release(
        CSpDBatch(*sides, g["orders"], noise, [AlwaysKeep()] * 3), ReleaseRule(), window
    )
    assert last.stats.drafted == sum(c["n"] for c in run["calls"] if c["kind"] == "verify")


def follow(g, run, states):
    """Every recorded state: after each call that no verification follows, and what each
    verification wrote.
    """
    made = verified = 0
    for k, call in enumerate(run["calls"]):
        if call["kind"] == "verify":
            r = group(g, f"verify{verified:02d}.")
            kept = (r["ratio"] > r["uniform"])[:, None]
            where = tuple(r["index"])
            close(states[made - 1][where], torch.where(kept, r["draft_samples"], r["output"]), 2e-3)
            verified += 1
            continue
        if k + 1 == len(run["calls"]) or run["calls"][k + 1]["kind"] != "verify":
            close(states[made], g[f"call{k:02d}.tokens_after"], 2e-3)
        made += 1


class AlwaysKeep:
    def uniform(self, rows):
        return np.full(rows, -1.0)


def test_pairs_that_do_not_fit(pair):
    target, draft = pair
    for change, message in (
        (dict(vae_embed_dim=8), "token width"),
        (dict(img_size=64), "order's length"),
        (dict(img_size=64, vae_stride=16), "VAE stride"),
    ):
        other = MAR(replace(draft.config, **change))
        with pytest.raises(ValueError, match=message):
            check_models(target, other)
    check_models(target, draft)
