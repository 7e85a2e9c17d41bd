"""States of linear attention, state spaces and convolutions, which go back to the last token kept.

Such a layer keeps no keys but a state, and a forward over a chain of drafts leaves the state after
the last of them. A *mixer* is the module that reads and writes states. Which modules these are, and
what they can do, is asked of the model at its first prompt. Three ways lead back:

* ``window``: a convolution alone. Its state is its last inputs, so those of the whole chain are
  kept and the state is cut from them.
* ``chunk``: a mixer that goes on from its state over several tokens at once. The committed states
  stay as they are; the tokens kept since go through the mixer once more, in front of the next
  chain, in the same call. Only when they are many are they run by themselves.
* ``steps``: a mixer that cannot (Mamba's scan begins with zeros), or that then computes something
  else (Zamba 2 and Nemotron-H bound their time steps, but not those of single tokens). It sees a
  chain token by token, and the states after each are kept.

Shape letters: B batch, G guidance branches, R = G·B rows, N tokens of a chain, K tokens kept since
the states, C width, W inputs of a convolution, T tokens.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import LinearAttentionLayer

from specmm.cache import branched

# Tokens of one call of a mixer. To give it those kept once more costs less than a call for them
# alone, until they are many; kernels take chunks of 64 or more at a time anyway.
MOST = 32
# Of the tokens that a mixer is asked with: small ones leave the state as it is, large ones show
# what is bounded.
SCALES = (0.05, 1.0, 16.0, -16.0)
CLOSE = 1e-3  # of a token's largest number

Way = Literal["window", "chunk", "steps"]


class Slot(NamedTuple):
    """Where a state is: the layer's number, which kind, and its number in the layer."""

    layer: int
    kind: Literal["conv", "recurrent"]
    place: int


@dataclass(frozen=True)
class Mixer:
    """A module that reads and writes the states at ``slots``, and its way back."""

    module: nn.Module
    slots: tuple[Slot, ...]
    way: Way


class Call(NamedTuple):
    """What a module was called with; ``width`` tokens [1 or R, T, ...] in most tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    width: int

    def map(self, change: Callable[[Tensor], Tensor], width: int) -> Call:
        """With every tensor of tokens changed to one of ``width`` tokens."""
        args, kwargs = _map(change, self.width, (self.args, self.kwargs))
        return Call(args, kwargs, width)

    def part(self, first: int, stop: int) -> Call:
        """Only the tokens from ``first`` to ``stop``."""
        return self.map(lambda x: x[:, first:stop], stop - first)

    def rows(self, which: Tensor) -> Call:
        """Only the rows ``which``; tensors that all rows share stay."""
        return self.map(lambda x: x if len(x) == 1 else x[which], self.width)

    def run(self, module: nn.Module) -> Any:
        """What ``module`` gives."""
        return module(*self.args, **self.kwargs)


class StateLayer(LinearAttentionLayer):
    """The states of one layer, [R, ...].

    While ``record_past`` is on, a forward leaves them alone: what it makes of them is in ``made``.
    """

    def __init__(self, number_of_states: int = 1, number: int = 0) -> None:
        super().__init__(number_of_states)
        self.number = number
        self.made: dict[Slot, Tensor] = {}
        self.written: Callable[[Slot], None] | None = None  # told where a module writes

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The inputs [R, C, T] of a convolution after those that the state holds."""
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
            kept: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
            return kept
        self.made[slot] = recurrent_states
        return recurrent_states

    def state(self, slot: Slot) -> Tensor:
        """The state at ``slot``."""
        held = self.conv_states if slot.kind == "conv" else self.recurrent_states
        found = held[slot.place]
        assert found is not None, "the prefill leaves a state"
        return found

    def put(self, slot: Slot, state: Tensor) -> None:
        """Let ``state`` be the one at ``slot``."""
        held = self.conv_states if slot.kind == "conv" else self.recurrent_states
        held[slot.place] = state


_found: WeakKeyDictionary[nn.Module, tuple[Mixer, ...]] = WeakKeyDictionary()  # by decoder


