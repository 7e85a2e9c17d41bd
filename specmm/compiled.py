"""A round of the loop as one compiled program: drafting, scoring and acceptance without an overhead
a call.

For models whose steps are many small operators, which is where that overhead is most of the time.
It needs what ``torch.compile`` needs (on a CPU a C++ compiler), half a minute to two at the first
call of a machine for each method, its options and batch size, and a drafter whose trees have one
shape and draw as many uniforms every round.
"""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specmm.decode import Parts, Progress, one_round
from specmm.drafter import Feedback
from specmm.randomness import Counted, Dealt, UniformSource
from specmm.stats import Clock
from specmm.verify.rule import VerifyResult

PROGRAMS = (
    64  # of one function, by method and batch size, before PyTorch would run the rest uncompiled
)
CPU = torch.device("cpu")
# PyTorch's names of guards on what no two calls with the same parts differ in: classes, functions,
# attributes
SAME = {
    *(
        "TYPE_MATCH",
        "CLASS_MATCH",
        "MODULE_MATCH",
        "FUNCTION_MATCH",
        "CLOSURE_MATCH",
        "BUILTIN_MATCH",
        "ID_MATCH",
    ),
    *(
        "HASATTR",
        "NOT_PRESENT_IN_GENERIC_DICT",
        "DICT_CONTAINS",
        "DICT_NOT_CONTAINS",
        "DICT_KEYS_MATCH",
    ),
}


def compiled(
    function: Callable[..., Any], same_parts: bool = False, device: torch.device = CPU
) -> Any:
    """``function`` as a program for each shape of its arguments.

    With ``same_parts`` every call must meet the same networks, unchanged but for their weights'
    values (no other hooks, caches of another size only where a tensor outside of them tells), and
    objects of the same classes: PyTorch then looks at other tensors, numbers and flags, not at some
    4,000 things besides, which takes a millisecond and a half for a transformers model of 20
    layers. Where the ``device`` is a CPU, what calls the program's parts is compiled as well: less
    time a step, twice the time to compile.
    """
    if not same_parts:
        return torch.compile(function, dynamic=False)
    own = types.FunctionType(
        function.__code__.replace(), function.__globals__
    )  # programs are filed by code
    own.__kwdefaults__, own.__defaults__ = function.__kwdefaults__, function.__defaults__
    options: dict[str, Any] = {"guard_filter_fn": _watched, "cpp_wrapper": device.type == "cpu"}
    return torch.compile(own, dynamic=False, options=options)


def _watched(guards: Any) -> list[bool]:
    """Which of PyTorch's ``guards`` to keep: those on its own state, which have no name, and on
    what may differ.
    """
    outside = torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
    return [
        kept and (not guard.name or not (guard.guard_type in SAME or guard.is_global))
        for guard, kept in zip(guards, outside, strict=True)
    ]


class DeferredStop:
    """A target's mixin: what a program leaves to its caller, who ends the round.

    A program cannot stop at logits that are not finite, and it would copy the target's whole cache
    where keys and values move. ``later`` is set while a program plays.
    """

    later = False
    extremes: Tensor

    def commit(self, result: VerifyResult) -> None:
        """As the target's own, outside programs."""
        if not self.later:
            super().commit(result)  # type: ignore[misc]  # the target's own

    def end_round(self, result: VerifyResult) -> None:
        """Commit what a program kept; raise ``ValueError`` unless the logits of its round are
        finite.
        """
        super()._count(self.extremes)  # type: ignore[misc]
        super().commit(result)  # type: ignore[misc]

    def _count(self, logits: Tensor) -> None:
        if self.later:
            self.extremes = torch.stack(logits.aminmax())
        else:
            super()._count(logits)  # type: ignore[misc]


class CompiledRound:
    """Plays rounds as :func:`specmm.decode.one_round` does, on the same uniforms, as one program.

    The first round after a prefill runs as it is, for it has less to read. The clock's "verify" is
    the whole program and the round's end, so that a run's host overhead is what is left outside
    them. A relaxed rule's excess is measured in every round, for which one program does. The target
    must have ``end_round``, as :class:`DeferredStop` has. ``same_parts`` and ``device`` as in
    :func:`compiled`.
    """

    def __init__(self, same_parts: bool = False, device: torch.device = CPU) -> None:
        self.program = compiled(one_round, same_parts, device)
        self.uniforms = 0  # uniforms of a row and round

    def __call__(
        self,
        parts: Parts,
        feedback: Feedback,
        progress: Progress,
        uniforms: UniformSource,
        clock: Clock,
        measure: bool,
    ) -> Feedback:
        """One round; see :func:`specmm.decode.one_round`. Raises ``ValueError`` where logits are
        not finite.
        """
        if feedback.result is None:
            counted = Counted(uniforms)
            first = one_round(parts, feedback, progress, counted, clock, measure)
            self.uniforms = counted.used
            return first
        if (
            feedback.fresh is None
        ):  # rows that begin anew are told by values, so that one program serves
            feedback.fresh = torch.zeros_like(feedback.token, dtype=torch.bool)
        dealt = Dealt(uniforms.draw(self.uniforms).clone())
        with clock("verify"):
            parts[0].later = True
            try:
                done = self.program(parts, feedback, progress, dealt, clock, not parts[2].exact)
            finally:
                parts[0].later = False
            parts[0].end_round(done.drafted[1])
        return done


def prepare_compiler(device: torch.device) -> None:
    """Make room for a program a method, its options and a batch size.

    Raises ``ValueError`` where there is no C++ compiler, which programs for a CPU need.
    """
    if device.type == "cpu":
        from torch._inductor.cpp_builder import (
            get_cpp_compiler,  # a second that uncompiled calls need not wait
        )

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            wanted = os.environ.get("CXX", "g++")
            raise ValueError(
                f"compiled programs need a C++ compiler, {wanted} is none: install one, or run without"
            ) from error
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, PROGRAMS)
    warnings.filterwarnings(
        "ignore", "Torchinductor does not support code generation for complex"
    )  # a look-up is left
