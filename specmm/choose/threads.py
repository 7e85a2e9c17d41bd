"""Chooses by measurement how many threads a model's matrix products take on a CPU.

OpenMP's threads wait for one another at the end of each product. If another program occupies a
core, they wait for a time slice of the system, as long as a thousand small products: beside one
busy program, a picture of pocket/llamagen took 0.37 s with one thread and 1.4 s with two. So a
network's products are timed with one thread, two, four and so on before its first call. The fastest
number is remembered by machine and network, and measured again when products have become slower.

A number named by the user is obeyed: :func:`threads`, ``--threads``, ``OMP_NUM_THREADS``. The
number changes the last digits of a product. So a job, a training, and a command that records how to
repeat its result keep one number to the end (:func:`settled`); calls of a pipeline choose.

Shape letters: R rows of an input, K inputs and N outputs of a linear layer.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Lock, local
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specmm.choose.notes import Notes

VARIABLE = "OMP_NUM_THREADS"
ROWS = 8  # rows of an input: a round's draft tree
PASSES = 5  # through the products, by each number of threads, in turn
MOST = 2**24  # weights that a pass reads
BETWEEN = 12  # small operators after each product, as networks have: threads fall asleep meanwhile
GAIN = 1.05  # more threads must make a pass so much faster
WAITED = 1.2  # seconds by one thread over its own processor seconds that tell of a busy machine
BUSY_GAIN = 1.5  # more threads must gain there, where each pass may be a lucky one
OTHER = 1.5  # times slower or faster than the pass that was chosen by: measured anew
REMEMBERED = 600.0  # seconds until it is measured anew: what else runs here comes and goes
SHARE = 0.005  # the share of a call's seconds that later measurements may take


@dataclass(frozen=True)
class Choice:
    """A number of threads, and the reason for it."""

    count: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"threads": self.count, "threads_reason": self.reason}


class _Named:
    """The number that the user named for this process, and the option or variable that did."""

    choice: Choice | None = None


@contextmanager
def _restored() -> Iterator[None]:
    """Restore the setting of threads after the block."""
    before, took = _Named.choice, torch.get_num_threads()
    try:
        yield
    finally:
        _Named.choice = before
        torch.set_num_threads(took)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block, products of the whole process take ``count`` threads.

    Raises ``ValueError`` unless it is from 1 to the machine's cores.
    """
    with _restored():
        name_number(count, "specmm.threads")
        yield


def name_number(count: int, who: str) -> None:
    """From now on products of this process take ``count`` threads; errors name ``who`` asked for
    it.

    Raises ``ValueError`` unless it is from 1 to the machine's cores.
    """
    cores = os.cpu_count() or 1
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= cores:
        raise ValueError(
            f"{who} must be a whole number from 1 to {cores}, the cores of this machine, "
            f"got {count!r}"
        )
    _Named.choice = Choice(count, f"{who} says so")
    torch.set_num_threads(count)


@contextmanager
def settled(network: nn.Module, recorded: int | None = None, rows: int = 0) -> Iterator[Choice]:
    """Keep one number of threads within the block: the number ``recorded`` with a result that is to
    be repeated, else the named number, else the fastest for ``network``.

    Raises ``ValueError`` if another number than the recorded one was named, except by
    ``OMP_NUM_THREADS``, which launchers set.
    """
    with _restored():
        if recorded is None:
            _Named.choice = choose(network, rows)
        else:
            choice = _Named.choice
            if choice is not None and choice.count != recorded:
                raise ValueError(
                    f"this run must continue with its {recorded} threads, got {choice.count} "
                    f"({choice.reason}); leave that out, or start again in another folder"
                )
            _Named.choice = Choice(recorded, "it was begun with so many")
        torch.set_num_threads(_Named.choice.count)
        yield _Named.choice


