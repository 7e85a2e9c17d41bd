"""``compiled="auto"``: programs are made when they save more time than they take.

A call's kind of work (model, method, options, batch size) has three numbers, in seconds: a picture
(for texts: a token) uncompiled, a picture compiled, and the extra time of the first compiled
pictures. They are stored in the folder of programs (:mod:`specmm.programs.program_cache`), so that
later processes know them, and know that programs there only need loading.

As in renting or buying: a batch is compiled if the seconds that programs would have saved so far in
this process, and will save in the rest of the call, exceed the seconds of compiling. If no pictures
follow, this takes at most twice the time of the best choice in hindsight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch

from specmm.choose.notes import Notes, sizes_of
from specmm.extending.kinds import shown
from specmm.programs import program_cache
from specmm.programs.compiled import uncompiled_calls

T = TypeVar("T")
Compiled: TypeAlias = bool | Literal["auto"]
# Of this machine's programs until one has been timed on it: half a minute to two (the CPU).
BUILD = 90.0
CAPTURE = 0.2  # a GPU's graphs, captured anew in each process, until measured
LOAD = 0.25  # the share of building that loading takes (5.8 of 23.4 CPU seconds)
TRIES = 3  # batches by which programs are judged: one may run beside other work
SHARE = 0.35  # the share of seconds saved until measured: LlamaGen 0.3 to 0.45


@dataclass
class Seconds:
    """The seconds of one kind of work on this machine; None where not measured.

    ``plain`` and ``quick``: a picture's, uncompiled and compiled; ``build`` and ``load``: the extra
    time of a process's first compiled pictures, without and with programs in the folder.
    """

    plain: float | None = None
    quick: float | None = None
    build: float | None = None
    load: float | None = None

    @property
    def usual(self) -> float:
        """The seconds that a compiled picture usually saves."""
        return (self.plain or 0.0) * SHARE

    @property
    def saved(self) -> float:
        """The seconds that a compiled picture saves."""
        if self.plain is None or self.quick is None:
            return self.usual
        return self.plain - self.quick

    @property
    def cost(self) -> float:
        """The seconds that building or loading adds to the first compiled pictures of a process."""
        if self.load is not None:
            return self.load
        return BUILD if self.build is None else self.build * LOAD


def check_compiled(compiled: object) -> None:
    """Raise ``ValueError`` unless ``compiled`` is True, False or "auto"."""
    if not (isinstance(compiled, bool) or (isinstance(compiled, str) and compiled == "auto")):
        raise ValueError(f'compiled must be True, False or "auto", got {shown(compiled)}')


@dataclass
class Work:
    """One kind of work in this process: its known seconds, and the decisions so far.

    ``notes`` store its numbers.
    """

    seconds: Seconds = field(default_factory=Seconds)
    notes: Notes = field(default_factory=Notes)
    missed: float = 0.0  # seconds that programs would have saved in this process
    ready: bool = False  # programs have run in this process
    able: bool = True  # there are programs for it
    tried: int = 0  # compiled batches of this process after the first

    @classmethod
    def of(cls, key: object) -> Work:
        """The work called ``key``, whose ``repr`` contains all that its seconds depend on."""
        folder = program_cache.folder()
        notes = Notes(None if folder is None else folder / "seconds", key)
        return cls(notes.read(_parsed) or Seconds(), notes)

    @property
    def saved(self) -> float:
        """The seconds that a compiled picture saves. A measured saving of zero counts only after
        ``TRIES`` batches of this process.
        """
        saved = self.seconds.saved
        return saved if saved > 0 or self.tried >= TRIES else self.seconds.usual

    def pays(self, pictures: int) -> bool:
        """Whether programs pay for the next ``pictures``, given those drawn by this process."""
        if self.ready:
            return self.saved > 0
        return self.missed + pictures * self.saved > self.seconds.cost

    def programs(self, pictures: int, make: Callable[[], T]) -> T | None:
        """The compiled form that ``make`` returns, if compiling pays for the ``pictures`` to come;
        None otherwise, or if this cannot be compiled.
        """
        if not (self.able and self.pays(pictures)):
            return None
        try:
            return make()
        except ValueError:
            self.able = False
            return None

    def observe(self, seconds: float, pictures: int, quick: bool, built: bool = True) -> None:
        """Record that ``pictures`` took ``seconds``, compiled if ``quick``. If programs could not
        be ``built``, later pictures are not compiled.
        """
        self.able &= built
        noted = self.seconds
        per_picture = seconds / pictures
        if not quick:
            noted.plain = per_picture if noted.plain is None else min(per_picture, noted.plain)
            self.missed += pictures * max(self.saved, 0.0)
        elif self.ready:
            self.tried += 1
            noted.quick = per_picture if noted.quick is None else min(per_picture, noted.quick)
        else:
            usual = noted.quick or (noted.plain or 0.0) * (1 - SHARE)
            beyond = max(seconds - pictures * usual, 0.0)
            if noted.build is None:
                noted.build = beyond
            else:
                noted.load = beyond
            self.ready = True
        self.notes.write(asdict(noted))


def _parsed(content: Any) -> Seconds:
    """The seconds from a note."""
    names = [name for name in Seconds.__dataclass_fields__ if content.get(name) is not None]
    return Seconds(**{name: float(content[name]) for name in names})


class Works:
    """The kinds of work of a pipeline, by everything their seconds depend on.

    ``coming`` counts the pictures of the same kind that later calls will draw, if known.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.all: dict[str, Work] = {}
        self.coming = 0

    def clear(self) -> None:
        """Forget all decisions: the networks have moved, so programs are no longer valid."""
        self.all.clear()

    def replaced(self) -> None:
        """Note that this process's programs are gone, and are built or loaded when needed."""
        for work in self.all.values():
            work.ready = False

    def begin(
        self,
        compiled: Compiled,
        plain: T,
        make: Callable[[], T],
        network: torch.nn.Module,
        key: object,
    ) -> Turn[T]:
        """The decisions of a call of ``network``: each batch runs on ``plain`` or on the compiled
        form that ``make`` returns.

        ``key`` is its method, options and batch size. Raises ``ValueError`` as ``make`` does if
        ``compiled`` is True, and for an unknown value of it.
        """
        check_compiled(compiled)
        if compiled is True:
            return Turn(plain, make(), make)
        if compiled is False:
            return Turn(plain, plain, make)
        return Turn(plain, plain, make, self.of(network, key), self.coming)

    def of(self, network: torch.nn.Module, key: object) -> Work:
        """The work of ``network`` under ``key``."""
        key_text = repr((self.name, *sizes_of(network), key))
        if key_text not in self.all:
            work = self.all[key_text] = Work.of(key_text)
            if next(network.parameters()).is_cuda and work.seconds.build is None:
                work.seconds.build = CAPTURE / LOAD  # each process "loads" them
        return self.all[key_text]


