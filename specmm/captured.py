"""A round or a step as one CUDA graph: what compiling is on a processor, without a compiler.

A graph runs no Python, and reads and writes the memory it was recorded on. What is *kept* between
calls (target, drafter, progress) is that memory. Where a call puts a new tensor in place of one
there, the graph ends with a copy into the old one; where it counts, the same is added after every
replay. What is *given* to a call is copied to memory of the graph, and what it returns is copied
out of it, since the next replay overwrites it.

The first call is played as it is and shows what a call replaces, the second is recorded. A new run
has objects of its own: where they are of the same form, their tensors are copied to the graph's
memory, which takes their place, and else it all begins anew.
"""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from specmm.compiled import CPU, CompiledChain, CompiledRound, compiled, count_uncompiled
from specmm.decode import Parts, Progress, one_round
from specmm.drafter import Feedback
from specmm.randomness import PredrawnUniforms, Uniforms
from specmm.stats import Clock
from specmm.tree import DraftTree

Place: TypeAlias = tuple[int, Any]
TRIES = 6  # calls that may show something else than the one before, until nothing is recorded
NUMBERS = (bool, int, float, str)
TOLD = {"calls"}  # numbers of which only messages tell: a graph does not depend on them


class Uncapturable(Exception):
    """Calls are not alike: what they replace, or what they are given, has another form."""


class Slot(NamedTuple):
    """A place among what is kept: ``holder[key]``, and what is there."""

    holder: Any  # a dict, also an object's attributes, or a list
    key: Any
    value: Any

    @property
    def place(self) -> Place:
        """Its name, as long as the holder lives."""
        return id(self.holder), self.key

    @property
    def now(self) -> Any:
        """What is there at present; raises :class:`Uncapturable` if nothing is."""
        try:
            return self.holder[self.key]
        except (KeyError, IndexError) as error:
            raise Uncapturable(f"{self.key!r} is gone") from error

    def put(self, value: Any) -> None:
        """Another value there."""
        self.holder[self.key] = value


def record_on_gpu(function: Callable[[], None]) -> Callable[[], None]:
    """``function``, which does not run, as what replays it on the GPU.

    Graphs share the stream of recording, to which cuBLAS's working memory belongs.
    (``torch.cuda.graph`` also collects garbage and empties PyTorch's cache, which takes longer than
    a round.)
    """
    graph = torch.cuda.CUDAGraph()
    side = _side(torch.cuda.current_device())
    torch.cuda.synchronize()
    collects = gc.isenabled()
    gc.disable()  # memory must not be freed meanwhile
    try:
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    replay: Callable[[], None] = graph.replay
    return replay


