"""A round as one CUDA graph: what compiling is on a processor, without a compiler. Plain decoding
is rounds without drafts.

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

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from specmm.compiled import CPU, CompiledRound, count_uncompiled, prepare_compiler
from specmm.decode import Parts, Progress, one_round
from specmm.drafter import Feedback
from specmm.graph_memory import (
    TOLD,
    Change,
    Slot,
    Uncapturable,
    addresses,
    copy_all,
    equal,
    holder_of,
    known_of,
    networks_of,
    one_to_one,
    remade,
    same,
    same_network,
    settings_of,
    slots_of,
    tensors_of,
)
from specmm.randomness import PredrawnUniforms, Uniforms
from specmm.stats import Clock

Pool: TypeAlias = Any  # a handle of PyTorch
TRIES = 6  # calls that may show something else than the one before, until nothing is recorded


def record_on_gpu(function: Callable[[], None], pool: Pool | None = None) -> Callable[[], None]:
    """``function``, which does not run, as what replays it on the GPU; see :func:`shared_pool`.

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
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    replay: Callable[[], None] = graph.replay
    return replay


def shared_pool(device: torch.device) -> Pool | None:
    """Memory for what graphs compute on the way, if they are replayed one after another only."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


@functools.cache
def _side(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


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
        # as it was recorded: all of it in order, what is watched of that, and what was known
        self.whole = list(slots_of(kept)[0].values())
        self.watched = self.slots
        self.own = self.known
        self._note()
        self.networks = networks_of(kept)
        self.weights = addresses(self.networks)
        self.settings = settings_of(self.networks)

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
        self.known = known_of(values)
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

    @property
    def moved(self) -> bool:
        """Whether weights lie elsewhere than when it was recorded, or networks have become others
        in their settings.
        """
        there = addresses(self.networks), settings_of(self.networks)
        return there != (self.weights, self.settings)

    def fits(self, kept: tuple[Any, ...]) -> bool:
        """Whether ``kept`` is what it was recorded on; its tensors may have become others."""
        if any(a is not b for a, b in zip(kept, self.kept, strict=True)):
            return False
        if self._untouched():
            return True
        moved = []
        for slot in map(Slot._make, self.steady):
            now = slot.now
            if same(now, slot.value):
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

    def _note(self) -> None:
        """The places that stay as they are while nothing but rounds changes them."""
        self.steady = [
            tuple(slot)  # a third of the time of the slots themselves
            for place, slot in self.slots.items()
            if slot.key not in TOLD and place not in self.grown
        ]

    def _untouched(self) -> bool:
        """Whether all that is watched is as it was: hundreds of places, at every call."""
        try:
            for holder, key, value in self.steady:
                if holder[key] is not value:
                    return False
        except (KeyError, IndexError):
            return False
        return True

    def adopt(self, kept: tuple[Any, ...]) -> bool:
        """Whether ``kept`` is of the same form as what it was recorded on; then its tensors have
        moved to the graph's memory.
        """
        found = list(slots_of(kept)[0].values())
        if [slot.key for slot in found] != [slot.key for slot in self.whole]:
            return False
        pairs = [(self.watched[a.place], b) for a, b in self._alike(found)]
        moves: list[tuple[Tensor, Tensor]] = []
        passing: list[tuple[Tensor, Tensor]] = []
        try:
            for memory, slot in pairs:
                kind = passing if memory.place in self.usual.places else moves
                kind += self._moves(memory, slot)
        except Uncapturable:
            return False
        if not one_to_one(moves, passing):
            return False
        moved = [(there, value) for there, value in moves + passing if there is not value]
        copy_all([there for there, _ in moved], [value for _, value in moved])
        self.slots = {}
        for memory, slot in pairs:
            held = memory.value if self._is_memory(memory) else slot.value
            self.slots[slot.place] = slot._replace(value=held)
            slot.put(held)
        grown = self.usual.grown
        self.grown = {b.place: grown[a.place] for a, b in self._alike(found) if a.place in grown}
        self.kept = kept
        values = (*kept, *(slot.value for slot in self.slots.values()))  # no others: ids come again
        both = [(a.value, self.slots[b.place].value) for a, b in self._alike(found)]
        now = {id(a): b for a, b in both if holder_of(a) is not None}
        self.known = self.own | known_of(values) | now
        self._note()
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
        if isinstance(new, nn.Module) and not same_network(new, old):
            raise Uncapturable(f"another {type(new).__name__}")
        if self._is_memory(memory):
            ours, theirs = list(tensors_of(old, ())), list(tensors_of(new, ()))
            forms = [[(x.shape, x.dtype, x.device) for x in some] for some in (ours, theirs)]
            if forms[0] != forms[1]:
                raise Uncapturable("tensors became others")
            return list(zip(ours, theirs, strict=True))
        walked = holder_of(new) is not None or isinstance(new, tuple)
        if not (walked or getattr(type(new), "unread", False) or same(new, old) or equal(new, old)):
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

    unread = True  # by graphs: see specmm.graph_memory

    def __init__(self, function: Callable[..., Any], quiet: bool = False) -> None:
        self.function = function
        self.quiet = quiet
        self.recorded: Recorded | None = None
        self.usual: Change | None = None
        self.tries = 0
        self.failed = False
        self.recording = False

    def begin(self) -> None:
        """A run begins: what was recorded serves it if weights lie where they did; what was seen
        of another run's calls does not.
        """
        self.tries = 0
        if self.recorded is None or self.recorded.moved:
            self.recorded = self.usual = None

    def __call__(self, kept: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        """What the function returns."""
        if self.failed:
            count_uncompiled()
            return self.function(*kept, *given)
        if self.recorded is not None:
            try:
                if self.recorded.fits(kept) or self.recorded.adopt(kept):
                    result = self.recorded(given)
                    self.usual = None
                    self.tries = 0
                    return result
            except Uncapturable as error:
                self.recorded = self.usual = None
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
        self.recording = True
        try:
            self.recorded = Recorded(self.function, kept, given, self.usual)
        except (Uncapturable, RuntimeError) as error:
            self.usual = None
            self._missed(error)
        finally:
            self.recording = False
        if self.usual is None or self.recorded is None:
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

    Where nothing is captured it is just called. Results are copies. ``pool`` is another's memory.
    The first ``fixed`` tensors are not written to by anybody: the same ones are copied once.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], pool: Pool | None = None, fixed: int = 0
    ) -> None:
        self.function = function
        self.pool = pool
        self.fixed = fixed
        self.given: list[weakref.ref[Tensor]] = []  # those that were copied
        self.inputs: list[Tensor] = []
        self.replay: Callable[[], None] | None = None

    @property
    def held(self) -> int:
        """Bytes of the memory into which what is given is copied."""
        return sum(x.nbytes for x in self.inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The function's results for ``inputs``."""
        if not captures(inputs[0].device):
            return self.function(*inputs)
        if self.replay is None:
            self.inputs = [x.clone() for x in inputs]
            self.function(*self.inputs)  # what is made once is made
            self.replay = record_on_gpu(self._run, self.pool)
        there = [given() for given in self.given]
        new = [i for i, x in enumerate(inputs) if not (i < len(there) and there[i] is x)]
        copy_all([self.inputs[i] for i in new], [inputs[i] for i in new])
        self.given = [weakref.ref(x) for x in inputs[: self.fixed]]
        self.replay()
        return tuple(x.clone() for x in self.outputs)

    def _run(self) -> None:
        self.outputs = self.function(*self.inputs)