class States:
    """The states of all layers of a cache: ``layers`` are its entries that have some.

    ``decoder`` is the module whose mixers these are of, ``branches`` is G.
    """

    def __init__(
        self, decoder: nn.Module, layers: Sequence[StateLayer], rows: int, branches: int = 1
    ) -> None:
        self.decoder = decoder
        self.layers = {layer.number: layer for layer in layers}
        self.branches = branches
        self.rows = rows
        self.counts = [0] * rows  # K of each row
        self.nodes = 0  # N of the chain that waits for its commit; 0 if it needs none
        self.calls: dict[nn.Module, Call] = {}  # of chunk mixers: tokens kept, then the chain's
        self.stages: dict[nn.Module, list[list[Tensor]]] = {}  # of step mixers: states by token
        self.outputs: list[Any] = []  # of the step mixer that is running

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """All mixers; none before the first prompt."""
        return _found.get(self.decoder, ())

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """While the first forward of a prompt runs: finds the mixers of a new decoder."""
        if self.decoder in _found:
            yield
            return
        seen = _Watch(self)
        with seen.hooks(self.decoder):
            yield
        ways: dict[type[nn.Module], Way] = {}
        for module, (slots, call) in seen.modules.items():
            if type(module) not in ways:
                ways[type(module)] = self._way(module, slots, call)
        _found[self.decoder] = tuple(
            Mixer(module, tuple(slots), ways[type(module)])
            for module, (slots, _) in seen.modules.items()
        )

    def _way(self, module: nn.Module, slots: Sequence[Slot], call: Call) -> Way:
        if all(slot.kind == "conv" for slot in slots):
            return "window"
        return "chunk" if self._continues(module, slots, call) else "steps"

    def _continues(self, module: nn.Module, slots: Sequence[Slot], call: Call) -> bool:
        """Whether ``module`` does with some tokens at once what it does with one after the other.

        Its states are random numbers meanwhile, so that to ignore them makes a difference. Numbers
        are float32: half precision would hide what a bound changes.
        """
        last = call.part(call.width - 1, call.width).map(_float, 1)
        tokens = [last.map(partial(_scaled, by=scale), 1) for scale in SCALES]
        together = last.map(lambda x: torch.cat([_scaled(x, by) for by in SCALES], 1), len(SCALES))
        committed = self._read(slots)
        generator = torch.Generator(committed[0].device)

        def run(own: nn.Module, *calls: Call) -> list[Tensor]:
            generator.manual_seed(0)
            self._write(slots, [_noise(x, generator) for x in committed])
            outputs = [_tokens(part.run(own), part.width) for part in calls]
            return [*torch.cat(outputs, dim=1).unbind(1), *self._read(slots)]

        try:
            own = copy.deepcopy(module).float()
            pairs = zip(run(own, together), run(own, *tokens), strict=True)
            return all(_close(a, b) for a, b in pairs)
        except (RuntimeError, ValueError, IndexError):
            return False  # it takes one token only
        finally:
            self._write(slots, committed)

    def _read(self, slots: Sequence[Slot]) -> list[Tensor]:
        return [self.layers[slot.layer].state(slot) for slot in slots]

    def _write(self, slots: Sequence[Slot], states: Sequence[Tensor]) -> None:
        for slot, state in zip(slots, states, strict=True):
            self.layers[slot.layer].put(slot, state)

    def _record(self, on: bool, layers: Iterable[int] | None = None) -> None:
        for number in self.layers if layers is None else layers:
            self.layers[number].record_past = on

    @contextmanager
    def chain(self, nodes: int, past: TransformersCache) -> Iterator[None]:
        """While a chain of ``nodes`` is scored with ``past``, a cache of these layers."""
        if max(self.counts) + nodes > MOST:
            self.settle()
        self.nodes = nodes if nodes > 1 or max(self.counts) else 0
        if not self.nodes:  # one token, which is always kept: plain decoding's fast path
            yield
            return
        self._record(True)
        handles = [handle for mixer in self.mixers for handle in self._hook(mixer, past)]
        try:
            with self._short_chunks():
                yield
        finally:
            self._record(False)
            for handle in handles:
                handle.remove()

    @contextmanager
    def _short_chunks(self) -> Iterator[None]:
        """While few tokens run: PyTorch's versions of Mamba 2's kernels pad them to a chunk of up
        to 256, whose work grows with its square. Which chunks a text is cut in changes nothing.
        """
        modules = [mixer.module for mixer in self.mixers if mixer.way == "chunk"]
        sizes = {module: getattr(module, "chunk_size", 0) for module in modules}
        long = {module: size for module, size in sizes.items() if size > MOST}
        if not long or self._read(self.mixers[0].slots)[0].device.type != "cpu":
            yield
            return
        for module in long:
            setattr(module, "chunk_size", MOST)  # noqa: B010
        try:
            yield
        finally:
            for module, size in long.items():
                setattr(module, "chunk_size", size)  # noqa: B010

    def _hook(self, mixer: Mixer, past: TransformersCache) -> list[Any]:
        ways = {"chunk": (self._joined, self._new_only), "steps": (self._first_steps, self._last)}
        if mixer.way not in ways:
            return []
        before, after = ways[mixer.way]

        def ours(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            return any(value is past for value in (*args, *kwargs.values()))

        def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not ours(args, kwargs):  # another thread's forward of the same model
                return None
            call = before(mixer, Call(args, kwargs, self.nodes))
            return call.args, call.kwargs

        def post(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            return after(mixer, output) if ours(args, kwargs) else None

        return [
            mixer.module.register_forward_pre_hook(pre, with_kwargs=True),
            mixer.module.register_forward_hook(post, with_kwargs=True),
        ]

    # a mixer that goes on from its state over several tokens at once

    def _joined(self, mixer: Mixer, call: Call) -> Call:
        """Each row's tokens kept since the committed states, and after them the chain's."""
        most = max(self.counts)
        joined = call
        if most:
            before = self.calls[mixer.module]
            joined = _zipped(before, call, most, lambda old, new: self._row_by_row(old, new, most))
        self.calls[mixer.module] = joined
        return joined

    def _row_by_row(self, old: Tensor, new: Tensor, most: int) -> Tensor:
        """``old`` [R, T, ...] up to each row's count, then ``new`` [R, N, ...]."""
        if min(self.counts) == most:
            return torch.cat([old[:, :most], new], dim=1)
        rows = max(len(old), len(new), self.rows)
        old = old[:, :most].expand(rows, *[-1] * (old.ndim - 1))
        new = new.expand(rows, *[-1] * (new.ndim - 1))
        joined = torch.cat([old, torch.zeros_like(new)], dim=1)
        return joined.scatter(1, self._places(new), new)

    def _places(self, like: Tensor) -> Tensor:
        """Where the chain's tokens are among all, in the shape of ``like`` [R, N, ...]."""
        first = torch.tensor(self.counts, device=like.device)[:, None]
        places = first + torch.arange(self.nodes, device=like.device)
        return places.view(*places.shape, *[1] * (like.ndim - 2)).expand_as(like)

    def _new_only(self, mixer: Mixer, output: Any) -> Any:
        """Of ``output`` the chain's tokens."""
        most = max(self.counts)
        if not most:
            return None

        def new(x: Tensor) -> Tensor:
            if min(self.counts) == most:
                return x[:, most:]
            return x.gather(1, self._places(x[:, : self.nodes]))

        return _map(new, most + self.nodes, output)

    # a mixer that takes one token at a time

    def _first_steps(self, mixer: Mixer, call: Call) -> Call:
        """Run all tokens but the last; what remains to be called."""
        self._record(False, {slot.layer for slot in mixer.slots})
        states = [[state.clone() for state in self._read(mixer.slots)]]
        self.outputs = []
        for token in range(call.width - 1):
            part = call.part(token, token + 1)
            self.outputs.append(mixer.module.forward(*part.args, **part.kwargs))
            states.append([state.clone() for state in self._read(mixer.slots)])
        self.stages[mixer.module] = states
        return call.part(call.width - 1, call.width)

    def _last(self, mixer: Mixer, output: Any) -> Any:
        """The outputs of all tokens as one."""
        self.stages[mixer.module].append([state.clone() for state in self._read(mixer.slots)])
        self._record(True, {slot.layer for slot in mixer.slots})
        outputs = [*self.outputs, output]
        return pytree.tree_map(
            lambda *parts: torch.cat(parts, dim=1) if _of_tokens(parts[0], 1) else parts[-1],
            *outputs,
        )

    # after the round

    def commit(self, kept: Tensor) -> None:
        """Let the states be those after the first ``kept`` [B] tokens of the chain."""
        if not self.nodes:
            return
        kept = branched(kept, self.branches)
        for mixer in self.mixers:
            if mixer.way == "window":
                self._cut(mixer, kept)
            elif mixer.way == "steps":
                self._choose(mixer, kept)
        chunks = [mixer for mixer in self.mixers if mixer.way == "chunk"]
        if chunks:
            self._put_off(chunks, kept.tolist())
        self.nodes = 0

    def _put_off(self, mixers: Sequence[Mixer], kept: list[int]) -> None:
        """Count the tokens that ``mixers`` are to be given once more; none if the states after the
        chain's last token are the ones wanted.
        """
        uneven = min(self.counts) != max(self.counts)
        if uneven or any(n != self.nodes for n in kept):
            self.counts = [old + new for old, new in zip(self.counts, kept, strict=True)]
            return
        for mixer in mixers:
            self._take_made(mixer)
        self.counts = [0] * self.rows

    def _cut(self, mixer: Mixer, kept: Tensor) -> None:
        for slot in mixer.slots:
            layer = self.layers[slot.layer]
            full = layer.made[slot]  # [R, C, W + N]
            size = layer.state(slot).shape[-1]
            where = kept[:, None] + torch.arange(size, device=kept.device)  # [R, W]
            layer.put(slot, full.gather(-1, where[:, None].expand(-1, full.shape[1], -1)))

    def _choose(self, mixer: Mixer, kept: Tensor) -> None:
        stages = self.stages.pop(mixer.module)
        rows = torch.arange(len(kept), device=kept.device)
        states = [torch.stack(stage)[kept, rows] for stage in zip(*stages, strict=True)]
        self._write(mixer.slots, states)

    def _take_made(self, mixer: Mixer) -> None:
        for slot in mixer.slots:
            layer = self.layers[slot.layer]
            size = layer.state(slot).shape[-1]
            made = layer.made[slot]
            layer.put(slot, made[..., -size:].contiguous() if slot.kind == "conv" else made)

    def settle(self) -> None:
        """Bring the committed states to the last token kept, rows of one count at a time."""
        groups = sorted({count for count in self.counts if count})
        with self._short_chunks():
            for count in groups:
                which = [row for row, n in enumerate(self.counts) if n == count]
                for mixer in self.mixers:
                    if mixer.way == "chunk":
                        self._replay(mixer, which, count)
        self.counts = [0] * self.rows

    def _replay(self, mixer: Mixer, which: list[int], count: int) -> None:
        """Run the first ``count`` tokens of the rows ``which`` through the mixer."""
        call = self.calls[mixer.module].part(0, count)
        whole = self._read(mixer.slots)
        if len(which) == self.rows:
            call.run(mixer.module)
            return
        rows = torch.tensor(which, device=whole[0].device)
        self._write(mixer.slots, [state[rows] for state in whole])
        call.rows(rows).run(mixer.module)
        for state, part in zip(whole, self._read(mixer.slots), strict=True):
            state[rows] = part.to(state.dtype)
        self._write(mixer.slots, whole)

    def take(self, row: int, other: States) -> None:
        """Let ``row``'s states be those of the only sample of ``other``."""
        batch = self.rows // self.branches
        for mixer in self.mixers:
            slots = mixer.slots
            for mine, new in zip(self._read(slots), other._read(slots), strict=True):
                mine[row::batch] = new
        for place in range(row, self.rows, batch):
            self.counts[place] = 0


class _Watch:
    """Which modules write states, and what they were called with."""

    def __init__(self, states: States) -> None:
        self.states = states
        self.running: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self.modules: dict[nn.Module, tuple[list[Slot], Call]] = {}
        self.thread = threading.get_ident()

    @contextmanager
    def hooks(self, decoder: nn.Module) -> Iterator[None]:
        """While ``decoder`` runs once."""
        handles: list[Any] = []
        for module in decoder.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        for layer in self.states.layers.values():
            layer.written = self._written
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in self.states.layers.values():
                layer.written = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self.thread:
            self.running.append((module, args, kwargs))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if threading.get_ident() == self.thread:
            self.running.pop()

    def _written(self, slot: Slot) -> None:
        module, args, kwargs = self.running[-1]
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        call = Call(args, kwargs, first.shape[1])
        slots, _ = self.modules.setdefault(module, ([], call))
        if slot in slots:
            raise ValueError(f"its {type(module).__name__} runs more than once a forward")
        slots.append(slot)


def _of_tokens(x: object, width: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == width


def _map(change: Callable[[Tensor], Tensor], width: int, value: Any) -> Any:
    """``value`` with each of its tensors [R, ``width``, ...] changed."""
    return pytree.tree_map(lambda x: change(x) if _of_tokens(x, width) else x, value)


def _zipped(old: Call, new: Call, most: int, join: Callable[[Tensor, Tensor], Tensor]) -> Call:
    """``new`` with its tensors of tokens joined to those of ``old``."""
    args, kwargs = pytree.tree_map(
        lambda a, b: join(a, b) if _of_tokens(b, new.width) else b,
        (old.args, old.kwargs),
        (new.args, new.kwargs),
    )
    return Call(args, kwargs, most + new.width)


def _tokens(output: Any, width: int) -> Tensor:
    """The first tensor [R, ``width``, ...] of a module's ``output``."""
    found: Tensor = next(x for x in pytree.tree_leaves(output) if _of_tokens(x, width))
    return found


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