@functools.cache
def _side(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def slots_of(roots: tuple[Any, ...]) -> tuple[dict[Place, Slot], set[int]]:
    """All places in our own objects, dicts and lists that ``roots`` lead to, in order, and the ids
    of what holds them.

    Networks are not looked into, nor what says that it is ``unread``, nor tuples: they are values.
    """
    found: dict[Place, Slot] = {}
    holders: set[int] = set()
    seen: set[int] = set()

    def look(value: Any) -> None:
        if id(value) in seen or isinstance(value, Tensor | nn.Module):
            return
        seen.add(id(value))
        if isinstance(value, tuple):
            for item in value:
                look(item)
            return
        holder = _holder(value)
        if holder is None:
            return
        holders.add(id(holder))
        keys = range(len(holder)) if isinstance(holder, list) else list(holder)
        for key in keys:
            slot = Slot(holder, key, holder[key])
            found[slot.place] = slot
            look(holder[key])

    look(roots)
    return found, holders


def _holder(value: Any) -> Any:
    """The dict or list in which ``value`` keeps things, None if it is not for us to look into."""
    if isinstance(value, dict | list):
        return value
    ours = type(value).__module__.startswith(("specmm.", "benchmarks.", "tests."))
    if not ours or isinstance(value, type) or getattr(type(value), "unread", False):
        return None
    return getattr(value, "__dict__", None)


def tensors_of(value: Any, known: Container[int]) -> Iterator[Tensor]:
    """The tensors in ``value``, but for those of objects whose ids are ``known``."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) in known:
        return
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item, known)
    elif (holder := _holder(value)) is not None:
        for item in list(holder.values()):
            yield from tensors_of(item, known)


def remade(value: Any, others: Iterator[Tensor], known: Mapping[int, Any]) -> Any:
    """``value`` with the next of ``others`` in place of each of :func:`tensors_of`, and of objects
    that are ``known`` what is known by their ids.
    """
    if isinstance(value, Tensor):
        return next(others)
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, tuple):
        items = [remade(item, others, known) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [remade(item, others, known) for item in value]
    holder = _holder(value)
    if holder is None:
        return value
    made = {key: remade(item, others, known) for key, item in list(holder.items())}
    if isinstance(value, dict):
        return made
    other = copy.copy(value)
    vars(other).update(made)
    return other


def _same(now: Any, before: Any) -> bool:
    """Whether nothing else came in the place of ``before``."""
    if now is before:
        return True
    return type(now) in NUMBERS and type(now) is type(before) and bool(now == before)


def _equal(now: Any, before: Any) -> bool:
    """Whether values of no tensors are the same setting."""
    if isinstance(now, torch.device | torch.dtype | torch.Size | Enum | range | slice):
        return bool(now == before)
    return now is before


def _one_to_one(moves: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether tensors that were one are one, and others are not."""
    forward = {id(there): id(value) for there, value in moves}
    return len(forward) == len(set(forward.values())) and all(
        forward[id(there)] == id(value) for there, value in moves
    )


@dataclass
class Change:
    """What a call puts in place of what was kept: pairs (old, new) of tensors, and numbers that
    grow, by slot.
    """

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    grown: dict[Place, int] = field(default_factory=dict)

    @classmethod
    def between(cls, before: dict[Place, Slot]) -> Change:
        """That since ``before`` was noted; raises :class:`Uncapturable` for a change of form."""
        found = cls()
        for place, slot in before.items():
            now = slot.now
            if _same(now, slot.value):
                continue
            if type(now) is int and type(slot.value) is int:
                found.grown[place] = now - slot.value
                continue
            replaced = pairs(slot.value, now)
            if replaced:  # else they are views of the same memory
                found.pairs += replaced
                found.places.append(place)
        return found

    @property
    def form(self) -> tuple[Any, ...]:
        """What the changes of two calls alike share."""
        return tuple(self.places), tuple(self.grown.items())


def pairs(old: Any, new: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two values of the same form that do not share their memory, in pairs.

    Raises :class:`Uncapturable` for values of different form.
    """
    if old is new:
        return []
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise Uncapturable(f"a tensor of {tuple(old.shape)} became {tuple(new.shape)}")
        same = old.data_ptr() == new.data_ptr() and old.stride() == new.stride()
        return [] if same else [(old, new)]
    if type(old) is not type(new):
        raise Uncapturable(f"{type(old).__name__} became {type(new).__name__}")
    if isinstance(old, tuple | list):
        if len(old) != len(new):
            raise Uncapturable("a sequence became longer or shorter")
        return [pair for a, b in zip(old, new, strict=True) for pair in pairs(a, b)]
    holder, other = _holder(old), _holder(new)
    if holder is None or other is None:
        if old != new:
            raise Uncapturable(f"{old!r} became {new!r}")
        return []
    if holder.keys() != other.keys():
        raise Uncapturable(f"a {type(old).__name__} has other attributes")
    return [pair for key in holder for pair in pairs(holder[key], other[key])]


def copy_all(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy ``values`` of the same shapes, those of a dtype at once."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for there, value in zip(into, values, strict=True):
        if (there.shape, there.dtype) != (value.shape, value.dtype):
            raise Uncapturable(f"{tuple(there.shape)} was given as {tuple(value.shape)}")
        ours, theirs = by_dtype.setdefault(there.dtype, ([], []))
        ours.append(there)
        theirs.append(value)
    for ours, theirs in by_dtype.values():
        torch._foreach_copy_(ours, theirs)


class Recorded:
    """``function`` of what is ``kept`` and of what is ``given``, recorded; ``usual`` is the change
    that a call was seen to make.

    Raises :class:`Uncapturable`, or what recording raises, with all that is kept as it was.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        kept: tuple[Any, ...],
        given: tuple[Any, ...],
        usual: Change,
    ) -> None:
        self.function = function
        self.kept = kept
        self._own_what_is_replaced(usual)
        self.inputs = [x.clone() for x in tensors_of(given, self.known)]
        self.given = remade(given, iter(self.inputs), self.known)
        self.usual = usual
        try:
            self.replay = record_on_gpu(self._play)
        except Exception:
            self._restore()
            raise
        self._restore()
        self.grown = usual.grown
        self.whole = list(slots_of(kept)[0].values())  # as it was recorded, in order
        self.watched = self.slots

    def _own_what_is_replaced(self, usual: Change) -> None:
        """Where tensors are replaced, the memory is nobody else's, and a whole one."""
        there, _ = slots_of(self.kept)
        if not there.keys() >= set(usual.places):
            raise Uncapturable("what a call replaced is gone")
        replaced = [there[place] for place in usual.places]
        for slot in replaced:
            slot.put(None)
        self.slots, _ = slots_of(self.kept)
        values = (*self.kept, *(slot.value for slot in self.slots.values()))
        self.known = {id(x): x for x in values}
        for slot in replaced:
            fresh = [x.clone() for x in tensors_of(slot.value, self.known)]
            own = slot._replace(value=remade(slot.value, iter(fresh), self.known))
            own.put(own.value)
            self.slots[slot.place] = own

    def _play(self) -> None:
        """The function, then all that it replaced copied to where it was."""
        result = self.function(*self.kept, *self.given)
        change = Change.between(self.slots)
        if change.form != self.usual.form:
            raise Uncapturable("calls replace different tensors")
        # nothing that is overwritten below is read after it
        self.outputs = [x.clone() for x in tensors_of(result, self.known)]
        self.result = result
        new = [value.clone() for _, value in change.pairs]
        copy_all([old for old, _ in change.pairs], new)

    def _restore(self) -> None:
        for slot in self.slots.values():
            slot.put(slot.value)

    def fits(self, kept: tuple[Any, ...]) -> bool:
        """Whether ``kept`` is what it was recorded on; its tensors may have become others."""
        if any(a is not b for a, b in zip(kept, self.kept, strict=True)):
            return False
        moved = []
        for place, slot in self.slots.items():
            now = slot.now
            if slot.key in TOLD or place in self.grown or _same(now, slot.value):
                continue
            if not (isinstance(now, Tensor) and isinstance(slot.value, Tensor)):
                return False
            moved.append((slot, now))
        for slot, now in moved:
            if (now.shape, now.dtype) != (slot.value.shape, slot.value.dtype):
                return False
            slot.value.copy_(now)
            slot.put(slot.value)
        return True

    def adopt(self, kept: tuple[Any, ...]) -> bool:
        """Whether ``kept`` is of the same form as what it was recorded on; then its tensors have
        moved to the graph's memory.
        """
        found = list(slots_of(kept)[0].values())
        if [slot.key for slot in found] != [slot.key for slot in self.whole]:
            return False
        pairs = [(self.watched[a.place], b) for a, b in self._alike(found)]
        try:
            moves = [move for memory, slot in pairs for move in self._moves(memory, slot)]
        except Uncapturable:
            return False
        if not _one_to_one(moves):
            return False
        moved = [(there, value) for there, value in moves if there is not value]
        copy_all([there for there, _ in moved], [value for _, value in moved])
        self.slots = {}
        for memory, slot in pairs:
            held = memory.value if self._is_memory(memory) else slot.value
            self.slots[slot.place] = slot._replace(value=held)
            slot.put(held)
        grown = {place: more for place, more in self.usual.grown.items()}
        self.grown = {b.place: grown[a.place] for a, b in self._alike(found) if a.place in grown}
        self.known |= {id(slot.value): slot.value for slot in found}
        self.known |= {id(a.value): b.value for a, b in self._alike(found)}
        self.kept = kept
        return True

    def _alike(self, found: list[Slot]) -> list[tuple[Slot, Slot]]:
        """The slots of recording that are watched (not those within what a call replaces) with
        those that were ``found`` in their place.
        """
        both = zip(self.whole, found, strict=True)
        return [(a, b) for a, b in both if a.place in self.watched]

    def _is_memory(self, slot: Slot) -> bool:
        """Whether the graph's own tensors are in ``slot``, as a whole."""
        if isinstance(slot.value, Tensor) or slot.place in self.usual.places:
            return True
        return isinstance(slot.value, tuple) and any(True for _ in tensors_of(slot.value, ()))

    def _moves(self, memory: Slot, slot: Slot) -> list[tuple[Tensor, Tensor]]:
        """The graph's tensors at ``memory`` with those at ``slot``; raises :class:`Uncapturable` if
        these do not fit.
        """
        old, new = memory.value, slot.value
        if slot.key in TOLD or memory.place in self.usual.grown:
            return []
        if type(new) is not type(old):
            raise Uncapturable(f"{type(old).__name__} became {type(new).__name__}")
        if self._is_memory(memory):
            ours, theirs = list(tensors_of(old, ())), list(tensors_of(new, ()))
            forms = [[(x.shape, x.dtype, x.device) for x in some] for some in (ours, theirs)]
            if forms[0] != forms[1]:
                raise Uncapturable("tensors became others")
            return list(zip(ours, theirs, strict=True))
        walked = _holder(new) is not None or isinstance(new, tuple)
        if not (
            walked or getattr(type(new), "unread", False) or _same(new, old) or _equal(new, old)
        ):
            raise Uncapturable(f"{old!r} became {new!r}")
        return []

    def __call__(self, given: tuple[Any, ...]) -> Any:
        """What the function returns for ``given``."""
        values = list(tensors_of(given, self.known))
        if len(values) != len(self.inputs):
            raise Uncapturable("a call is given something else")
        copy_all(self.inputs, values)
        self.replay()
        for place, more in self.grown.items():
            slot = self.slots[place]
            slot.put(slot.now + more)
        fresh = [torch.empty_like(x) for x in self.outputs]
        copy_all(fresh, self.outputs)
        return remade(self.result, iter(fresh), self.known)


class Captured:
    """``function`` of what is kept and of what is given, recorded once calls are alike.

    What cannot be recorded is played as it is, with a warning unless it is to be ``quiet``.
    """

    unread = True  # by programs: see specmm.fingerprint

    def __init__(self, function: Callable[..., Any], quiet: bool = False) -> None:
        self.function = function
        self.quiet = quiet
        self.recorded: Recorded | None = None
        self.usual: Change | None = None
        self.tries = 0
        self.failed = False

    def __call__(self, kept: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        """What the function returns."""
        if self.failed:
            count_uncompiled()
            return self.function(*kept, *given)
        if self.recorded is not None:
            try:
                if self.recorded.fits(kept) or self.recorded.adopt(kept):
                    self.usual = None
                    return self.recorded(given)
            except Uncapturable as error:
                self._missed(error)
        if self.usual is None:
            return self._observed(kept, given)
        return self._recorded(kept, given)

    def _observed(self, kept: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        before, holders = slots_of(kept)
        result = self.function(*kept, *given)
        try:
            self.usual = Change.between(before)
        except Uncapturable as error:
            self._missed(error)
        after, _ = slots_of(kept)
        added = any(holder in holders for holder, _ in after.keys() - before.keys())
        if self.usual is not None and added:
            self.usual = None
            self._missed(Uncapturable("a call adds to what is kept"))
        return result

    def _recorded(self, kept: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        assert self.usual is not None
        try:
            self.recorded = Recorded(self.function, kept, given, self.usual)
        except (Uncapturable, RuntimeError) as error:
            self.usual = None
            self._missed(error)
            return self.function(*kept, *given)
        self.tries = 0
        return self.recorded(given)

    def _missed(self, error: Exception) -> None:
        self.tries += 1
        if self.tries >= TRIES:
            self.failed = True
            why = str(error).split("\n")[0]
        if self.failed and not self.quiet:
            warnings.warn(f"runs uncompiled, since it cannot be captured: {why}", stacklevel=4)


class Graph:
    """``function`` of tensors alone, recorded at its first call and replayed for the same shapes.

    Where nothing is captured it is just called. Results are copies.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.replay: Callable[[], None] | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The function's results for ``inputs``."""
        if not captures(inputs[0].device):
            return self.function(*inputs)
        if self.replay is None:
            self.inputs = [x.clone() for x in inputs]
            self.function(*self.inputs)  # what is made once is made
            self.replay = record_on_gpu(self._run)
        copy_all(self.inputs, list(inputs))
        self.replay()
        return tuple(x.clone() for x in self.outputs)

    def _run(self) -> None:
        self.outputs = self.function(*self.inputs)


class CapturedRound(CompiledRound):
    """Plays rounds as :class:`specmm.compiled.CompiledRound` does, each as one graph.

    The rounds after a prefill are played as they are until two are alike.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.captured = Captured(self._round, quiet)
        self.uniforms = 0

    def _count(self, used: int, tree: DraftTree) -> None:
        """Nothing: later rounds may take more than the first, and say so themselves."""

    def _played(
        self, parts: Parts, feedback: Feedback, progress: Progress, uniforms: Uniforms, clock: Clock
    ) -> Feedback:
        self.stream = uniforms
        with clock("verify"):
            given = feedback, uniforms.ahead(self.uniforms)
            done: Feedback = self.captured((parts, progress), given)
        uniforms.draw(self.uniforms)
        return done

    def _round(
        self, parts: Parts, progress: Progress, feedback: Feedback, numbers: Tensor
    ) -> Feedback:
        drawn = _Ahead(numbers, self.stream)
        done = one_round(parts, feedback, progress, drawn, Clock(), not parts[2].exact)
        parts[0].keep_round(done.drafted[1])
        self.uniforms = drawn.used  # that a row takes in every replay, too
        return done

    def _end(self, target: Any, done: Feedback) -> None:
        target.check_round()  # the graph has committed what was kept


class _Ahead(PredrawnUniforms):
    """``numbers`` [B, L] and, of a round that takes more than the one before, the next ones of
    their ``stream``.
    """

    def __init__(self, numbers: Tensor, stream: Uniforms) -> None:
        super().__init__(numbers)
        self.stream = stream

    def draw(self, count: int) -> Tensor:
        """See :class:`specmm.randomness.UniformSource`."""
        if self.used + count > self.numbers.shape[1]:
            self.numbers = self.stream.ahead(self.used + count)
        return super().draw(count)


def captures(device: torch.device) -> bool:
    """Whether programs on ``device`` are captured graphs."""
    return device.type == "cuda"


def round_program(device: torch.device = CPU, ends_early: bool = False) -> CompiledRound:
    """What plays rounds as programs on ``device``; ``ends_early``: of chains that may.

    Raises ``ValueError`` for such chains on a GPU.
    """
    if not captures(device):
        return CompiledChain(device) if ends_early else CompiledRound(device)
    if ends_early:
        raise ValueError("compiled=True serves chains that end early (sure) on processors only")
    return CapturedRound()


def step_program(
    function: Callable[[Any, Tensor], Any], device: torch.device
) -> Callable[[Any, Tensor], Any]:
    """``function`` of a target and tokens [B] as a program on ``device``."""
    if not captures(device):
        return compiled(function, device)
    captured = Captured(function)
    return lambda target, tokens: captured((target,), (tokens,))
