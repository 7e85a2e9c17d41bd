"""The training loop of all models: resumable, on one or several processes, with a progress bar and
a loss curve on disk.

``fit`` calls ``step(i)`` for i = 0, 1, …; a step draws its own batch from i alone, so that a
resumed run continues exactly where the killed one stopped. Under ``torchrun`` or ``accelerate
launch`` each process takes its :func:`share` of a batch's rows; gradients are those of the whole
batch.
"""

from __future__ import annotations

import csv
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from specmm.choose.threads import settled
from specmm.loading.extras import needed
from specmm.loading.files import sentence_of, whole

Rows = TypeVar("Rows", Tensor, list[Any])
Losses = dict[str, Tensor]
"""``loss`` is minimised, the others are recorded; ``count`` (1 without) says how many terms these
are means of."""
STEP_ROWS = 512  # rows of a training's products, for the choice of threads
MUON = 3.0  # times the learning rate of the rest is a good one for it
NUMBERED = re.compile(r"\.\d+\.")  # in the name of what belongs to one of several layers
RECORDED = 20  # steps between lines of the curve
STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Run:
    """How a training runs: ``steps`` steps with learning rates up to ``lr``, reached after
    ``warmup`` steps, each with the gradients of ``accumulate`` batches.

    ``out/checkpoint.pt`` is written every ``save_every`` seconds, at signals and at the end; the
    previous checkpoint stays as ``previous.pt``. ``measure`` (if any) is called every
    ``measure_every`` steps, and the weights with the highest ``tau`` are the result. ``made_of``
    are facts by name that must equal a checkpoint's. ``tracker`` is the name of one of accelerate's
    trackers.
    """

    out: Path
    steps: int
    lr: float
    warmup: int = 100
    accumulate: int = 1
    save_every: float = 120.0
    measure_every: int = 0
    measure: Callable[[], Mapping[str, float]] | None = None
    made_of: Mapping[str, object] = field(default_factory=dict)
    tracker: str = ""
    batch: int = 0  # rows of one, to tell how many are read a second

    @property
    def checkpoint(self) -> Path:
        """The latest checkpoint's file."""
        return self.out / "checkpoint.pt"


def warmup_cosine(step: int, steps: int, warmup: int = 100, floor: float = 0.05) -> float:
    """Learning-rate factor at ``step``: linear warm-up to 1, then a cosine down to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


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


def share(rows: Rows) -> Rows:
    """This process's part of a batch's ``rows`` [B].

    Raises ``ValueError`` for fewer rows than processes.
    """
    processes = _processes()
    if processes is None:
        return rows
    count = processes.num_processes
    if len(rows) < count:
        raise ValueError(f"batch must be at least the {count} processes, got {len(rows)}")
    return rows[processes.process_index :: count]


@contextmanager
def one_first() -> Iterator[bool]:
    """A block that the first process runs before the others, which then find its files; yields
    whether this is the first process.
    """
    processes = _processes()
    if processes is None:
        yield True
        return
    with processes.main_process_first():
        yield processes.is_main_process


def kept(file: Path, make: Callable[[], Tensor], key: str = "") -> Tensor:
    """The tokens in ``file`` if they were stored under ``key``; otherwise those that ``make``
    returns, which are then stored.
    """
    if file.exists():
        checkpoint: Any = torch.load(file, weights_only=True)
        if checkpoint["key"] == key:
            return checkpoint["tokens"]
    tokens = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole(file) as stream:
        torch.save({"key": key, "tokens": tokens}, stream)
    return tokens


def rank() -> tuple[int, int]:
    """This process's number, and how many there are."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def own_device(name: str | None) -> str | None:
    """``name``, or this process's GPU if there are several processes and GPUs."""
    if name is None and rank()[1] > 1 and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return name


def _processes() -> Any:
    """accelerate's state if there are several processes (``torchrun``, ``accelerate launch``).

    Raises ``ValueError`` if accelerate is not installed.
    """
    if rank()[1] == 1:
        return None
    with needed("training by several processes", "train"):
        from accelerate import PartialState
    # the others wait while the first has a model answer, for hours
    return PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=7))


