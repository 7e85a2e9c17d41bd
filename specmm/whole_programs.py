"""Compiled programs in files of their own: a later process loads them, and traces nothing.

They lie in the folder in which PyTorch keeps what they are built of (:mod:`specmm.program_cache`).
A file's name tells the function, the machine, the settings and what a call is made of
(:class:`specmm.fingerprint.Fingerprint`). In it are digests of all code that was traced, and
PyTorch's guards on numbers and tensors. What does not fit in all of these is not run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specmm import program_cache
from specmm.files import write_whole
from specmm.fingerprint import Fingerprint, code_of

MOST = 8  # files of the same parts that are tried: those differ in numbers and shapes
ENVIRONMENT = ("ATEN_", "SPECMM_", "TRITON_")  # variables that may choose other operators


class WholeProgram:
    """A function for one kind of arguments as PyTorch's ahead-of-time compiler ``made`` it."""

    def __init__(self, made: Any) -> None:
        self.made = made
        made.disable_guard_check()  # :meth:`fits` is asked before
        self.fits: Callable[..., bool] = made.guard_check
        self.run: Callable[..., Any] = made

    @classmethod
    def load(cls, data: bytes, names: dict[str, Any]) -> WholeProgram:
        """That of ``data``, of a function with the globals ``names``."""
        # imported here, since it takes a moment
        from torch._dynamo.aot_compile import AOTCompiledFunction

        with _no_order_of_networks():
            return cls(AOTCompiledFunction.deserialize(data, names))

    @property
    def data(self) -> bytes:
        """For :meth:`load`."""
        found: bytes = type(self.made).serialize(self.made).serialized_data
        return found

    @property
    def modules(self) -> set[str]:
        """Whose code was traced, but for PyTorch's, which is known by its version."""
        sources = self.made.source_info().inlined_sources
        return {x.module for x in sources if x.module.partition(".")[0] != "torch"}


class ProgramFile:
    """Where the program of ``function`` for ``args`` lies, or is to lie; ``folder`` may be None."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        used = program_cache.used()
        self.folder = None if used is None else used / "whole"
        if self.folder is not None:
            found = Fingerprint([function, *_surroundings()], args)
            self.parts, self.name = found.parts, f"{found.parts}-{found.numbers}"

    def load(self) -> WholeProgram | None:
        """The program kept by an earlier process that fits, None where there is none."""
        if self.folder is None:
            return None
        others = sorted(self.folder.glob(f"{self.parts}-*"), key=os.path.getmtime, reverse=True)
        for file in sorted(others[:MOST], key=lambda file: file.name != self.name):
            found = self._tried(file)
            if found is not None and found.fits(*self.args):
                return found
        return None

    def save(self, program: WholeProgram) -> None:
        """Keep ``program`` for later processes, where that is possible."""
        if self.folder is None or (data := self._checked(program)) is None:
            return
        data = json.dumps(code_of(program.modules)).encode() + b"\n" + data
        try:
            self.folder.mkdir(exist_ok=True)
            write_whole(self.folder / self.name, _digest(data) + b"\n" + data)
        except OSError as error:
            program_cache.warn(str(error))

    def _checked(self, program: WholeProgram) -> bytes | None:
        """``program`` as a file's content; None where PyTorch cannot write it or read it again, so
        that later processes trace it, too.
        """
        try:
            data = program.data
            again = WholeProgram.load(data, self.function.__globals__)
        except Exception:  # of any kind: it depends on what the function was given
            return None
        return data if again.fits(*self.args) else None

    def _tried(self, file: Path) -> WholeProgram | None:
        """That of ``file``; another folder serves this process where what it is built of fails."""
        try:
            return self._read(file)
        except Exception as error:  # of any kind: PyTorch runs what lies beside the file
            program_cache.leave(error)
            return None

    def _read(self, file: Path) -> WholeProgram | None:
        """What ``file`` holds, unless it is damaged or made of other code."""
        digest, _, data = file.read_bytes().partition(b"\n")
        if _digest(data) != digest:
            program_cache.warn(f"{file} is damaged")
            return None
        text, _, program = data.partition(b"\n")
        code = json.loads(text)
        try:
            if code_of(code) != code:
                return None
        except ImportError:
            return None
        return WholeProgram.load(program, self.function.__globals__)


@contextmanager
def _no_order_of_networks() -> Iterator[None]:
    """Within this block PyTorch loads guards without the dictionaries in networks that were gone
    through: they are not in the file where no guard is on them, and PyTorch would look for them.
    """
    from torch._dynamo import package

    whole = package.load_guards_state

    def load(guards_state: bytes) -> Any:
        state = whole(guards_state)
        found = state.output_graph.guard_on_key_order
        state.output_graph.guard_on_key_order = {
            x for x in found if not x.guard_source.is_unspecialized_nn_module()
        }
        return state

    package.load_guards_state = load
    try:
        yield
    finally:
        package.load_guards_state = whole


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _surroundings() -> list[object]:
    """What else decides how a program is built, or whether it can run."""
    # imported here, since it takes a second
    import torch._functorch.config
    import torch._inductor.config

    own = {k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT)}
    own.pop("SPECMM_PROGRAMS", None)
    return [
        program_cache.machine(),
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch._inductor.config.save_config_portable(),
        torch._functorch.config.save_config_portable(),
        own,
    ]
