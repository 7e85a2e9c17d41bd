"""Resets the states of linear attention, state spaces and convolutions to the last accepted token.

Such a layer has a state instead of keys, and a forward over a chain of drafts leaves the state
after the last draft. A *mixer* is the module that reads and writes states; ``mixers`` finds the
mixers and how to reset their states, in one of three ways:

* ``window``: a mixer that is a convolution. Its state is its last inputs, so the inputs of the
  whole chain are stored and the state is cut from them.
* ``chunk``: a mixer that can continue from its state over several tokens at once. The committed
  states do not change; tokens accepted since go through the mixer once more, in front of the next
  chain, in the same call. Only when they are many are they run separately.
* ``steps``: a mixer that cannot (Mamba's scan begins with zeros), or that then computes something
  else (Zamba 2 and Nemotron-H bound their time steps, but not for single tokens). It reads a chain
  token by token, and the state after each is stored.

Shape letters: B batch, G guidance branches, R = G·B rows, N tokens of a chain, K tokens accepted
since the states, C width, W inputs of a convolution, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache as TransformersCache

from specmm.core.cache import branched
from specmm.core.derived import facts
from specmm.core.state import with_one, without
from specmm.hf.models.mixers import (
    Call,
    Mixer,
    StateLayer,
    Watch,
    Way,
    map_tokens,
    of_tokens,
    read,
    way_of,
    write,
    zipped,
)

# Tokens of one call of a mixer. To give it those kept once more costs less than a call for them
# alone, until they are many; kernels take chunks of 64 or more at a time anyway.
MOST = 32
MIXERS = "mixers"  # the name of a fact about a decoder


class States:
    """The states of all layers of a cache; ``layers`` are its entries with states.

    ``decoder`` is the module whose mixers these are of, ``branches`` is G.
    """

    def __init__(
        self, decoder: nn.Module, layers: Sequence[StateLayer], rows: int, branches: int = 1
    ) -> None:
        self.decoder = decoder
        self.layers = {layer.number: layer for layer in layers}
        self.branches = branches
        self.rows = rows
        self.mixers: tuple[Mixer, ...] = ()  # all of them, from the first prompt on
        self.counts = [0] * rows  # K of each row
        self.nodes = 0  # N of the chain that waits for its commit; 0 if it needs none
        self.calls: dict[nn.Module, Call] = {}  # chunk mixers: accepted tokens, then the chain's
        self.stages: dict[nn.Module, list[list[Tensor]]] = {}  # step mixers: states by token
        self.outputs: list[Any] = []  # the running step mixer's

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Context for a prompt's first forward, which finds the mixers of a new decoder."""
        cached = facts(self.decoder)
        if MIXERS in cached:
            self.mixers = cached[MIXERS]
            yield
            return
        watch = Watch(self.layers)
        with watch.hooks(self.decoder):
            yield
        ways: dict[type[nn.Module], Way] = {}
        for module, (slots, call) in watch.modules.items():
            if type(module) not in ways:
                ways[type(module)] = way_of(self.layers, module, slots, call)
        self.mixers = cached[MIXERS] = tuple(
            Mixer(module, tuple(slots), ways[type(module)])
            for module, (slots, _) in watch.modules.items()
        )

    def _record(self, on: bool, layers: Iterable[int] | None = None) -> None:
        for number in self.layers if layers is None else layers:
            self.layers[number].record_past = on

    @contextmanager
    def chain(self, nodes: int, past: TransformersCache) -> Iterator[None]:
        """Context for scoring a chain of ``nodes`` with ``past``, a cache of these layers."""
        if max(self.counts) + nodes > MOST:
            self.settle()
        self.nodes = nodes if nodes > 1 or max(self.counts) else 0
        if not self.nodes:  # one token, which is always accepted: plain decoding's fast path
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
        """Context for runs of few tokens, with smaller chunks: PyTorch's versions of Mamba 2's
        kernels pad to a chunk of up to 256, whose work grows with its square. Chunks do not change
        results.
        """
        modules = [mixer.module for mixer in self.mixers if mixer.way == "chunk"]
        sizes = {module: getattr(module, "chunk_size", 0) for module in modules}
        long = {module: size for module, size in sizes.items() if size > MOST}
        if not long or read(self.layers, self.mixers[0].slots)[0].device.type != "cpu":
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
        """Hooks that give ``mixer`` a chain in its way in forwards with the cache ``past``."""
        ways = {"chunk": (self._joined, self._new_only), "steps": (self._first_steps, self._output)}
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

    # way "chunk"

    def _joined(self, mixer: Mixer, call: Call) -> Call:
        """Each row's tokens accepted since the committed states, followed by the chain's tokens."""
        count = max(self.counts)
        joined = call
        if count:
            before = self.calls[mixer.module]
            joined = zipped(before, call, count, lambda old, new: self._row_by_row(old, new, count))
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
        """Places of the chain's tokens among all tokens, in the shape of ``like`` [R, N, ...]."""
        first = torch.tensor(self.counts, device=like.device)[:, None]
        places = first + torch.arange(self.nodes, device=like.device)
        return places.view(*places.shape, *[1] * (like.ndim - 2)).expand_as(like)

    def _new_only(self, mixer: Mixer, output: Any) -> Any:
        """The part of ``output`` for the chain's tokens."""
        count = max(self.counts)
        if not count:
            return None

        def new(x: Tensor) -> Tensor:
            if min(self.counts) == count:
                return x[:, count:]
            return x.gather(1, self._places(x[:, : self.nodes]))

        return map_tokens(new, count + self.nodes, output)

    # a mixer that takes one token at a time

    def _first_steps(self, mixer: Mixer, call: Call) -> Call:
        """Run all tokens but the last; returns the call for the last."""
        self._record(False, {slot.layer for slot in mixer.slots})
        states = [[state.clone() for state in read(self.layers, mixer.slots)]]
        self.outputs = []
        for token in range(call.width - 1):
            part = call.part(token, token + 1)
            self.outputs.append(mixer.module.forward(*part.args, **part.kwargs))
            states.append([state.clone() for state in read(self.layers, mixer.slots)])
        self.stages[mixer.module] = states
        return call.part(call.width - 1, call.width)

    def _output(self, mixer: Mixer, output: Any) -> Any:
        """The outputs of all tokens as one."""
        self.stages[mixer.module].append(
            [state.clone() for state in read(self.layers, mixer.slots)]
        )
        self._record(True, {slot.layer for slot in mixer.slots})
        outputs = [*self.outputs, output]
        return pytree.tree_map(
            lambda *parts: torch.cat(parts, dim=1) if of_tokens(parts[0], 1) else parts[-1],
            *outputs,
        )

    # after the round

    def commit(self, kept: Tensor) -> None:
        """Reset the states to those after the first ``kept`` [B] tokens of the chain."""
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
        """Count the tokens that ``mixers`` must read again with the next chain; none if this one
        was accepted whole.
        """
        uneven = min(self.counts) != max(self.counts)
        if uneven or any(n != self.nodes for n in kept):
            self.counts = [old + new for old, new in zip(self.counts, kept, strict=True)]
            return
        for mixer in mixers:
            self._take_made(mixer)
        self.counts = [0] * self.rows

    def _cut(self, mixer: Mixer, kept: Tensor) -> None:
        """Cut each convolution's state, the last inputs up to ``kept`` [B], from all inputs."""
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
        write(self.layers, mixer.slots, states)

    def _take_made(self, mixer: Mixer) -> None:
        """Commit the states that the last forward of ``mixer`` computed. A convolution's state is
        only the last few of its inputs.
        """
        for slot in mixer.slots:
            layer = self.layers[slot.layer]
            size = layer.state(slot).shape[-1]
            computed = layer.made[slot]
            layer.put(slot, computed[..., -size:].contiguous() if slot.kind == "conv" else computed)

    def settle(self) -> None:
        """Advance the committed states to the last accepted tokens, by rows of equal count."""
        groups = sorted({count for count in self.counts if count})
        with self._short_chunks():
            for count in groups:
                which = [row for row, n in enumerate(self.counts) if n == count]
                for mixer in self.mixers:
                    if mixer.way == "chunk":
                        self._replay(mixer, which, count)
        self.counts = [0] * self.rows

    def _replay(self, mixer: Mixer, which: list[int], count: int) -> None:
        """Run the first ``count`` stored tokens of the rows ``which`` through the mixer."""
        call = self.calls[mixer.module].part(0, count)
        calls = read(self.layers, mixer.slots)
        if len(which) == self.rows:
            call.run(mixer.module)
            return
        rows = torch.tensor(which, device=calls[0].device)
        write(self.layers, mixer.slots, [state[rows] for state in calls])
        call.rows(rows).run(mixer.module)
        for state, part in zip(calls, read(self.layers, mixer.slots), strict=True):
            state[rows] = part.to(state.dtype)
        write(self.layers, mixer.slots, calls)

    def join(self) -> None:
        """Add a row at the end; not under guidance."""
        self._change(with_one)

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place."""
        self._change(lambda state: without(state, row))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change`` to the states of each slot."""
        self.settle()
        for mixer in self.mixers:
            changed = [change(state) for state in read(self.layers, mixer.slots)]
            write(self.layers, mixer.slots, changed)
            self.rows = len(changed[0])
        self.counts = [0] * self.rows

    def take(self, row: int, other: States) -> None:
        """Copy the states of ``other``, which has one sample, to ``row``."""
        batch = self.rows // self.branches
        for mixer in self.mixers:
            slots = mixer.slots
            for mine, new in zip(read(self.layers, slots), read(other.layers, slots), strict=True):
                mine[row::batch] = new
        for branch in range(row, self.rows, batch):
            self.counts[branch] = 0
