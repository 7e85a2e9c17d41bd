"""``specmm.register``: drafters, rules and trees of one's own by name, in every method that takes
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from specmm.methods import GENERATE, IMAGE_TOKENS
from specmm.methods.base import DRAFTERS
from specmm.outside import OTHERS
from specmm.registry import REGISTERED, Open, unknown
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
    """Make ``thing`` the ``kind`` ("drafter", "rule" or "tree") called ``name``, and return it.

    Without a thing this decorates what follows. A name of one's own may be given anew, as when a
    cell of a notebook is run again. Raises ``ValueError`` for another kind, a name of specmm's, and
    for what is no such thing: see :mod:`specmm.outside`, :class:`specmm.verify.rule.Rule` and
    :data:`specmm.shape.trees.OURS`.

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