def named() -> Choice | None:
    """The number that the user named for this process; None: choose it.

    Raises ``ValueError`` if ``OMP_NUM_THREADS``, which OpenMP then ignores, is not a number.
    """
    if _Named.choice is not None:
        return _Named.choice
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    first = text.partition(",")[0].strip()  # the others are of products within products
    if not first.isdecimal() or int(first) < 1:
        raise ValueError(f"{VARIABLE} must be a whole number from 1, got {text!r}")
    return Choice(torch.get_num_threads(), f"{VARIABLE} says so")


def in_use() -> Choice:
    """The number of threads that products take now."""
    return named() or Choice(torch.get_num_threads(), "PyTorch's own")


def allowed() -> int:
    """The most threads that may be chosen: PyTorch's setting, limited to the cores this process
    may run on and to its container's share of them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, math.ceil(min(torch.get_num_threads(), cores or 1, _quota())))


def _quota() -> float:
    """Cores' worth of time that this container may use; infinity without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            folder = Path("/sys/fs/cgroup/cpu")
            limit = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        except OSError:
            return math.inf
    quota = float(limit) if limit.strip() != "max" else -1.0
    return quota / float(period) if quota > 0 else math.inf


@dataclass
class Products:
    """The products of a network's linear layers with inputs of ``rows`` rows, and the seconds that
    a pass through them takes.

    ``taken`` are the seconds of a pass with the chosen number, measured at time ``at``; ``due`` is
    when to check the choice again, unless it is ``kept``.
    """

    layers: list[nn.Linear]
    rows: int
    choice: Choice | None = None
    taken: float = math.inf
    at: float = 0.0
    due: float = 0.0
    kept: bool = False
    notes: Notes = field(default_factory=Notes, repr=False)

    @classmethod
    def of(cls, network: nn.Module, rows: int) -> Products:
        """The products of ``network``; only the first ones, if a pass would read too much."""
        linear = [m for m in network.modules() if isinstance(m, nn.Linear) and _plain(m)]
        read = accumulate(layer.weight.numel() for layer in linear)
        layers = [layer for layer, so_far in zip(linear, read, strict=True) if so_far <= MOST]
        layers = layers or linear[:1]
        sizes = [(one.out_features, one.in_features, str(one.weight.dtype)) for one in layers]
        return cls(layers, rows, notes=Notes.of_machine("threads", (sizes, rows, allowed())))

    def choose(self, most: int) -> Choice:
        """The fastest number of threads up to ``most``, remembered until products change speed."""
        if self.choice is None or self.choice.count > most:
            noted = self.notes.read(_parsed)
            if noted is not None and 1 <= noted[0].count <= most:
                self.choice, self.taken, self.at = noted
        now = time.monotonic()
        if self.choice is not None and (self.kept or now < self.due):
            return self.choice
        old = time.time() - self.at > REMEMBERED
        if self.choice is None or old or self._has_changed(self.choice.count):
            self.choice = self._measured(most)
        self.due = now + (time.monotonic() - now) / SHARE
        return self.choice

    def _has_changed(self, count: int) -> bool:
        """Whether a pass has become slower, or faster (the machine was busy at the choice). A
        changed pass is repeated, because the first may find the weights out of the caches.
        """
        return all(not 1 / OTHER < self._pass(count) / self.taken < OTHER for _ in range(2))

    def _measured(self, most: int) -> Choice:
        """Time every number of threads in turn and return the fastest."""
        counts = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
        for count in counts:
            self._pass(count)  # this starts the threads
        seconds = dict.fromkeys(counts, 0.0)
        single = 0.0
        for _ in range(PASSES):
            for count in counts:
                start = time.thread_time()
                seconds[count] += self._pass(count) / PASSES
                single += (time.thread_time() - start) / PASSES if count == 1 else 0.0
        gain = BUSY_GAIN if seconds[1] > WAITED * single else GAIN
        fastest = 1
        for count in counts:
            if seconds[count] * gain < seconds[fastest]:
                fastest = count
        times = ", ".join(f"{1e3 * seconds[count]:.2f} ms by {count}" for count in counts)
        choice = Choice(fastest, f"measured: the network's products take {times}")
        self.taken, self.at = seconds[fastest], time.time()
        self.notes.write({**choice.as_dict(), "taken": self.taken, "at": self.at})
        return choice

    @torch.inference_mode()
    def _pass(self, count: int) -> float:
        """Seconds of a pass by ``count`` threads."""
        inputs: dict[int, Tensor] = {}
        few = torch.zeros(16)
        for layer in self.layers:
            if layer.in_features not in inputs:
                inputs[layer.in_features] = layer.weight.new_zeros(self.rows, layer.in_features)
        torch.set_num_threads(count)
        start = time.perf_counter()
        for layer in self.layers:
            type(layer).forward(layer, inputs[layer.in_features])  # without hooks
            for _ in range(BETWEEN):
                few.neg_()
        return time.perf_counter() - start


