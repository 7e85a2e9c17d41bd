"""The training loop: it learns, resumes where it was killed, and stops at a loss of NaN."""

import csv
import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from specmm.core.randomness import seeded
from specmm.recipes.loop import Run, _optimizers, batch_rows, fit, warmup_cosine
from tests.forks import said_by

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
    whole, step = model_and_step(layers=2)
    fit(whole, step, Run(tmp_path / "whole", 150, 0.05), muon=muon)
    killed, step = model_and_step(stop_at=90, layers=2)
    with pytest.raises(KeyboardInterrupt):
        fit(killed, step, Run(tmp_path / "killed", 150, 0.05, save_every=0.0), muon=muon)
    resumed, step = model_and_step(seed=1, layers=2)
    fit(resumed, step, Run(tmp_path / "killed", 150, 0.05), muon=muon)
    for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with (tmp_path / "whole" / "loss.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses[-1] < losses[0] / 10


def test_a_loss_that_is_no_number_stops_the_run_and_is_not_kept(tmp_path):
    """Whether it comes at once, between the checks, or in the last step's weights alone."""
    model, step = model_and_step()
    nothing = lambda i: {"loss": model(X).mean() * float("nan")}  # noqa: E731
    with pytest.raises(ValueError, match="loss is nan at step 0, nothing was written; give a sm"):
        fit(model, nothing, Run(tmp_path / "a", 3, 0.1))
    model, step = model_and_step()
    whole = Run(tmp_path / "b", 10, 0.05)
    fit(model, step, whole)
    good = torch.load(whole.checkpoint, weights_only=True)["model"]
    wild, step = model_and_step()
    with pytest.raises(ValueError, match=r"at step \d+, .*checkpoint.pt is of before"):
        fit(wild, step, Run(tmp_path / "b", 18, 1e38, save_every=0.0, warmup=1))
    kept = torch.load(whole.checkpoint, weights_only=True)["model"]
    assert all(value.isfinite().all() for value in kept.values()) and kept.keys() == good.keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_a_checkpoint(number, tmp_path):
    model, step = model_and_step()

    def told(i):
        if i == 7:
            signal.raise_signal(number)
        return step(i)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        fit(model, told, run := Run(tmp_path, 30, 0.05))
    assert signal.getsignal(number) is before
    assert torch.load(run.checkpoint, weights_only=True)["step"] == 8


def test_a_full_disk_is_a_sentence_and_leaves_the_checkpoint(tmp_path, monkeypatch):
    model, step = model_and_step()
    fit(model, step, run := Run(tmp_path, 3, 0.05))

    def full(state, file):
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match=r"cannot be written at step 5 \(No space left .* before"):
        fit(model, step, Run(tmp_path, 5, 0.05))
    assert torch.load(run.checkpoint, weights_only=True)["step"] == 3
    assert not list(tmp_path.glob("*.part"))


def test_there_is_a_checkpoint_at_every_moment(tmp_path, monkeypatch):
    """Killed while one takes the place of another."""
    model, step = model_and_step()
    fit(model, step, run := Run(tmp_path, 3, 0.05))
    move = os.replace

    def killed(part, file):
        if Path(file) == run.checkpoint:
            raise KeyboardInterrupt
        move(part, file)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(model, step, replace(run, steps=5))
    assert torch.load(run.checkpoint, weights_only=True)["step"] == 3


def test_a_torn_checkpoint_goes_on_from_the_one_before(tmp_path):
    model, step = model_and_step()
    run = Run(tmp_path, 20, 0.05, save_every=0.0)
    fit(model, step, run)
    wanted = [p.clone() for p in model.parameters()]
    run.checkpoint.write_bytes(run.checkpoint.read_bytes()[:500])
    again, step = model_and_step(seed=1)
    fit(again, step, run)
    assert all(map(torch.equal, again.parameters(), wanted))
    for file in tmp_path.glob("*.pt"):
        file.write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"checkpoint.pt cannot be read .*: remove it"):
        fit(again, step, run)


