"""The training loop: it learns, resumes where it was killed, and stops at a loss of NaN."""

import csv
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from specmm.training import _optimizers, batch_rows, fit, seeded, warmup_cosine

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]])


def model_and_step(seed=0, stop_at=None, layers=0):
    with seeded(seed):
        model = nn.Sequential(
            nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))), nn.Linear(3, 1)
        )

    def step(i):
        if i == stop_at:
            raise KeyboardInterrupt
        rows = batch_rows(i, 16, len(X), 0)
        return {"loss": (model(X[rows]) - Y[rows]).square().mean()}

    return model, step


@pytest.mark.parametrize("muon", [0.0, 0.02], ids=["AdamW", "Muon"])
def test_a_killed_run_ends_where_an_unbroken_one_does(muon, tmp_path):
    rates = {"steps": 150, "lr": 0.05, "muon": muon}
    whole, step = model_and_step(layers=2)
    fit(whole, step, out=tmp_path / "whole", **rates)
    killed, step = model_and_step(stop_at=90, layers=2)
    with pytest.raises(KeyboardInterrupt):
        fit(killed, step, out=tmp_path / "killed", save_every=0.0, **rates)
    resumed, step = model_and_step(seed=1, layers=2)
    fit(resumed, step, out=tmp_path / "killed", **rates)
    for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with (tmp_path / "whole" / "loss.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses[-1] < losses[0] / 10


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="loss is nan at step 0"):
        fit(
            model, lambda i: {"loss": model(X).mean() * float("nan")}, out=tmp_path, steps=3, lr=0.1
        )


def test_batches_are_epochs_of_every_row():
    rows = torch.cat([batch_rows(i, 5, 12, 3) for i in range(12)])  # five epochs of 12
    for epoch in rows.view(5, 12):
        assert sorted(epoch.tolist()) == list(range(12))
    assert not torch.equal(rows[:12], rows[12:24])


def test_learning_rate_warms_up_and_falls():
    factors = [warmup_cosine(i, 1000) for i in range(1000)]
    assert factors[0] == 0.01 and factors[99] == 1.0 and 0.05 <= factors[-1] < 0.051


def test_seeded_leaves_the_callers_state_alone():
    before = torch.random.get_rng_state()
    with seeded(5):
        first = torch.rand(3)
    with seeded(5):
        assert torch.equal(first, torch.rand(3))
    assert torch.equal(before, torch.random.get_rng_state())


def test_muon_takes_the_matrices_of_the_layers_only():
    model, _ = model_and_step(layers=2)
    adamw, muon = _optimizers(model, 0.1, (0.9, 0.95), 0.0, 0.01)
    taken = {id(p) for p in muon.param_groups[0]["params"]}
    assert taken == {id(layer.weight) for layer in model[0]}
    left = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert left | taken == set(map(id, model.parameters())) and not left & taken


@pytest.mark.slow
def test_killed_trainings_end_bit_by_bit_where_unbroken_ones_do():
    """A few; benchmarks/soak/trainings.py does sixty.

    In a process of its own: autograd refuses to work in a fork of one that has its threads.
    """
    command = [sys.executable, "-m", "benchmarks.soak.trainings", "--kills", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] >= 3


def test_a_curve_has_every_step_once_and_no_torn_line(tmp_path):
    model, step = model_and_step()
    fit(model, step, out=tmp_path, steps=61, lr=0.05)
    with (tmp_path / "loss.csv").open("a") as file:
        file.write("80,0.2\n100,0.1\n12")  # what a run killed after its last checkpoint leaves
    fit(model, step, out=tmp_path, steps=101, lr=0.05)
    with (tmp_path / "loss.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "20", "40", "60", "80", "100"]


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    model, step = model_and_step(layers=2)
    fit(model, step, out=tmp_path, steps=3, lr=0.05)
    with pytest.raises(ValueError, match="of a training with 1 optimizers, this one has 2"):
        fit(model, step, out=tmp_path, steps=5, lr=0.05, muon=0.01)
    other, step = model_and_step(layers=3)
    with pytest.raises(ValueError, match="of another model"):
        fit(other, step, out=tmp_path, steps=5, lr=0.05)
