"""A round of the loop as one compiled program: drafting, scoring and acceptance.

For models whose steps are many small operators, where calling overhead is most of the time. It
needs ``torch.compile`` (on a CPU a C++ compiler), and takes half a minute to two for the first call
of each method, options and batch size on a machine. A drafter's trees must have the same numbers of
nodes, levels and uniforms every round; their branching may differ.
"""

from __future__ import annotations

import gc
import os
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from specmm.choose.threads import keep_threads
from specmm.core.decode import Parts, Progress, one_round, verified_round
from specmm.core.drafter import Feedback
from specmm.core.randomness import CountedUniforms, PredrawnUniforms, Streams
from specmm.core.stats import Clock
from specmm.programs import program_cache
from specmm.programs.batch_invariant import outside_batch_invariant

PROGRAMS = 64  # programs of one function, by method and batch size; PyTorch compiles no more
CPU = torch.device("cpu")
UNCOMPILED = "runs uncompiled"  # how the warning of a program that cannot be built begins
# modules of PyTorch that trace a function, build its program or load it from files
COMPILING = (
    "torch._dynamo.convert_frame",
    "torch._inductor.codecache",
    "torch._inductor.runtime",
    "triton.",
)
# PyTorch's guards that hold for all calls with the same parts: on classes, functions, attributes
SAME = {
    "TYPE_MATCH",
    "CLASS_MATCH",
    "MODULE_MATCH",
    "FUNCTION_MATCH",
    "CLOSURE_MATCH",
    "BUILTIN_MATCH",
    "ID_MATCH",
    "HASATTR",
    "NOT_PRESENT_IN_GENERIC_DICT",
    "DICT_CONTAINS",
    "DICT_NOT_CONTAINS",
}


class NotCompiled(ValueError):
    """Error: ``compiled=True`` for a call that cannot be compiled."""


class _Uncompiled(threading.local):
    """Counts the calls of each thread that ran uncompiled for want of a program."""

    calls = 0


_uncompiled = _Uncompiled()


def uncompiled_calls() -> int:
    """How often this thread has run a program's function uncompiled, because building it failed or
    ``PROGRAMS`` others existed.
    """
    return _uncompiled.calls


def count_uncompiled() -> None:
    """Count a call for :func:`uncompiled_calls`."""
    _uncompiled.calls += 1


def compiled(function: Callable[..., Any], device: torch.device = CPU) -> Program:
    """``function``, compiled as one program for each shape of its arguments.

    All calls must use the same networks, of which only the values of weights change (no other
    hooks; caches of another size only if a tensor outside of them has another shape, too), and
    objects of the same classes. PyTorch then checks tensors, numbers and flags only, and not some
    4,000 other things, which takes 1.5 ms for a transformers model of 20 layers. For a CPU
    ``device`` the calls of the program's parts are compiled as well: less time a step, twice the
    time to compile.
    """
    # what nobody holds, as targets that PyTorch has traced: it would trace their hooks, too, which
    # may go meanwhile
    gc.collect()
    # a copy, since PyTorch files programs by their code object
    code, closure = function.__code__.replace(), function.__closure__
    copied = types.FunctionType(
        code, function.__globals__, argdefs=function.__defaults__, closure=closure
    )
    keep_threads()
    copied.__kwdefaults__ = function.__kwdefaults__
    vars(copied).update(vars(function))
    options: dict[str, Any] = {"guard_filter_fn": _watched, "cpp_wrapper": device.type == "cpu"}

    def compiler(whole: bool) -> Any:
        return torch.compile(copied, fullgraph=whole, dynamic=False, options=options)

    return Program(function, compiler)


