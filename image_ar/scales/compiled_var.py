"""A VAR whose scales of few rows are compiled: there, operators cost more to call than to run.

Shape letters: R rows (batch, doubled under guidance), T query positions, S cached positions, C
width, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from specmm import methods
from specmm.compiled import NotCompiled, compiled, prepare_compiler
from specmm.image_ar.scales.next_scale import ScaleCache
from specmm.image_ar.scales.var import VAR, ClassCondition

# rows times positions up to which a program is ahead of single operators (pocket/var, two cores)
FEW = 320
KeysValues = tuple[Tensor, Tensor]


class CompiledVAR:
    """``model`` with its blocks compiled for each shape of at most ``FEW`` rows.

    A program uses PyTorch's plain products: logits may differ by rounding from those without.
    """

    def __init__(self, model: VAR) -> None:
        prepare_compiler(model.device)
        self.model = model
        self.program = compiled(run_blocks, model.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "model":  # copying asks before there is a model
            raise AttributeError(name)
        return getattr(self.model, name)

    def run(
        self,
        x: Tensor,
        given: ClassCondition,
        bias: Tensor | None,
        stores: Sequence[ScaleCache | None],
        tail: int,
    ) -> Tensor:
        """As :meth:`VAR.run`; caches are written outside of the program, which would copy them."""
        caches = [store for store in stores if store is not None]
        if x.shape[0] * x.shape[1] > FEW or not caches:
            return self.model.run(x, given, bias, stores, tail)
        keep = caches[0].keep
        before = [cache.before() for cache in caches]
        found, fresh = self.program(self.model, x, given, bias, before, tail, keep)
        if keep:
            for cache, part in zip(caches, fresh, strict=True):
                cache.write(*part)
        return cast(Tensor, found)


class FreshStates:
    """A store inside a program: keeps the new keys and values as ``fresh``."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def write(self, k: Tensor, v: Tensor) -> KeysValues:
        self.fresh = (k, v)
        return torch.cat([self.keys, k], 1), torch.cat([self.values, v], 1)


def run_blocks(
    model: VAR,
    x: Tensor,
    given: ClassCondition,
    bias: Tensor | None,
    before: Sequence[KeysValues],
    tail: int,
    keep: bool,
) -> tuple[Tensor, list[KeysValues]]:
    """The last ``tail`` rows [R, T, C] of the output, and with ``keep`` new keys and values.

    ``before``: what each layer has cached [R, S, H, D].
    """
    stores = [FreshStates(*part) for part in before]
    found = model.run(x, given, bias, stores, tail)
    return found, [store.fresh for store in stores] if keep else []


def check_method(method: methods.ScalesMethod) -> None:
    """Raise ``ValueError`` for a method whose passes are of too many shapes for programs."""
    if not method.static_shapes:
        raise NotCompiled(
            f"compiled=True needs ar or code (a scale a pass, always the same), got {method}"
        )
