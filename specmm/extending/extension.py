"""``specmm.register``: gives your own drafters, rules and trees a name for every method that takes
them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar, overload

from specmm.extending.outside import OTHERS
from specmm.extending.registry import REGISTERED, Open, unknown
from specmm.methods import GENERATE, IMAGE_TOKENS
from specmm.methods.base import DRAFTERS
from specmm.shape.trees import NAMED, TREES
from specmm.verify.rule import RULES

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z][\w.+-]*")
OPEN: Mapping[str, Open[Any]] = {"drafter": OTHERS, "rule": RULES, "tree": TREES}
TAKEN = {  # names of ours
    "drafter": {*DRAFTERS, *GENERATE, *IMAGE_TOKENS, "any"},
    "rule": {*RULES.own},
    "tree": {*TREES.own, *NAMED, "sequoia"},
}


@overload
def register(kind: str, name: str) -> Callable[[T], T]: ...
@overload
def register(kind: str, name: str, thing: T) -> T: ...
def register(kind: str, name: str, thing: Any = None) -> Any:
    """Register ``thing`` as the ``kind`` ("drafter", "rule" or "tree") called ``name``; return it.

    Without a thing this is a decorator. A third-party name may be registered again, as when a
    notebook's cell is rerun. Raises ``ValueError`` for another kind, a name that specmm uses, and
    for a thing of the wrong kind: see :mod:`specmm.extending.outside`,
    :class:`specmm.verify.rule.Rule` and :data:`specmm.shape.trees.OURS`.

    >>> @specmm.register("tree", "fan")
    ... def fan(width: int, *, device="cpu"):
    ...     return TreeShape.from_parents([-1] + [0] * width, device)
    >>> pipe(prompt, drafter="block", tree="fan(4)")
    """
    if kind not in OPEN:
        raise unknown("kind of thing to register", kind, OPEN)
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ValueError(
            f"name must be of letters, digits, '-', '_', '.' and '+' after a letter, got {name!r}"
        )
    if name in TAKEN[kind]:
        raise ValueError(f"{kind} {name!r} is specmm's own; choose another name")

    def keep(given: T) -> T:
        OPEN[kind].entry(name, given)  # refuses what is none
        REGISTERED[kind][name] = given
        return given

    return keep if thing is None else keep(thing)


def load(place: str) -> None:
    """Import ``place``, a Python file or a module's name, which then registers its things.

    Raises ``ValueError`` if it does not exist or its import fails.
    """
    file = Path(place)
    if file.suffix == ".py":
        _check_name(file)
    try:
        if file.suffix != ".py":
            import_module(place)
            return
        spec = spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None, "files that end in .py have loaders"
        module = module_from_spec(spec)
        sys.modules[file.stem] = module  # as import does: dataclasses look their module up
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a file of others raises
        if file.suffix == ".py":
            sys.modules.pop(file.stem, None)
        raise ValueError(
            f"what is loaded must be a Python file or a module, got {place}: {error}"
        ) from error


def _check_name(file: Path) -> None:
    """Raise ``ValueError`` for a file that would shadow an installed module."""
    loaded = sys.modules.get(file.stem)
    if Path(getattr(loaded, "__file__", None) or "").resolve() == file.resolve():
        return  # again
    if loaded is not None or find_spec(file.stem) is not None:
        raise ValueError(
            f"the file must not be named as the installed module {file.stem}; rename it"
        )
