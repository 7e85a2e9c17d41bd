"""CUDA graphs: of a round of decoding, and of functions of tensors.

A graph runs no Python; it reads and writes the memory that it was recorded on.

A round's memory is the state that target, drafter and progress declare (:mod:`specmm.core.state`),
with the graph's own feedback and uniforms. A round ends by writing the next round's inputs to the
memory from which it read its own.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from specmm.core.decode import Parts, Play, Progress, one_round
from specmm.core.drafter import Feedback
from specmm.core.randomness import CountedUniforms, PredrawnUniforms, Streams
from specmm.core.state import Slot, slots_of
from specmm.core.stats import Clock
from specmm.programs.compiled import CPU, CompiledRound, count_uncompiled, prepare_compiler

Pool: TypeAlias = Any  # a handle of PyTorch
TRIES = 6  # rounds that may be unlike the one before, or fail to be recorded, until none is tried


class NotRecorded(Exception):
    """Error: a round that cannot be recorded as a graph."""


def record_on_gpu(function: Callable[[], None], pool: Pool | None = None) -> Callable[[], None]:
    """Record ``function`` without running it; returns the function that replays it on the GPU. See
    :func:`shared_pool` for ``pool``.

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
    """Memory for the intermediate results of graphs that are only replayed one after another."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


@functools.cache
def _side(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _forms(tensors: Iterable[Tensor]) -> list[Any]:
    return [(x.shape, x.dtype, x.device) for x in tensors]


def copy_all(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy ``values`` to tensors of the same shapes and dtypes, in one launch for each dtype."""
    for dtype in {x.dtype for x in into}:
        like = [i for i, x in enumerate(into) if x.dtype == dtype]
        torch._foreach_copy_([into[i] for i in like], [values[i] for i in like])


class RecordedRound:
    """The recorded round after ``feedback``, for every run with rounds like it.

    Raises :class:`NotRecorded`, or errors of recording.
    """

    def __init__(
        self, parts: Parts, feedback: Feedback, progress: Progress, numbers: Tensor
    ) -> None:
        self.parts = parts
        self.progress = progress
        self.slots = _state(parts, progress)
        self.given = {name: x.clone() for name, x in feedback.tensors().items()}
        self.feedback = feedback.held(self.given)
        self.shape = feedback.drafted[0].shape
        self.numbers = numbers.clone()
        self.replay = record_on_gpu(self._round)
        for slot, now in zip(self.slots, _state(parts, progress), strict=True):
            if now.tensor is not slot.tensor:
                raise NotRecorded(f"a round replaced the tensor {slot.name}")

    def _round(self) -> None:
        """A round that writes its results where it read the previous round's results."""
        drawn = PredrawnUniforms(self.numbers)
        done = one_round(self.parts, self.feedback, self.progress, drawn, Clock())
        if drawn.used != self.numbers.shape[1]:
            raise NotRecorded("rounds take different numbers of uniforms")
        shape = done.drafted[0].shape
        done.fresh = torch.zeros_like(self.given["fresh"])
        tensors = done.tensors()
        same = shape is self.shape or not (shape.fixed or self.shape.fixed)
        if not same or list(tensors) != list(self.given):
            raise NotRecorded("rounds have trees of different kinds")
        memory = {x.untyped_storage().data_ptr() for x in self.given.values()}
        for name, x in tensors.items():
            if x.shape != self.given[name].shape:
                raise NotRecorded(f"{name} changes its shape from round to round")
            if x.untyped_storage().data_ptr() in memory:  # another's place may be written first
                tensors[name] = x.clone()
        copy_all(list(self.given.values()), list(tensors.values()))
        self.done = done

    def serves(self, parts: Parts, feedback: Feedback, progress: Progress) -> bool:
        """Whether the round after ``feedback`` is like the recorded one; if so, its inputs are
        copied into the graph's memory.
        """
        tensors = feedback.tensors()
        now = _state(parts, progress)
        if list(tensors) != list(self.given) or len(now) != len(self.slots):
            return False
        if _forms(tensors.values()) != _forms(self.given.values()):
            return False
        moved = [(a, b) for a, b in zip(self.slots, now, strict=True) if a.tensor is not b.tensor]
        if any(a.name != b.name or b.fixed for a, b in moved):
            return False
        if _forms(a.tensor for a, _ in moved) != _forms(b.tensor for _, b in moved):
            return False
        for there, slot in moved:
            there.tensor.copy_(slot.tensor)
            slot.holder[slot.key] = there.tensor
        new = [name for name, x in tensors.items() if x is not self.given[name]]
        copy_all([self.given[name] for name in new], [tensors[name] for name in new])
        self.slots = [b._replace(tensor=a.tensor) for a, b in zip(self.slots, now, strict=True)]
        return True

    def play(self, uniforms: Streams) -> Feedback:
        """Replay the round; its feedback is overwritten by the next round's."""
        self.numbers.copy_(uniforms.draw(self.numbers.shape[1]))
        self.replay()
        return self.done.held(self.given)


