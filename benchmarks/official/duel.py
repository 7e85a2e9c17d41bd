"""Two programs that draw the same pictures, timed in turn: the release's and ours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.arithmetic import paired_speedup, quartiles
from benchmarks.common import Budget, Row, load
from benchmarks.memory import measured_peak
from benchmarks.official.releases import running
from specmm.runs.race import in_turn

ENOUGH = 5  # repeats of each; fewer say nothing about a ratio


class Made(NamedTuple):
    """Pictures uint8 [B, R, R, 3], their tokens [B, L], and tokens a round where there are some."""

    pictures: Tensor
    tokens: Tensor
    tau: float | None = None


Draw = Callable[[Sequence[int], int], Made]  # of classes and a seed


@dataclass
class Program:
    """``draw`` as it is timed, and ``greedy``, whose tokens do not depend on random numbers;
    ``kept`` counts the bytes of caches that it holds from one call to the next.
    """

    draw: Draw
    greedy: Draw
    seconds: list[float] = field(default_factory=list)  # a picture
    taus: list[float] = field(default_factory=list)
    kept: Callable[[], int] = int

    def fresh(self) -> Program:
        """The same without times and taus."""
        return Program(self.draw, self.greedy, kept=self.kept)

    def once(self, classes: Sequence[int], seed: int) -> None:
        """Draw a batch and record its seconds and, where there is one, its tau."""
        start = time.perf_counter()
        with torch.inference_mode(), running():
            made = self.draw(classes, seed)
        self.seconds.append((time.perf_counter() - start) / len(classes))
        if made.tau is not None:
            self.taus.append(made.tau)


def ours(pipe: Any, greedy: Row, **options: Any) -> Program:
    """The call of our ``pipe`` with ``options``, which ``greedy`` changes where tokens are not to
    depend on random numbers.
    """

    def drawing(given: Row) -> Draw:
        def draw(classes: Sequence[int], seed: int) -> Made:
            call = dict(batch_size=len(classes), output_type="uint8") | given
            out = pipe(list(classes), generator=torch.Generator().manual_seed(seed), **call)
            return Made(torch.as_tensor(out.images), out.tokens, out.stats.tau)

        return draw

    return Program(drawing(options), drawing(options | greedy))


@dataclass
class Duel:
    """``theirs`` and ``ours`` drawing ``batch`` pictures at once of a model with ``classes``.

    ``compared``: how far the two agree, where greedy pictures cannot tell.
    """

    method: str
    theirs: Program
    ours: Program
    batch: int
    classes: int
    compared: Row | None = None

    def chosen(self, repeat: int) -> list[int]:
        """The classes of a batch."""
        generator = torch.Generator().manual_seed(repeat)
        return torch.randint(self.classes, (self.batch,), generator=generator).tolist()

    def agreement(self) -> Row:
        """The share of equal tokens of greedy pictures, and the largest difference of pixels."""
        if self.compared is not None:
            return self.compared
        with torch.inference_mode(), running():
            theirs, ours = (p.greedy(self.chosen(0), 0) for p in (self.theirs, self.ours))
        equal = theirs.tokens == ours.tokens
        same = equal.all(1)
        gap = (theirs.pictures[same].int() - ours.pictures[same].int()).abs()
        return {
            "token_equal": float(equal.float().mean()),
            "pixel_gap": int(gap.max()) if len(gap) else None,
        }

    def race(self, repeats: int, budget: Budget) -> None:
        """Run both ``repeats`` times, in turn, after one round that is not counted."""
        programs = [self.theirs, self.ours]
        for repeat in tqdm(range(-1, repeats), desc=f"{self.method}, batch {self.batch}"):
            if budget.spent and repeat > 0:
                break
            for program in in_turn(programs, repeat + 1):
                program.once(self.chosen(repeat + 1), repeat + 1)
        for program in programs:
            del program.seconds[0], program.taus[:1]

    def peaks(self) -> Row:
        """The most MiB of tensors that each holds beside its weights, caches of earlier calls with
        them.
        """
        classes = self.chosen(0)
        found = {}
        for name, program in (("theirs", self.theirs), ("ours", self.ours)):
            with torch.inference_mode(), running():
                peak = measured_peak(partial(program.draw, classes, 0), torch.device("cpu"))
            found[f"{name}_mib"] = (peak + program.kept()) / 2**20
        return found

    def row(self) -> Row:
        """What was measured so far; a ratio only of :data:`ENOUGH` repeats."""
        theirs, ours = self.theirs.seconds, self.ours.seconds
        told = len(ours) >= ENOUGH
        low, high = quartiles(theirs, ours) if told else (None, None)
        taus = {"theirs_tau": self.theirs.taus, "ours_tau": self.ours.taus}
        return {
            "method": self.method,
            "batch": self.batch,
            "theirs": statistics.median(theirs),
            "ours": statistics.median(ours),
            "speedup": paired_speedup(theirs, ours) if told else None,
            "speedup_low": low,
            "speedup_high": high,
            "repeats": len(ours),
            "load": load(),
        } | ({k: statistics.median(v) for k, v in taus.items()} if all(taus.values()) else {})