class Program:
    """``function``, built by PyTorch at its first call or found in its caches; in parts if it
    cannot be one program. ``compiler`` is PyTorch's, for a whole function or for its parts.

    If cached files are damaged or the disk is full, it is compiled in another folder; if that
    fails, too, it runs uncompiled, because compiling only saves time and must not end a run. When
    compiling fails nothing has run, so the call can start again.
    """

    def __init__(self, function: Callable[..., Any], compiler: Callable[[bool], Any]) -> None:
        self.function = function
        self.compiler = compiler
        self.run: Callable[..., Any] = compiler(True)

    def __call__(self, *args: Any) -> Any:
        """The result of ``function``."""
        try:
            return self._run(*args)
        except Exception as error:
            if not _of_compiling(error):
                raise
            program_cache.leave(error)
        try:
            return self._run(*args)
        except Exception as error:
            if not _of_compiling(error):
                raise
            why = program_cache.first_line(error)
            warnings.warn(f"{UNCOMPILED}, since compiling failed: {why}", stacklevel=2)
        self.run = self.function
        return self._run(*args)

    def _run(self, *args: Any) -> Any:
        """Run the program; in parts, or uncompiled, if PyTorch cannot compile it otherwise."""
        if self.run is self.function:
            count_uncompiled()
            return self.run(*args)
        # imported here, since it takes a second
        from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

        with outside_batch_invariant():  # PyTorch cannot compile its products
            try:
                return self.run(*args)
            except FailOnRecompileLimitHit:
                count_uncompiled()
                return self.function(*args)
            except Unsupported:
                self.run = self.compiler(False)
                return self.run(*args)


def looped(
    going: Callable[..., Tensor], play: Callable[..., tuple[Any, ...]], state: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The tensors ``state`` after repeating ``play`` while ``going(*state)``; in a program this is
    one loop. They must not share memory with other inputs of ``play``.
    """
    if torch.compiler.is_compiling():
        final: tuple[Any, ...] = while_loop(going, play, state)
        return final
    while bool(going(*state)):
        state = play(*state)
    return state


def _of_compiling(error: Exception) -> bool:
    """Whether ``error`` comes from building or loading a program, not from its computation; errors
    about files count only if PyTorch's compiler raised them.
    """
    # imported here, since it takes a second
    from torch._dynamo.exc import BackendCompilerFailed

    if isinstance(error, BackendCompilerFailed):
        return True
    frames = [frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__)]
    compiling = any(str(module.get("__name__")).startswith(COMPILING) for module in frames)
    return compiling and isinstance(error, OSError | ImportError)


def _watched(guards: Any) -> list[bool]:
    """The ``guards`` to keep: guards on inputs, and on PyTorch's own state, which have no name."""
    outside = torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
    return [
        kept and (not guard.name or not (guard.guard_type in SAME or guard.is_global))
        for guard, kept in zip(guards, outside, strict=True)
    ]


class CompiledRound:
    """Runs rounds as :func:`specmm.core.decode.one_round` does, on the same uniforms, as one
    program.

    The first round after a prefill is not compiled, because its feedback has another form. The
    clock's "verify" covers the whole program and the round's end. Keys and values are moved after
    the program, because a program would copy the whole cache. ``device`` and what all calls share
    as in :func:`compiled`.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.program = compiled(verified_round, device)
        self.uniforms = 0  # taken by a row in a round

    def __call__(
        self, parts: Parts, feedback: Feedback, progress: Progress, uniforms: Streams, clock: Clock
    ) -> Feedback:
        """See :func:`specmm.core.decode.one_round`."""
        if feedback.result is None:
            counted = CountedUniforms(uniforms)
            first = one_round(parts, feedback, progress, counted, clock)
            self.uniforms = counted.used
            return first
        if feedback.fresh is None:
            # always a tensor, so that one program serves whether or not rows have just started
            feedback.fresh = torch.zeros_like(feedback.token, dtype=torch.bool)
        drawn = _predrawn(uniforms.draw(self.uniforms))
        with clock("verify"):
            done: Feedback = self.program(parts, feedback, progress, drawn, clock)
            parts[0].commit(done.drafted[1])
        return done


def _predrawn(numbers: Tensor) -> PredrawnUniforms:
    """``numbers`` [B, L], copied out of a larger block: a view keeps the block's stride, and each
    stride would be another program.
    """
    return PredrawnUniforms(numbers.clone(memory_format=torch.contiguous_format))


def prepare_compiler(device: torch.device) -> None:
    """Let PyTorch hold a program for each method, its options and batch size, and store programs
    for later processes (:mod:`specmm.programs.program_cache`).

    Raises ``ValueError`` without a C++ compiler, which programs for a CPU need.
    """
    if device.type == "cpu":
        # imported here, since it takes a second
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            compiler = os.environ.get("CXX", "g++")
            raise NotCompiled(
                f"compiled programs need a C++ compiler, {compiler} is none: "
                "install one, or run without"
            ) from error
    program_cache.use()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, PROGRAMS)
    # only a look-up of complex numbers is left to PyTorch
    warnings.filterwarnings("ignore", "Torchinductor does not support code generation for complex")
