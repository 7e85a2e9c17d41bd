"""What every part of the GPU benchmark has: a name, what it is about, and its cases.

A case gives rows; a part's cases are measured one after the other, each once for a GPU and a
commit (``running.py``). Parts are named as text and imported when they run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

import torch

from benchmarks.common import RESULTS, Budget, Row
from specmm.extending.registry import named, unknown

MOST_MINUTES = 8.0  # that a part may take in all
MINUTES = 6.0  # no case begins later; the last one and loading come on top
REPEATS = 20
FEW = 5  # repetitions once half of the time is spent


class Case(NamedTuple):
    """A thing to measure; its name is unique in its part."""

    name: str
    measure: Callable[[], list[Row]]


@dataclass
class Bench:
    """Where and how everything is measured; weights of published sizes are of ``dtype``.

    ``tiny``: small shapes, a repetition or two: a rehearsal, whose times mean nothing. ``most``:
    repetitions of a measurement.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    device: torch.device
    tiny: bool
    out: Path
    minutes: float = MINUTES
    most: int = REPEATS
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def at(
        cls,
        device: str,
        tiny: bool,
        out: Path | None,
        minutes: float = MINUTES,
        most: int = REPEATS,
    ) -> Bench:
        """The bench on ``device`` ("auto": the GPU if there is one); a CPU is always ``tiny``.

        Raises ``ValueError`` for a device that is not here.
        """
        there = torch.cuda.is_available()
        if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not there):
            found = "a GPU and a CPU" if there else "a CPU alone"
            raise ValueError(
                f"device must be auto, cuda or cpu and be here, got {device!r} where "
                f"there is {found}; give --device cpu to rehearse"
            )
        chosen = "cuda" if there and device != "cpu" else "cpu"
        tiny = tiny or chosen == "cpu"
        folder = out or (Path("runs/gpu") if tiny else RESULTS / "gpu")
        return cls(torch.device(chosen), tiny, folder, minutes, most)

    @property
    def on_gpu(self) -> bool:
        """Whether there are a GPU's streams to wait for."""
        return self.device.type == "cuda"

    @property
    def budget(self) -> Budget:
        """What is left of the part's time."""
        spent = (time.monotonic() - self.started) / 60
        return Budget(self.minutes - spent)

    @property
    def repeats(self) -> int:
        """Repetitions of a measurement that begins now: fewer when time is short."""
        if self.tiny:
            return 1
        late = time.monotonic() - self.started > 30 * self.minutes
        return min(FEW, self.most) if late else self.most

    def now(self) -> float:
        """Seconds, when the device has done what it was told."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def memory(self) -> Iterator[dict[str, float | None]]:
        """``peak_mib`` of the GPU within the block; None on a CPU, which does not count it."""
        found: dict[str, float | None] = {"peak_mib": None}
        gc.collect()  # what was measured before: graphs and their targets refer to one another
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield found
        if self.on_gpu:
            found["peak_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20


Cases: TypeAlias = Callable[[Bench], Iterable[Case]]


@dataclass(frozen=True)
class Part:
    """A part of the whole: its ``cases`` as "module:function"."""

    name: str
    about: str
    where: str

    def cases(self, bench: Bench) -> Iterable[Case]:
        """What there is to measure on ``bench``, in order of importance."""
        found: Cases = named(self.where)
        return found(bench)


HERE = "benchmarks.gpu"
PARTS = {
    part.name: part
    for part in (
        Part("kernels", "checks, then tree attention's time", f"{HERE}.kernels:cases"),
        Part("llamagen-b", "LlamaGen-B at 256 and 384", f"{HERE}.tokens:base"),
        Part("llamagen-xl", "LlamaGen-XL at 256 and 384", f"{HERE}.tokens:extra_large"),
        Part("llava", "LLaVA-1.5-7B with MSD", f"{HERE}.language:llava"),
        Part("qwen-vl", "Qwen2.5-VL-7B with MSD", f"{HERE}.language:qwen_vl"),
        Part("text", "Qwen3-8B with DFlash", f"{HERE}.language:text"),
        Part("training", "an EAGLE-3 head learns from 7B and 8B", f"{HERE}.training:training"),
        Part("mar", "MAR-L", f"{HERE}.continuous:cases"),
        Part("var", "VAR-d30 and d16, plain and CoDe", f"{HERE}.var:published_pair"),
        Part("pocket-llamagen", "pocket/llamagen, real", f"{HERE}.llamagen:cases"),
        Part("pocket-var", "pocket/var, real", f"{HERE}.var:pocket"),
        Part("pocket-mar", "pocket/mar, real", f"{HERE}.pocket:mar"),
        Part("pocket-llava", "pocket/llava, real", f"{HERE}.pocket:llava"),
        Part("pocket-coder", "pocket/coder, real", f"{HERE}.pocket:coder"),
    )
}


def part_of(name: str) -> Part:
    """The part called ``name``; raises ``ValueError`` for another."""
    if name not in PARTS:
        raise unknown("part", name, [*PARTS, "all", "report"])
    return PARTS[name]
