"""The memory of a graph: what objects keep between calls, how a call changes it, and copies.

What is kept is looked through for the places where something lies (:class:`Slot`): our own objects'
attributes, dicts and lists.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from specmm.derived import NUMBERS, PARTS, of_ours, plain

Place: TypeAlias = tuple[int, Any]
# and the caches of transformers, whose layers are ours
OURS = ("specmm.", "benchmarks.", "tests.", "transformers.cache_utils")
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


def slots_of(roots: tuple[Any, ...]) -> tuple[dict[Place, Slot], set[int]]:
    """All places in our own objects, dicts and lists that ``roots`` lead to, in order, and the ids
    of what holds them.

    Of networks only what our own ones keep beside weights and parts is looked into. What says that
    it is ``unread`` is not, nor are tuples: they are values. What a class keeps ``aside`` a graph
    does not read.
    """
    found: dict[Place, Slot] = {}
    holders: set[int] = set()
    _look(roots, found, holders, set())
    return found, holders


# no function within the other: one that calls itself would hold all that was found until Python
# collects garbage
def _look(value: Any, found: dict[Place, Slot], holders: set[int], seen: set[int]) -> None:
    if id(value) in seen or isinstance(value, Tensor):
        return
    seen.add(id(value))
    if isinstance(value, tuple):
        for item in value:
            _look(item, found, holders, seen)
        return
    holder = holder_of(value)
    if holder is None:
        return
    holders.add(id(holder))
    aside = PARTS if isinstance(value, nn.Module) else getattr(type(value), "aside", ())
    keys = range(len(holder)) if isinstance(holder, list) else list(holder)
    for key in keys:
        if key in aside:
            continue
        slot = Slot(holder, key, holder[key])
        found[slot.place] = slot
        _look(holder[key], found, holders, seen)


def holder_of(value: Any) -> Any:
    """The dict or list in which ``value`` keeps things, None if it is not for us to look into."""
    if isinstance(value, dict | list):
        return value
    ours = type(value).__module__.startswith(OURS)
    if not ours or isinstance(value, type) or getattr(type(value), "unread", False):
        return None
    return getattr(value, "__dict__", None)


def networks_of(roots: tuple[Any, ...]) -> list[nn.Module]:
    """The networks that ``roots`` lead to."""
    values = (slot.value for slot in slots_of(roots)[0].values())
    return list({id(x): x for x in (*roots, *values) if isinstance(x, nn.Module)}.values())


def addresses(networks: Iterable[nn.Module]) -> list[int]:
    """Where the weights of ``networks`` lie: a graph reads them there."""
    tensors = (x for network in networks for x in (*network.parameters(), *network.buffers()))
    return [x.data_ptr() for x in tensors]


def settings_of(networks: Iterable[nn.Module]) -> list[tuple[Any, ...]]:
    """What networks of others compute by beside weights, as far as it is seen at a glance: hooks
    that are not ours, and plain values, such as which adapter is active.
    """
    found = []
    for module in (module for network in networks for module in network.modules()):
        if type(module).__module__.startswith("specmm."):
            continue  # what ours keep is looked into
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        foreign = [id(hook) for hook in hooks if not of_ours(hook)]
        own = vars(module).items()
        found.append((foreign, repr([x for key, x in own if key not in PARTS and plain(x)])))
    return found


def same_network(new: nn.Module, old: nn.Module) -> bool:
    """Whether a graph of ``old`` does for ``new``: the weights are the same, or there are none, as
    in a table of angles that each run makes.
    """
    if addresses([new]) == addresses([old]):
        return True
    if any(True for network in (new, old) for _ in network.parameters()):
        return False
    tables = [dict(network.named_buffers()) for network in (new, old)]
    return tables[0].keys() == tables[1].keys() and all(
        torch.equal(value, tables[1][name]) for name, value in tables[0].items()
    )


def known_of(values: Iterable[Any]) -> dict[int, Any]:
    """The objects among ``values``, in which things are kept, by their ids."""
    return {id(x): x for x in values if holder_of(x) is not None}


def tensors_of(value: Any, known: Container[int]) -> Iterator[Tensor]:
    """The tensors in ``value``, but for those of objects whose ids are ``known``."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) in known:
        return
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item, known)
    elif (holder := holder_of(value)) is not None:
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
    holder = holder_of(value)
    if holder is None:
        return value
    made = {key: remade(item, others, known) for key, item in list(holder.items())}
    if isinstance(value, dict):
        return made
    other = copy.copy(value)
    vars(other).update(made)
    return other


def same(now: Any, before: Any) -> bool:
    """Whether nothing else came in the place of ``before``."""
    if now is before:
        return True
    return type(now) in NUMBERS and type(now) is type(before) and bool(now == before)


def equal(now: Any, before: Any) -> bool:
    """Whether values of no tensors are the same setting."""
    if isinstance(now, torch.device | torch.dtype | torch.Size | Enum | range | slice):
        return bool(now == before)
    return now is before


def one_to_one(moves: list[tuple[Tensor, Tensor]], passing: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether tensors that were one are one, and others are not; where each call puts other ones,
    ``passing``, those may be one that were not.
    """
    forward = {id(there): id(value) for there, value in moves + passing}
    lasting = {id(there) for there, _ in moves}
    values = [value for there, value in forward.items() if there in lasting]
    passed = {value for there, value in forward.items() if there not in lasting}
    return (
        len(values) == len(set(values))
        and passed.isdisjoint(values)
        and all(forward[id(there)] == id(value) for there, value in moves + passing)
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
            if same(now, slot.value):
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
    holder, other = holder_of(old), holder_of(new)
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
