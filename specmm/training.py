"""The training loop of all models: resumable, with a progress bar and a loss curve on disk.

``fit`` calls ``step(i)`` for i = 0, 1, …; a step draws its own batch from i alone, so that a
resumed run continues exactly where the killed one stopped.
"""

from __future__ import annotations

import csv
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from specmm.choose.threads import settled

Losses = dict[str, Tensor]  # "loss" is minimised, the others are recorded
STEP_ROWS = 512  # of a training's products, of which threads are chosen
MUON = 3.0  # times the learning rate of the rest is a good one for it
NUMBERED = re.compile(r"\.\d+\.")  # in the name of what belongs to one of several layers


def warmup_cosine(step: int, steps: int, warmup: int = 100, floor: float = 0.05) -> float:
    """Learning-rate factor at ``step``: linear warm-up to 1, then a cosine down to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A block whose random numbers come from ``seed``; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def batch_rows(step: int, size: int, total: int, seed: int) -> Tensor:
    """Rows [size] of the data used at ``step``: epochs are seeded permutations of all rows."""
    first = step * size
    epochs = range(first // total, (first + size - 1) // total + 1)
    orders = [
        torch.randperm(total, generator=torch.Generator().manual_seed(seed * 1000 + e))
        for e in epochs
    ]
    start = first - epochs[0] * total
    return torch.cat(orders)[start : start + size]


def fit(
    model: nn.Module,
    step: Callable[[int], Losses],
    *,
    out: Path,
    steps: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.05,
    clip: float = 1.0,
    muon: float = 0.0,
    save_every: float = 120.0,
) -> None:
    """Minimise ``step(i)["loss"]`` over the parameters of ``model`` with AdamW.

    ``out/checkpoint.pt`` is written every ``save_every`` seconds and at the end, atomically; a run
    that finds one resumes, by as many threads as it was begun with. With a learning rate for
    ``muon`` (https://kellerjordan.github.io/posts/muon) it trains the matrices of numbered layers,
    which takes fewer steps. Raises ``ValueError`` when the loss is no longer finite.
    """
    out.mkdir(parents=True, exist_ok=True)
    optimizers = _optimizers(model, lr, betas, weight_decay, muon)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    first, begun = _resume(out / "checkpoint.pt", model, optimizers)  # it replaces the groups
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    curve = out / "loss.csv"
    _forget(curve, first)
    bar = tqdm(range(first, steps), initial=first, total=steps, desc=out.name, mininterval=5)
    saved = time.monotonic()
    with settled(model, begun, STEP_ROWS) as threads:
        for i in bar:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * warmup_cosine(i, steps)
            losses = step(i)
            model.zero_grad(set_to_none=True)
            losses["loss"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            for optimizer in optimizers:
                optimizer.step()
            if i % 20 == 0:
                _record(curve, i, losses)
                bar.set_postfix(loss=f"{float(losses['loss'].detach()):.4f}", refresh=False)
            if time.monotonic() - saved > save_every:
                _save(out / "checkpoint.pt", model, optimizers, i + 1, threads.count)
                saved = time.monotonic()
    _save(out / "checkpoint.pt", model, optimizers, steps, threads.count)


def _optimizers(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, muon: float
) -> list[torch.optim.Optimizer]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inner = [p for name, p in named if muon and p.ndim == 2 and NUMBERED.search(name)]
    apart = set(map(id, inner))
    decayed = [p for _, p in named if p.ndim >= 2 and id(p) not in apart]
    others = [p for _, p in named if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=betas)]
    if inner:  # its steps are scaled to the size of AdamW's
        options: dict[str, Any] = {"lr": muon, "weight_decay": weight_decay}
        made.append(torch.optim.Muon(inner, **options, adjust_lr_fn="match_rms_adamw"))
    return made


def _record(curve: Path, i: int, losses: Losses) -> None:
    values = {k: float(v.detach()) for k, v in losses.items()}
    if not math.isfinite(values["loss"]):
        raise ValueError(
            f"loss is {values['loss']} at step {i}; "
            f"the last good checkpoint stays in {curve.parent}"
        )
    new = not curve.exists()
    with curve.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["step", *values])
        writer.writerow([i, *(f"{v:.5f}" for v in values.values())])


def _forget(curve: Path, first: int) -> None:
    """Drop what a killed run recorded from step ``first`` on, and an incomplete last line."""
    head, *rows = curve.read_text().splitlines(keepends=True) if first and curve.exists() else [""]
    kept = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) < first]
    if not kept:  # the next record begins a new curve
        curve.unlink(missing_ok=True)
        return
    part = curve.with_suffix(".part")
    part.write_text("".join([head, *kept]))
    os.replace(part, curve)


def _save(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, threads: int
) -> None:
    part = path.with_suffix(".part")
    states = [optimizer.state_dict() for optimizer in optimizers]
    made = {"model": model.state_dict(), "optimizers": states, "step": step, "threads": threads}
    torch.save(made, part)
    os.replace(part, path)


def _resume(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, int | None]:
    """The next step, and the threads of those before; None before the first."""
    if not path.exists():
        return 0, None
    saved = torch.load(path, weights_only=True)
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"{path} is of another model ({reason}), use another folder") from error
    if len(saved["optimizers"]) != len(optimizers):
        counts = f"{len(saved['optimizers'])} optimizers, this one has {len(optimizers)}"
        raise ValueError(
            f"{path} is of a training with {counts}: "
            "finish it with the version it was begun with, or remove it"
        )
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return int(saved["step"]), saved.get("threads")