def _state(parts: Parts, progress: Progress) -> list[Slot]:
    target, drafter, _ = parts
    named = {"target": target, "drafter": drafter, "progress": progress}
    return [slot for name, part in named.items() for slot in slots_of(part, name)]


class GraphRound:
    """Runs rounds as :func:`specmm.core.decode.one_round` does, each as one CUDA graph, which the
    host launches before it has read the last round's result.

    The rounds after a prefill run without a graph until two rounds have the same form. Runs share
    the graph's memory, including a progress's tokens and counts: copy what must outlast the next
    run. A round that cannot be recorded runs without a graph, with a warning unless ``quiet``.
    """

    ahead = True

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.recorded: RecordedRound | None = None
        self.failed = False  # recording was given up
        self.tries = 0  # to record, since a prefill or a replay
        self.last: object = None  # the form of the round before
        self.uniforms = 0  # taken by a row in it

    def __call__(
        self, parts: Parts, feedback: Feedback, progress: Progress, uniforms: Streams, clock: Clock
    ) -> Feedback:
        """See :func:`specmm.core.decode.one_round`."""
        if feedback.result is None:
            self.tries, self.last = 0, None
            return self._uncaptured(parts, feedback, progress, uniforms, clock)
        if self.failed:
            count_uncompiled()
            return self._uncaptured(parts, feedback, progress, uniforms, clock)
        if feedback.fresh is None:
            feedback.fresh = torch.zeros_like(feedback.token, dtype=torch.bool)
        with clock("verify"):
            recorded = self.recorded
            if recorded is None or not recorded.serves(parts, feedback, progress):
                recorded = self._try_to_record(parts, feedback, progress, uniforms)
            if recorded is not None:
                self.recorded = recorded
                self.tries = 0
                return recorded.play(uniforms)
        return self._uncaptured(parts, feedback, progress, uniforms, clock)

    def _uncaptured(
        self, parts: Parts, feedback: Feedback, progress: Progress, uniforms: Streams, clock: Clock
    ) -> Feedback:
        counted = CountedUniforms(uniforms)
        done = one_round(parts, feedback, progress, counted, clock)
        self.uniforms = counted.used
        return done

    def _try_to_record(
        self, parts: Parts, feedback: Feedback, progress: Progress, uniforms: Streams
    ) -> RecordedRound | None:
        """The recorded round, if it has the same form as the previous round."""
        tensors = feedback.tensors()
        places = [(id(slot.tensor), slot.name) for slot in _state(parts, progress)]
        form = places, list(tensors), _forms(tensors.values())
        alike, self.last = form == self.last, form
        self.tries += 1
        why = "its rounds are not alike"
        if alike:
            numbers = uniforms.ahead(self.uniforms)
            try:
                return RecordedRound(parts, feedback, progress, numbers)
            except (NotRecorded, RuntimeError) as error:
                why = str(error).split("\n")[0]
        self.failed = self.tries >= TRIES
        if self.failed and not self.quiet:
            warnings.warn(f"runs uncompiled, since it cannot be captured: {why}", stacklevel=5)
        return None


class Graph:
    """A ``function`` of only tensors, recorded at its first call and replayed for the same shapes.

    Without a GPU the function is simply called. Results are copies. ``pool`` is another graph's
    memory.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], pool: Pool | None = None
    ) -> None:
        self.function = function
        self.pool = pool
        self.inputs: list[Tensor] = []
        self.replay: Callable[[], None] | None = None

    @property
    def held(self) -> int:
        """Bytes of the memory into which inputs are copied."""
        return sum(x.nbytes for x in self.inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The function's results for ``inputs``."""
        if not captures(inputs[0].device):
            return self.function(*inputs)
        if self.replay is None:
            self.inputs = [x.clone() for x in inputs]
            self.function(*self.inputs)  # makes everything that is made once
            self.replay = record_on_gpu(self._run, self.pool)
        else:
            copy_all(self.inputs, list(inputs))
        self.replay()
        return tuple(x.clone() for x in self.outputs)

    def _run(self) -> None:
        self.outputs = self.function(*self.inputs)


class Graphs:
    """A ``function`` of only tensors, with a :class:`Graph` for each form of its arguments."""

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], pool: Pool | None = None
    ) -> None:
        self.make = functools.partial(Graph, function, pool)
        self.by_form: dict[tuple[Any, ...], Graph] = {}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The function's results for ``inputs``."""
        form = tuple((x.shape, x.dtype) for x in inputs)
        if form not in self.by_form:
            self.by_form[form] = self.make()
        return self.by_form[form](*inputs)


def captures(device: torch.device) -> bool:
    """Whether programs on ``device`` are CUDA graphs."""
    return device.type == "cuda"


def prepare_programs(device: torch.device) -> None:
    """Prepare for programs on ``device``; raises ``ValueError`` as
    :func:`specmm.programs.compiled.prepare_compiler` does.
    """
    if not captures(device):
        prepare_compiler(device)


def round_program(device: torch.device = CPU) -> Play:
    """The function that runs rounds as programs on ``device``."""
    return GraphRound() if captures(device) else CompiledRound(device)