def fit(
    model: nn.Module,
    step: Callable[[int], Losses],
    run: Run,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.05,
    clip: float = 1.0,
    muon: float = 0.0,
) -> None:
    """Minimise ``step(i)["loss"]`` over the parameters of ``model`` with AdamW, as ``run`` says.

    A run that finds a checkpoint in its folder resumes, with its number of threads. If ``muon`` has
    a learning rate, Muon (https://kellerjordan.github.io/posts/muon) trains the matrices of
    numbered layers, which takes fewer steps. Raises ``ValueError`` if the loss or a weight is no
    longer finite (the checkpoint stays good), if nothing can be written, and for a checkpoint of
    another training.
    """
    run.out.mkdir(parents=True, exist_ok=True)
    loop = _Loop(model, step, run, _optimizers(model, run.lr, betas, weight_decay, muon), clip)
    first, begun = loop.resume()
    with settled(model, begun, STEP_ROWS) as threads, _signals() as received:
        loop.threads = threads.count
        loop.train(first, received)


class _Loop:
    """One call of :func:`fit`."""

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[int], Losses],
        run: Run,
        optimizers: list[torch.optim.Optimizer],
        clip: float,
    ) -> None:
        self.model = model
        self.step = step
        self.run = run
        self.optimizers = optimizers
        self.clip = clip
        self.threads = 1
        processes = _processes()
        self.alone = processes is None
        self.first = self.alone or processes.is_main_process
        self.rates = [group["lr"] for group in self._groups]
        self.best: tuple[float, dict[str, Tensor]] | None = None

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def train(self, first: int, received: list[signal.Signals]) -> None:
        """All steps from ``first`` on."""
        run = self.run
        every = run.measure_every
        log = _Log(run, first, self.first)
        saved = time.monotonic()
        for i in log.bar:
            losses, stop = self._run_step(i, received)
            values: dict[str, float] = {}
            if i % RECORDED == 0 or i + 1 == run.steps:
                values = {name: float(value) for name, value in losses.items()}
                self._check(values["loss"], i)
            if run.measure and (i + 1 == run.steps or (every and (i + 1) % every == 0)):
                values |= self._measured()
            log.add(i, values)
            if stop or time.monotonic() - saved > run.save_every:
                self.save(i + 1)
                saved = time.monotonic()
            if stop:
                _end(received, run, i + 1)
        self.save(run.steps)
        if self.best is not None:
            self.model.load_state_dict(self.best[1])
        log.end()

    def _run_step(self, i: int, received: list[signal.Signals]) -> tuple[Losses, bool]:
        """Run step ``i``: its losses, and whether any process received a stop signal."""
        run = self.run
        factor = warmup_cosine(i, run.steps, run.warmup)
        for group, rate in zip(self._groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.model.zero_grad(set_to_none=True)
        totals: Losses = {}
        stop = False
        for part in range(i * run.accumulate, (i + 1) * run.accumulate):
            losses = dict(self.step(part))
            count = losses.pop("count", torch.ones_like(losses["loss"].detach()))
            weight = torch.ones_like(count)
            if not self.alone:  # the loss is the mean over all processes
                sums = [count, torch.tensor(bool(received), device=count.device)]
                total, stops = self._summed(torch.stack([x.float() for x in sums]))
                weight, stop = count / total, stop or bool(stops)
            (losses["loss"] * (weight / run.accumulate)).backward()
            for name, value in losses.items():
                contribution = value.detach() * (weight / run.accumulate)
                totals[name] = totals[name] + contribution if name in totals else contribution
        if not self.alone:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad = self._summed(parameter.grad)
            totals = {name: self._summed(value) for name, value in totals.items()}
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        return totals, bool(received) if self.alone else stop  # all stop after the same step

    def _summed(self, values: Tensor) -> Tensor:
        """``values``, added up over all processes."""
        from accelerate.utils import reduce

        summed: Tensor = reduce(values, "sum")
        return summed

    def _measured(self) -> dict[str, float]:
        """The current measurements; stores the best weights."""
        assert self.run.measure is not None
        self.model.eval()
        metrics = dict(self.run.measure())
        self.model.train()
        if self.best is None or metrics["tau"] > self.best[0]:
            weights = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items()}
            self.best = metrics["tau"], weights
        return metrics

    def _check(self, loss: float, i: int) -> None:
        """Raise ``ValueError`` if the loss of step ``i`` or a weight is not finite."""
        finite = all(bool(p.isfinite().all()) for p in self.model.parameters())
        if not (finite and math.isfinite(loss)):
            checkpoint = self.run.checkpoint
            stays = f"{checkpoint} is of before" if checkpoint.exists() else "nothing was written"
            raise ValueError(
                f"loss is {loss if not math.isfinite(loss) else 'of weights that are no numbers'} "
                f"at step {i}, {stays}; give a smaller lr"
            )

    def save(self, step: int) -> None:
        """Write the checkpoint before ``step``, if its weights are finite."""
        if not self.first:
            return
        self._check(0.0, step)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": step,
            "threads": self.threads,
            "made_of": {name: str(value) for name, value in self.run.made_of.items()},
            "best": self.best,
        }
        file = self.run.checkpoint
        part = file.with_suffix(".part")
        try:
            torch.save(state, part)
            _keep(file, file.with_name("previous.pt"))
            os.replace(part, file)
        except (OSError, RuntimeError) as error:  # PyTorch's of a disk that is full
            part.unlink(missing_ok=True)
            stays = f"; {file} is of before" if file.exists() else ""
            raise ValueError(
                f"{file} cannot be written at step {step} ({sentence_of(error)}){stays}"
            ) from error

    def resume(self) -> tuple[int, int | None]:
        """The next step, and the number of threads of earlier steps (None before the first)."""
        path = self.run.checkpoint
        saved = _read(path)
        if saved is None:
            return 0, None
        advice = "give another out, or remove it"
        _check_same(path, saved, {**dict.fromkeys(saved.get("made_of", {})), **self.run.made_of})
        if saved["step"] > self.run.steps:
            raise ValueError(
                f"{path} has {saved['step']} steps, more than the {self.run.steps} asked: {advice}"
            )
        try:
            self.model.load_state_dict(saved["model"])
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ValueError(f"{path} is of another model ({reason}): {advice}") from error
        if len(saved["optimizers"]) != len(self.optimizers):
            counts = f"{len(saved['optimizers'])} optimizers, this one has {len(self.optimizers)}"
            raise ValueError(f"{path} is of a training with {counts}: {advice}")
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.best = saved.get("best")
        return int(saved["step"]), saved.get("threads")