@dataclass
class Turn(Generic[T]):
    """A call's decisions, batch by batch, if it has ``work`` to decide by; otherwise all batches
    run on ``chosen``.

    ``compiled`` says for each picture so far whether it was drawn by programs alone.
    """

    plain: T
    chosen: T
    make: Callable[[], T]
    work: Work | None = None
    coming: int = 0  # pictures of later calls
    compiled: list[bool] = field(default_factory=list)

    @contextmanager
    def batch(self, pictures: int, left: int, fits: bool) -> Iterator[T]:
        """Context for a batch: the network or program that draws its ``pictures``; times the block.
        ``left`` counts pictures of this and later batches; only a batch that ``fits`` is compiled.
        """
        chosen = self._chosen(left) if fits else self.plain
        failed = uncompiled_calls()
        start = time.perf_counter()
        yield chosen
        built = uncompiled_calls() == failed
        quick = built and chosen is not self.plain
        self.compiled += [quick] * pictures
        if self.work is not None:
            self.work.observe(time.perf_counter() - start, pictures, quick, built)

    def pays(self, pictures: int) -> bool:
        """Whether programs exist and pay for ``pictures`` to come."""
        return self.work is not None and self.work.programs(pictures, self.make) is not None

    def _chosen(self, left: int) -> T:
        if self.work is None:
            return self.chosen
        program = self.work.programs(left + self.coming, self.make)
        return self.plain if program is None else program
