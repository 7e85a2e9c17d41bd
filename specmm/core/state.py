"""The state that a run's rounds read and change, declared by the classes that hold it.

A class that takes part in rounds (a target, a drafter, their parts, a run's progress) lists in
``state`` the attributes that hold tensors: tensors, lists or dicts of them, or objects with a
``state``. A round writes to these in place, and allocates all other tensors anew. So a CUDA graph
of a round knows its memory (:mod:`specmm.programs.graphs`), and a new run's tensors can be copied
into it. Tensors in attributes listed in ``fixed`` must stay where they are, because other tensors
are views of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Slot(NamedTuple):
    """The place of a ``tensor``: ``holder[key]``, of a dict (also an object's attributes) or a
    list; ``name`` is the path to it.
    """

    name: str
    holder: Any
    key: Any
    tensor: Tensor
    fixed: bool  # must stay where it is: other tensors are views of it


def slots_of(owner: object, name: str) -> list[Slot]:
    """All tensors that ``owner``, called ``name``, declares, in order; shared tensors once."""
    return list(_slots(owner, name, set()))


def _slots(owner: object, name: str, seen: set[int]) -> Iterator[Slot]:
    """The slots of one object's declared attributes."""
    kind = type(owner)
    if id(owner) in seen:
        return
    seen.add(id(owner))
    fixed = getattr(kind, "fixed", ())
    for key in getattr(kind, "state", ()):
        value = vars(owner).get(key)
        yield from _slots_in(vars(owner), key, value, f"{name}.{key}", seen, key in fixed)


def _slots_in(
    holder: Any, key: Any, held: object, name: str, seen: set[int], fixed: bool
) -> Iterator[Slot]:
    """The slots of all tensors in ``held``, which lies at ``holder[key]``; ``fixed`` says whether
    they must stay in place. Objects declare this for their own attributes.
    """
    if isinstance(held, Tensor):
        yield Slot(name, holder, key, held, fixed)
    elif isinstance(held, list | dict):
        for k in range(len(held)) if isinstance(held, list) else held:
            yield from _slots_in(held, k, held[k], f"{name}[{k!r}]", seen, fixed)
    elif held is not None:
        yield from _slots(held, name, seen)


def with_one(x: Tensor, dim: int = 0) -> Tensor:
    """``x`` with a row of zeros appended along ``dim``."""
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim)


def without(x: Tensor, row: int, dim: int = 0) -> Tensor:
    """``x`` without ``row`` along ``dim``: the last row takes its place, in the memory of ``x``."""
    last = x.shape[dim] - 1
    if row != last:
        x.select(dim, row).copy_(x.select(dim, last))
    return x.narrow(dim, 0, last)