def _optimizers(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, muon: float
) -> list[torch.optim.Optimizer]:
    """AdamW, without decay for vectors; with ``muon``, Muon for matrices of numbered layers."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inner = [p for name, p in named if muon and p.ndim == 2 and NUMBERED.search(name)]
    apart = set(map(id, inner))
    decayed = [p for _, p in named if p.ndim >= 2 and id(p) not in apart]
    others = [p for _, p in named if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=betas)]
    if inner:  # its steps are scaled to the size of AdamW's
        options: dict[str, Any] = {"lr": muon, "weight_decay": weight_decay}
        optimizers.append(torch.optim.Muon(inner, **options, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def _keep(file: Path, other: Path) -> None:
    """Give ``file`` the name ``other``, too, by a hard link if possible, so it always exists."""
    if file.exists():
        other.unlink(missing_ok=True)
        with suppress(OSError):
            os.link(file, other)


def check_same(out: Path, made_of: Mapping[str, object]) -> None:
    """Raise ``ValueError`` if the checkpoint in ``out`` was made with other facts than ``made_of``;
    called before data are read, which takes minutes.
    """
    path = out / "checkpoint.pt"
    if (saved := _read(path)) is not None:
        _check_same(path, saved, made_of)


def _check_same(path: Path, saved: Mapping[str, Any], made_of: Mapping[str, object]) -> None:
    """Raise ``ValueError`` if the facts ``saved`` in a checkpoint differ from ``made_of``."""
    before = saved.get("made_of", {})
    now = {name: value if value is None else str(value) for name, value in made_of.items()}
    if changed := [
        f"{name} was {before.get(name)}, is {value}"
        for name, value in now.items()
        if value != before.get(name)
    ]:
        raise ValueError(
            f"{path} is of another training ({'; '.join(changed)}): give another out, or remove it"
        )


def _read(path: Path) -> Any:
    """The checkpoint at ``path``, or the previous one if that is damaged; None without any."""
    for file in (path, path.with_name("previous.pt")):
        if file.exists():
            try:
                return torch.load(file, weights_only=True, map_location="cpu", mmap=True)
            except Exception as error:  # of many classes, by where the file is torn
                torn = error
        elif file == path:
            return None
    raise ValueError(f"{path} cannot be read ({sentence_of(torn)}): remove it") from torn


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """The received signals to end: the block must end by itself; a second signal ends it now."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # signals are the main thread's
        return
    before = {stop: signal.getsignal(stop) for stop in STOPS}

    def hear(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))

    for stop in before:
        signal.signal(stop, hear)
    try:
        yield received
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)


