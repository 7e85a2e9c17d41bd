"""Finds the modules of a decoder that read and write states, and how these can be reset.

Both are found by running the model on its first prompt: the module that runs while a layer's state
is written is its mixer, and random states show which way of resetting works (see ``states``).

Shape letters: R rows, C width, T tokens.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import LinearAttentionLayer

# Scales of the inputs that a mixer is tested with: small ones hardly change the state, large ones
# reveal bounds.
SCALES = (0.05, 1.0, 16.0, -16.0)
CLOSE = 1e-3  # relative to a token's largest number

Way = Literal["window", "chunk", "steps"]


class Slot(NamedTuple):
    """The place of a state: number of the layer, kind of state, and its number in the layer."""

    layer: int
    kind: Literal["conv", "recurrent"]
    place: int


@dataclass(frozen=True)
class Mixer:
    """A module that reads and writes the states at ``slots``, and its way of resetting them."""

    module: nn.Module
    slots: tuple[Slot, ...]
    way: Way


class Call(NamedTuple):
    """Arguments of a module's call, with ``width`` tokens [1 or R, T, ...] in most tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    width: int

    def map(self, change: Callable[[Tensor], Tensor], width: int) -> Call:
        """A copy with ``change`` applied to all tensors of tokens, then of ``width`` tokens."""
        args, kwargs = map_tokens(change, self.width, (self.args, self.kwargs))
        return Call(args, kwargs, width)

    def part(self, first: int, stop: int) -> Call:
        """A copy with only the tokens from ``first`` to ``stop``."""
        return self.map(lambda x: x[:, first:stop], stop - first)

    def rows(self, which: Tensor) -> Call:
        """A copy with only the rows ``which``; tensors shared by all rows do not change."""
        return self.map(lambda x: x if len(x) == 1 else x[which], self.width)

    def run(self, module: nn.Module) -> Any:
        """The output of ``module`` for these arguments."""
        return module(*self.args, **self.kwargs)


