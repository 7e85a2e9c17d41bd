"""Presents the core's cache to transformers models: one of their cache layers for each of ours.

Shape letters: R rows, N tokens, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

from specmm.core.cache import Cache, LayerSize, Memory, StaticMemory
from specmm.hf.models.families import has_states
from specmm.hf.models.mixers import StateLayer
from specmm.kernels.tree_attention import PackedMask, Part


class _SlotLayer(CacheLayerMixin):
    """One layer of a transformers cache, [R, H, N, D]; the memory knows where new slots go."""

    is_sliding = False

    def __init__(self, memory: Memory | StaticMemory) -> None:
        self.memory = memory
        CacheLayerMixin.__init__(self)

    @property
    def is_initialized(self) -> bool:
        """Whether any tokens precede the next ones."""
        return self.memory.first > 0

    @is_initialized.setter
    def is_initialized(self, _: bool) -> None:
        pass

    @property
    def keys(self) -> Tensor:
        """Keys of all slots [R, H, S, D]."""
        return self.memory.keys.transpose(1, 2)

    @keys.setter
    def keys(self, _: Tensor | None) -> None:
        pass

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.memory.write(key_states, value_states, axis=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.memory.stop, 0

    def get_seq_length(self) -> int:
        return self.memory.first

    def get_max_length(self) -> int:
        return self.memory.keys.shape[1]


class _PackedLayer(_SlotLayer):
    """The same ``layer`` of several ``caches``, which one forward writes; see ``PackedMask``."""

    def __init__(self, caches: Sequence[Cache], layer: int, mask: PackedMask) -> None:
        self.caches = caches
        self.layer = layer
        self.mask = mask
        super().__init__(caches[0].layers[layer])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store each part's keys and values in its cache; attention reads them by the mask."""
        mask = self.mask
        keys, values = mask.split(key_states, 2), mask.split(value_states, 2)
        parts = zip(mask.parts, self.caches, keys, values, strict=True)
        mask.held = [self._written(*one) for one in parts]
        return key_states, value_states  # which attention does not read

    def _written(self, part: Part, cache: Cache, keys: Tensor, values: Tensor) -> Any:
        """Store a part's ``keys`` and ``values`` [1, K, M, D]; returns what it attends to."""
        if cache.chains is not None:
            return cache.chains.write(self.layer, keys, values)
        rows = part.rows_of(keys, 2), part.rows_of(values, 2)
        return cache.layers[self.layer].write(*rows, axis=2)


def packed(caches: Sequence[Cache], mask: PackedMask) -> TransformersCache:
    """The ``caches`` as one, for a forward over their concatenated tokens."""
    layers = range(len(caches[0].layers))
    return TransformersCache(layers=[_PackedLayer(caches, layer, mask) for layer in layers])


class _SlotStateLayer(StateLayer, _SlotLayer):  # type: ignore[override]  # as transformers' own
    """A layer with both slots and states."""

    is_compileable = False  # or generate's preparation would make masks itself, without windows

    def __init__(self, memory: Memory | StaticMemory, number_of_states: int, number: int) -> None:
        _SlotLayer.__init__(self, memory)
        StateLayer.__init__(self, number_of_states, number)

    lazy_initialization = StateLayer.lazy_initialization  # type: ignore[assignment]
    get_max_length = _SlotLayer.get_max_length


class _FixedLayer(CacheLayerMixin):
    """Keys and values of pictures for cross-attention [R, H, N, D], written only by the prefill."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states
        self.values = value_states
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[-2])

    def get_max_length(self) -> int:
        return -1


def as_transformers(
    memories: Sequence[Memory | StaticMemory],
    sizes: Sequence[LayerSize | None] = (),
    kinds: Sequence[Any] = (),
) -> TransformersCache:
    """The ``memories`` as ``past_key_values``, in the order of the layers that have a memory.

    ``sizes`` has None for layers that store no keys of text tokens; by default all layers do. If
    some do not, ``kinds`` are the layers of the model's own cache.
    """
    remaining = iter(memories)
    has = [size is not None for size in sizes] or [True] * len(memories)
    states = [kind.number_of_states if has_states(kind) else 0 for kind in kinds]
    layers: list[CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer] = []
    for number, (has_keys, count) in enumerate(zip_longest(has, states, fillvalue=0)):
        if has_keys and count:
            layers.append(_SlotStateLayer(next(remaining), count, number))
        elif count:
            layers.append(StateLayer(count, number))
        elif has_keys:
            layers.append(_SlotLayer(next(remaining)))
        else:
            dummy = isinstance(kinds[number], DummyLayer)
            layers.append(DummyLayer() if dummy else _FixedLayer())  # type: ignore[no-untyped-call]
    return TransformersCache(layers=layers)