def _end(received: list[signal.Signals], run: Run, step: int) -> None:
    """End the process as the first of the ``received`` signals would have."""
    tqdm.write(f"stopped before step {step} of {run.steps}; {run.checkpoint} goes on from there")
    if signal.SIGTERM in received:
        raise SystemExit(128 + signal.SIGTERM)
    raise KeyboardInterrupt


class _Log:
    """The log of a training: the progress bar, ``loss.csv`` with measurements and, every
    :data:`RECORDED` steps, losses, and a tracker. Raises ``ValueError`` for a tracker that is not
    installed.
    """

    def __init__(self, run: Run, first: int, main: bool) -> None:
        self.run = run
        self.curve = run.out / "loss.csv" if main else None
        options: dict[str, Any] = dict(initial=first, total=run.steps, mininterval=5)
        self.bar = tqdm(range(first, run.steps), desc=run.out.name, disable=not main, **options)
        self.tracker: Any = None
        if self.curve is not None:
            _forget(self.curve, first)
        if run.tracker and main:
            with needed("tracker", "train"):
                from accelerate import Accelerator
            self.tracker = Accelerator(log_with=run.tracker, project_dir=run.out)
            if not self.tracker.log_with:
                name = run.tracker
                raise ValueError(f"tracker {name} needs its package: pip install {name}")
            self.tracker.init_trackers(run.out.name)

    def add(self, i: int, values: Mapping[str, float]) -> None:
        """Log the ``values`` of step ``i``, if it is recorded."""
        if self.curve is None or not (i % RECORDED == 0 or "tau" in values):
            return
        self._write(self.curve, {"step": str(i), **{k: f"{v:.5f}" for k, v in values.items()}})
        if self.tracker is not None:
            self.tracker.log(values, step=i)
        values_text = {name: f"{value:.4f}" for name, value in values.items()}
        if self.run.batch and (rate := self.bar.format_dict["rate"]):
            values_text["rows/s"] = f"{rate * self.run.batch * self.run.accumulate:.1f}"
        self.bar.set_postfix(values_text, refresh=False)

    def end(self) -> None:
        """Close the log after the last step."""
        if self.tracker is not None:
            self.tracker.end_training()

    def _write(self, curve: Path, row: Mapping[str, str]) -> None:
        """Write a line of the curve; columns are those of its first line and the measurements."""
        new = not curve.exists()
        names = curve.read_text().partition("\n")[0].split(",") if not new else list(row)
        if new and self.run.measure is not None and "tau" not in names:
            names.append("tau")
        with curve.open("a", newline="") as stream:
            writer = csv.DictWriter(stream, names, extrasaction="ignore", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)


def _forget(curve: Path, first: int) -> None:
    """Drop the lines of a killed run from step ``first`` on, and an incomplete last line."""
    head, *rows = curve.read_text().splitlines(keepends=True) if first and curve.exists() else [""]
    earlier = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) < first]
    if not earlier:  # the next record begins a new curve
        curve.unlink(missing_ok=True)
        return
    part = curve.with_suffix(".part")
    part.write_text("".join([head, *earlier]))
    os.replace(part, curve)