class Graphs:
    """``function`` of tensors alone, as a :class:`Graph` for each form of them."""

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], pool: Pool | None = None, fixed: int = 0
    ) -> None:
        self.make = functools.partial(Graph, function, pool, fixed)
        self.by_form: dict[tuple[Any, ...], Graph] = {}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The function's results for ``inputs``."""
        form = tuple((x.shape, x.dtype) for x in inputs)
        if form not in self.by_form:
            self.by_form[form] = self.make()
        return self.by_form[form](*inputs)


class CapturedRound(CompiledRound):
    """Plays rounds as :class:`specmm.compiled.CompiledRound` does, each as one graph, of which the
    host tells the device one ahead.

    The rounds after a prefill are played as they are until two are alike. Runs share the graph's
    memory, a progress's tokens and counts, too: what is to outlast the next run must be copied.
    """

    ahead = True

    def __init__(self, quiet: bool = False) -> None:
        # not the method itself, which would hold graph and memory until Python collects garbage
        played = weakref.WeakMethod(self._round)
        self.captured = Captured(lambda *given: played()(*given), quiet)  # type: ignore[misc]
        self.uniforms = 0

    def _count(self, used: int) -> None:
        """Nothing: later rounds may take more than the first, and say so themselves."""
        self.captured.begin()

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
        drawn = _Ahead(numbers, None if self.captured.recording else self.stream)
        done = one_round(parts, feedback, progress, drawn, Clock())
        parts[0].keep_round(done.drafted[1])
        self.uniforms = drawn.used  # that a row takes in every replay, too
        return done

    def _end(self, target: Any, done: Feedback) -> None:
        target.check_round()  # the graph has committed what was kept


class _Ahead(PredrawnUniforms):
    """``numbers`` [B, L] and, of a round that takes more than the one before, the next ones of
    their ``stream``. Without one, as while recording, such a round is :class:`Uncapturable`.
    """

    def __init__(self, numbers: Tensor, stream: Uniforms | None) -> None:
        super().__init__(numbers)
        self.stream = stream

    def draw(self, count: int) -> Tensor:
        if self.used + count > self.numbers.shape[1]:
            if self.stream is None:
                raise Uncapturable("a round takes more uniforms than the one before")
            self.numbers = self.stream.ahead(self.used + count)
        return super().draw(count)


def captures(device: torch.device) -> bool:
    """Whether programs on ``device`` are captured graphs."""
    return device.type == "cuda"


def prepare_programs(device: torch.device) -> None:
    """What must be before there are programs on ``device``; raises ``ValueError`` as
    :func:`specmm.compiled.prepare_compiler` does.
    """
    if not captures(device):
        prepare_compiler(device)


def round_program(device: torch.device = CPU) -> CompiledRound:
    """What plays rounds as programs on ``device``."""
    return CapturedRound() if captures(device) else CompiledRound(device)