def test_the_weights_that_measured_best_stay(tmp_path):
    model, step = model_and_step()
    taus = iter([1.0, 3.0, 2.0])
    seen = []

    def measure():
        seen.append(model[1].weight.detach().clone())
        return {"tau": next(taus)}

    fit(model, step, Run(tmp_path, 30, 0.05, measure_every=10, measure=measure))
    assert torch.equal(model[1].weight, seen[1]) and not torch.equal(seen[1], seen[2])
    with (tmp_path / "loss.csv").open() as file:
        rows = {row["step"]: row["tau"] for row in csv.DictReader(file)}
    assert rows == {"0": "", "9": "1.00000", "19": "3.00000", "20": "", "29": "2.00000"}


def test_accumulated_gradients_are_those_of_a_larger_batch(tmp_path):
    one, step = model_and_step()
    fit(one, step, Run(tmp_path / "one", 20, 0.05, accumulate=2))
    two, _ = model_and_step()

    def both(i):
        rows = torch.cat([batch_rows(2 * i + j, 16, len(X), 0) for j in range(2)])
        return {"loss": (two(X[rows]) - Y[rows]).square().mean()}

    fit(two, both, Run(tmp_path / "two", 20, 0.05))
    for found, wanted in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


SHARED = """
import sys, torch
from pathlib import Path
from torch import nn
from specmm.core.randomness import seeded
from specmm.recipes.loop import Run, batch_rows, fit, one_first, share
X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]])
with seeded(0):
    model = nn.Linear(3, 1)
def step(i):
    rows = share(batch_rows(i, 7, len(X), 0))  # 4 of one, 3 of the other
    return {"loss": (model(X[rows]) - Y[rows]).square().mean(), "count": torch.tensor(len(rows))}
with one_first() as first:
    print("first" if first else "other", flush=True)
fit(model, step, Run(Path(sys.argv[1]), 60, 0.05))
"""


def test_two_processes_learn_what_one_does(tmp_path):
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29613"]
    command = [sys.executable, *torchrun, str(script), str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    alone, _ = said_by(f"import sys\nsys.argv[1:] = [out]\n{SHARED}", out=str(tmp_path / "one"))
    assert done.stdout.count("first") == alone.count("first") == 1
    saved = [torch.load(tmp_path / x / "checkpoint.pt", weights_only=True) for x in ("one", "two")]
    for found, wanted in zip(*(each["model"].values() for each in saved), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    curves = [list(csv.DictReader((tmp_path / x / "loss.csv").open())) for x in ("one", "two")]
    assert [row["step"] for row in curves[0]] == [row["step"] for row in curves[1]]
    for one, two in zip(*curves, strict=True):
        assert float(one["loss"]) == pytest.approx(float(two["loss"]), abs=1e-4)


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
    """A few; benchmarks/soak/trainings.py does sixty."""
    code = "from benchmarks.soak.trainings import campaign\nprint(campaign(3)['kills'])"
    assert int(said_by(code)[0]) >= 3


def test_a_curve_has_every_step_once_and_no_torn_line(tmp_path):
    model, step = model_and_step()
    fit(model, step, Run(tmp_path, 61, 0.05))
    with (tmp_path / "loss.csv").open("a") as file:
        file.write("80,0.2\n100,0.1\n12")  # what a run killed after its last checkpoint leaves
    fit(model, step, Run(tmp_path, 101, 0.05))
    with (tmp_path / "loss.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "20", "40", "60", "80", "100"]


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    model, step = model_and_step(layers=2)
    fit(model, step, Run(tmp_path, 3, 0.05, made_of={"text": "a.txt", "lr": 0.05}))
    told = r"is of another training \(text was a.txt, is b.txt\): give another out, or remove it"
    with pytest.raises(ValueError, match=told):
        fit(model, step, Run(tmp_path, 5, 0.05, made_of={"text": "b.txt", "lr": 0.05}))
    run = Run(tmp_path, 5, 0.05, made_of={"text": "a.txt", "lr": 0.05})
    with pytest.raises(ValueError, match="has 3 steps, more than the 2 asked"):
        fit(model, step, replace(run, steps=2))
    with pytest.raises(ValueError, match="of a training with 1 optimizers, this one has 2"):
        fit(model, step, run, muon=0.01)
    other, step = model_and_step(layers=3)
    with pytest.raises(ValueError, match="of another model"):
        fit(other, step, run)


def test_a_tracker_that_is_not_there(tmp_path):
    model, step = model_and_step()
    for name, message in {"nosuch": "nosuch", "comet_ml": "needs its package"}.items():
        with pytest.raises(ValueError, match=message):
            fit(model, step, Run(tmp_path / name, 2, 0.05, tracker=name))
