"""The core's preallocated cache in the clothes of a transformers ``Cache``.

Shape letters: B batch, S slots attended, H heads, D head width, T query rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from specmm.cache import Cache, Memory, StaticMemory


class SlotLayer(CacheLayerMixin):
    """One layer: hands keys and values to the :class:`Memory`, which says where they go and what is
    attended.
    """

    is_sliding = False

    def __init__(self, memory: Memory | StaticMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.is_initialized = memory, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store [B, H, T, D] and return what is attended, [B, H, S, D]."""
        keys, values = self.memory.write(key_states.transpose(1, 2), value_states.transpose(1, 2))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots attended and the first of them."""
        return self.memory.stop, 0

    def get_seq_length(self) -> int:
        """Slots before those of the next forward."""
        return self.memory.first

    def get_max_length(self) -> int:
        """All slots."""
        return self.memory.keys.shape[1]


def as_transformers(cache: Cache) -> TransformersCache:
    """``cache`` as ``past_key_values``; both share the memory."""
    return with_memories(cache.layers)


def with_memories(layers: Sequence[Memory | StaticMemory]) -> TransformersCache:
    """The memories of all ``layers`` as ``past_key_values``."""
    return TransformersCache(layers=[SlotLayer(memory) for memory in layers])
