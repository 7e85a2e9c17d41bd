"""Kill -9 at random moments of a training: ``python -m benchmarks.soak.trainings --kills 60``.

Children train the same tiny model on from its checkpoint, each killed after a random delay. The
finished training must end with the weights of an undisturbed one, bit by bit, and with every step
of its curve once.
"""

from __future__ import annotations

import csv
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from benchmarks.common import File, show
from benchmarks.soak.kills import one_thread, struck
from specmm.core.randomness import seeded
from specmm.recipes.loop import Losses, Run, batch_rows, fit

STEPS = 400


def train(out: Path) -> None:
    """One training, from the checkpoint in ``out`` if there is one."""
    with seeded(0):
        model = nn.Sequential(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 1)
        )
        x = torch.randn(256, 16)

    def step(i: int) -> Losses:
        rows = x[batch_rows(i, 32, len(x), 0)]
        return {"loss": (model(rows)[:, 0] - rows.square().sum(1)).square().mean()}

    fit(model, step, Run(out, STEPS, 1e-3, save_every=0.02), muon=1e-3)


def result(out: Path) -> tuple[dict[str, Any], list[list[str]]]:
    """Weights and curve of a finished training."""
    with (out / "loss.csv").open() as file:
        return torch.load(out / "checkpoint.pt", weights_only=True)["model"], list(csv.reader(file))


def trial(whole: Path, longest: float, rng: random.Random) -> int:
    """Kill a fresh training until it is finished; the number of kills. Raises for another end."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        kills = 0
        while struck(lambda: train(out), rng.uniform(0, longest)):
            kills += 1
        (weights, curve), (wanted, steps) = result(out), result(whole)
    if curve != steps:
        raise AssertionError(
            f"after {kills} kills the curve is {curve}, of an undisturbed training {steps}"
        )
    if different := [name for name in wanted if not torch.equal(weights[name], wanted[name])]:
        raise AssertionError(
            f"after {kills} kills {different} differ from an undisturbed training's"
        )
    return kills


def campaign(kills: int, seed: int = 0) -> dict[str, Any]:
    """Trials until there were ``kills`` kills."""
    rng = random.Random(seed)
    done = 0
    trials = 0
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        train(whole)
        begin = time.perf_counter()
        train(Path(folder) / "again")  # the first one warmed up
        seconds = time.perf_counter() - begin
        while done < kills:
            done += trial(whole, seconds, rng)
            trials += 1
    return {
        "kills": done,
        "trainings": trials,
        "steps_a_training": STEPS,
        "different": 0,
        "seed": seed,
    }


def main(kills: int = 60, seed: int = 0, out: File = None) -> None:
    """Train until so many were killed; the first training that differs ends it."""
    show(campaign(kills, seed), out)


if __name__ == "__main__":
    typer.run(main)