def _plain(layer: nn.Linear) -> bool:
    """Whether ``layer`` runs on the CPU with a plain weight, without hooks or quantisation."""
    weight = layer.weight
    if type(weight) is not nn.Parameter:  # a quantiser's
        return False
    return weight.device.type == "cpu" and weight.is_floating_point() and weight.ndim == 2


def _parsed(content: Any) -> tuple[Choice, float, float]:
    """A choice, the seconds of its pass and its time, from a note."""
    choice = Choice(int(content["threads"]), str(content["threads_reason"]))
    return choice, float(content["taken"]), float(content["at"])


class _Call(local):
    """This Python thread's call, and the products that time it while it may change threads."""

    inside = False
    products: Products | None = None


class _Process:
    """PyTorch's number of threads before the first of the ``calls`` in progress: a Python thread
    that begins meanwhile would read another call's choice.
    """

    lock = Lock()
    calls = 0
    own = 1


_call = _Call()
_products: WeakKeyDictionary[nn.Module, Products] = WeakKeyDictionary()


def choose(network: nn.Module, rows: int = 0) -> Choice:
    """Set PyTorch's number of threads for ``network`` and return it: the named one, or the fastest.
    Products have ``rows`` rows, by default the network's ``step_rows``, or :data:`ROWS` if it has
    none.

    Raises ``ValueError`` if ``OMP_NUM_THREADS`` is not a number.
    """
    named_threads = named()
    if named_threads is None:
        most = allowed()
        if network not in _products:
            rows = rows or getattr(network, "step_rows", ROWS)
            _products[network] = Products.of(network, rows)
        products = _products[network]
        if most == 1 or not products.layers:
            return Choice(torch.get_num_threads(), "PyTorch's own")
        named_threads = products.choose(most)
    torch.set_num_threads(named_threads.count)
    return named_threads


@contextmanager
def chosen(network: object) -> Iterator[None]:
    """Within the block ``network`` runs with the fastest number of threads, or the named one;
    afterwards PyTorch's number is restored.
    """
    if not isinstance(network, nn.Module) or _call.inside or named() is not None:
        yield
        return
    with _Process.lock:
        if not _Process.calls:
            _Process.own = torch.get_num_threads()
        _Process.calls += 1
        count = _Process.own
    _call.inside = True
    try:
        torch.set_num_threads(count)
        several = allowed() > 1
        choose(network)
        products = _products[network]
        _call.products = products if products.layers and several else None
        yield
    finally:
        _call.inside, _call.products = False, None
        with _Process.lock:
            _Process.calls -= 1
        torch.set_num_threads(count)


def look_again() -> None:
    """Called between rounds: choose the threads again if products have become slower."""
    products = _call.products
    if products is not None and not products.kept and time.monotonic() >= products.due:
        torch.set_num_threads(_Process.own)
        torch.set_num_threads(products.choose(allowed()).count)


def keep_threads() -> None:
    """Fix this call's number of threads, because programs are built for one number."""
    if _call.products is not None:
        _call.products.kept = True
