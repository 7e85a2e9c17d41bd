"""Auxiliary hidden states: a target's inner layers' outputs, which a drafter reads.

Shape letters: B batch, N tree nodes, L prompt positions, F layers read, C width.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class AuxStates:
    """The latest outputs of ``layers``, kept by hooks that are removed with this object.

    ``listens`` says whether to record a forward: others may use the same layers.
    """

    def __init__(
        self, layers: Sequence[nn.Module], listens: Callable[[], bool] = lambda: True
    ) -> None:
        self.seen: list[Tensor | None] = [None] * len(layers)
        for number, layer in enumerate(layers):
            handle = layer.register_forward_hook(_recorder(self.seen, number, listens))
            weakref.finalize(self, handle.remove)

    def context(self) -> Tensor:
        """The layers' outputs side by side, [B, L or N, F·C]."""
        return torch.cat([states for states in self.seen if states is not None], dim=-1)


def _recorder(
    seen: list[Tensor | None], number: int, listens: Callable[[], bool]
) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
    """A hook that records into ``seen`` without a reference to the object that owns it."""

    def record(_: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        if listens():
            seen[number] = output if isinstance(output, Tensor) else output[0]

    return record