class StateLayer(LinearAttentionLayer):
    """The states of one layer, [R, ...].

    While ``record_past`` is on, a forward does not change them but stores new states in ``made``.
    """

    def __init__(self, number_of_states: int = 1, number: int = 0) -> None:
        super().__init__(number_of_states)
        self.number = number
        self.made: dict[Slot, Tensor] = {}
        self.written: Callable[[Slot], None] | None = None  # called with each slot written

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The convolution's inputs [R, C, T], preceded by the inputs in the state."""
        slot = Slot(self.number, "conv", state_idx)
        if self.written is not None:
            self.written(slot)
        if not self.record_past:
            full: Tensor = super().update_conv_state(
                conv_states, state_idx, conv_kernel_size=conv_kernel_size, **kwargs
            )
            return full
        self.made[slot] = torch.cat([self.state(slot), conv_states], dim=-1)
        return self.made[slot]

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Take the state after a forward."""
        slot = Slot(self.number, "recurrent", state_idx)
        if self.written is not None:
            self.written(slot)
        if not self.record_past:
            updated: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
            return updated
        self.made[slot] = recurrent_states
        return recurrent_states

    def state(self, slot: Slot) -> Tensor:
        """The state at ``slot``."""
        states = self.conv_states if slot.kind == "conv" else self.recurrent_states
        state = states[slot.place]
        assert state is not None, "the prefill leaves a state"
        return state

    def put(self, slot: Slot, state: Tensor) -> None:
        """Put ``state`` at ``slot``."""
        states = self.conv_states if slot.kind == "conv" else self.recurrent_states
        states[slot.place] = state


Layers: TypeAlias = Mapping[int, StateLayer]  # by number


def read(layers: Layers, slots: Sequence[Slot]) -> list[Tensor]:
    """The states at ``slots``."""
    return [layers[slot.layer].state(slot) for slot in slots]


def write(layers: Layers, slots: Sequence[Slot], states: Sequence[Tensor]) -> None:
    """Put ``states`` at ``slots``."""
    for slot, state in zip(slots, states, strict=True):
        layers[slot.layer].put(slot, state)


def way_of(layers: Layers, module: nn.Module, slots: Sequence[Slot], call: Call) -> Way:
    """The way (see ``states``) of ``module``, called as in ``call``, with states at ``slots``."""
    if all(slot.kind == "conv" for slot in slots):
        return "window"
    return "chunk" if _continues(layers, module, slots, call) else "steps"


def _continues(layers: Layers, module: nn.Module, slots: Sequence[Slot], call: Call) -> bool:
    """Whether ``module`` gives the same results for several tokens at once as one by one.

    The test uses random states, so that a module that ignores them fails, and float32, because half
    precision would hide the effect of a bound.
    """
    last = call.part(call.width - 1, call.width).map(_float, 1)
    tokens = [last.map(partial(_scaled, by=scale), 1) for scale in SCALES]
    together = last.map(lambda x: torch.cat([_scaled(x, by) for by in SCALES], 1), len(SCALES))
    committed = read(layers, slots)
    generator = torch.Generator(committed[0].device)

    def run(mixer: nn.Module, *calls: Call) -> list[Tensor]:
        generator.manual_seed(0)
        write(layers, slots, [_noise(x, generator) for x in committed])
        outputs = [tokens_of(part.run(mixer), part.width) for part in calls]
        return [*torch.cat(outputs, dim=1).unbind(1), *read(layers, slots)]

    try:
        in_float32 = copy.deepcopy(module).float()
        pairs = zip(run(in_float32, together), run(in_float32, *tokens), strict=True)
        return all(_close(a, b) for a, b in pairs)
    except (RuntimeError, ValueError, IndexError):
        return False  # the mixer takes one token only
    finally:
        write(layers, slots, committed)


class Watch:
    """Records the modules that write states, and the arguments of their calls."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.running: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self.modules: dict[nn.Module, tuple[list[Slot], Call]] = {}
        self.thread = threading.get_ident()

    @contextmanager
    def hooks(self, decoder: nn.Module) -> Iterator[None]:
        """Context that records one run of ``decoder``."""
        handles: list[Any] = []
        for module in decoder.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        for layer in self.layers.values():
            layer.written = self._written
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in self.layers.values():
                layer.written = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self.thread:
            self.running.append((module, args, kwargs))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if threading.get_ident() == self.thread:
            self.running.pop()

    def _written(self, slot: Slot) -> None:
        """Note that the running module writes the state at ``slot``."""
        module, args, kwargs = self.running[-1]
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        call = Call(args, kwargs, first.shape[1])
        slots, _ = self.modules.setdefault(module, ([], call))
        if slot in slots:
            raise ValueError(f"its {type(module).__name__} runs more than once a forward")
        slots.append(slot)


def of_tokens(x: object, width: int) -> bool:
    """Whether ``x`` is a tensor [R, ``width``, ...]."""
    return isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == width


def map_tokens(change: Callable[[Tensor], Tensor], width: int, value: Any) -> Any:
    """``value`` with ``change`` applied to each of its tensors [R, ``width``, ...]."""
    return pytree.tree_map(lambda x: change(x) if of_tokens(x, width) else x, value)


def zipped(old: Call, new: Call, most: int, join: Callable[[Tensor, Tensor], Tensor]) -> Call:
    """``new``, with every tensor of tokens joined by ``join`` to its counterpart in ``old``."""
    args, kwargs = pytree.tree_map(
        lambda a, b: join(a, b) if of_tokens(b, new.width) else b,
        (old.args, old.kwargs),
        (new.args, new.kwargs),
    )
    return Call(args, kwargs, most + new.width)


def tokens_of(output: Any, width: int) -> Tensor:
    """The first tensor [R, ``width``, ...] of a module's ``output``."""
    states: Tensor = next(x for x in pytree.tree_leaves(output) if of_tokens(x, width))
    return states


def _float(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


def _scaled(x: Tensor, by: float) -> Tensor:
    return x * by if x.is_floating_point() else x


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return like.clone()
    return torch.empty_like(like, dtype=torch.float32).normal_(generator=generator)


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= CLOSE * float(b.abs().max())
