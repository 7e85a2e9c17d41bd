"""The released code of others, imported from a folder of the user's and left as it is.

Four things keep releases from running here, and are set aside at run time:

- they give their packages the same names (``models``, ``utils``): each is imported with its folder
  first on the path, and its modules are taken out of ``sys.modules`` afterwards;
- they call ``.cuda()``: that is the identity while they run, for both sides are timed on the CPU;
- sizes of the published models stand in their functions: ``with_constant`` exchanges one;
- modules that a picture does not need import packages that nobody needs: they are left out.

flash-attn, xformers and apex are optional in all of them and are not needed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

Modules = dict[str, ModuleType]  # of a release, by name


@dataclass(frozen=True)
class Source:
    """A release: its option here, where it is, the files that tell it, what is imported, and the
    modules of it that are left out.
    """

    name: str
    url: str
    files: tuple[str, ...]
    modules: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def load(self, folder: Path) -> Modules:
        """The modules of the clone in ``folder``; raises ``ValueError`` for any other folder."""
        missing = [file for file in self.files if not (folder / file).is_file()]
        if missing:
            raise ValueError(
                f"--{self.name} must be a clone of {self.url}, got {folder} without {missing[0]}"
            )
        try:
            return imported(folder, self.modules, self.left_out)
        except ImportError as error:
            raise ValueError(f"{self.url} must be importable, got: {error}; install it") from error


def imported(folder: Path, modules: Sequence[str], left_out: Sequence[str] = ()) -> Modules:
    """``modules`` of ``folder`` by name, imported apart from modules of the same names.

    For those ``left_out`` empty ones stand, whose names are all None. ``sys.modules`` and
    ``sys.path`` are as before afterwards, and no bytecode is written.
    """
    own = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in own}
    bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    try:
        for name in before:
            del sys.modules[name]
        sys.modules.update({name: empty(folder, name) for name in left_out})
        with running():
            return {name: importlib.import_module(name) for name in modules}
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = bytecode
        for name in [name for name in sys.modules if name.split(".")[0] in own]:
            del sys.modules[name]
        sys.modules.update(before)


def empty(folder: Path, name: str) -> ModuleType:
    """A module ``name`` of ``folder`` without its code, whose submodules can be imported."""

    def nothing(wanted: str) -> None:
        if wanted.startswith("__"):
            raise AttributeError(wanted)

    made = ModuleType(name)
    inside = folder.joinpath(*name.split("."))
    vars(made).update({"__path__": [str(inside)], "__getattr__": nothing})
    return made


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Within it ``.cuda()`` leaves tensors where they are, on a GPU's machine, too; prints are
    kept.
    """
    tensor: Any = torch.Tensor
    kept = tensor.cuda
    tensor.cuda = lambda self, *_, **__: self
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # they are older than torch here
            yield
    finally:
        tensor.cuda = kept


def with_weights(made: Any, state: Mapping[str, torch.Tensor]) -> Any:
    """Their module ``made`` with the weights of ``state``, ready to draw."""
    made.load_state_dict(state)
    return made.eval().requires_grad_(False)


def with_constant(function: Callable[..., Any], old: object, new: object) -> FunctionType:
    """A copy of ``function``, without decorators, that holds ``new`` where it holds ``old``.

    Raises ``ValueError`` unless it holds ``old`` exactly once.
    """
    plain = function
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    assert isinstance(plain, FunctionType)
    code = plain.__code__
    if code.co_consts.count(old) != 1:
        raise ValueError(
            f"{plain.__qualname__} must hold the constant {old} once, got "
            f"{code.co_consts.count(old)} of it: the release is another one than this was made for"
        )
    changed = code.replace(co_consts=tuple(new if c == old else c for c in code.co_consts))
    name = plain.__name__
    return FunctionType(changed, plain.__globals__, name, plain.__defaults__, plain.__closure__)
