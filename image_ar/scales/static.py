"""A VAR whose scales of few rows are compiled programs: there, operators cost more to call than to
run.

Shape letters: R rows (batch, doubled under guidance), T query positions, S stored positions, C
width, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from specmm import methods
from specmm.cache import Memory
from specmm.compiled import compiled, prepare_compiler
from specmm.image_ar.scales.session import Unkept
from specmm.image_ar.scales.var import VAR, Conditioned

# rows times positions up to which a program is ahead of single operators (pocket/var, two cores)
FEW = 320
Part = tuple[Tensor, Tensor]  # keys and values of a layer


class CompiledVAR:
    """``model``, its blocks a program for each shape of at most ``FEW`` rows; all else is the
    model's own.

    In a program products are PyTorch's plain ones: logits may differ by rounding from those
    without.
    """

    def __init__(self, model: VAR) -> None:
        prepare_compiler(model.device)
        self.model, self.program = model, compiled(run_blocks, same_parts=True, device=model.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "model":  # asked for by copying, before there is one
            raise AttributeError(name)
        return getattr(self.model, name)

    def run(
        self,
        x: Tensor,
        given: Conditioned,
        bias: Tensor | None,
        stores: Sequence[Memory | Unkept | None],
        tail: int,
    ) -> Tensor:
        """As :meth:`VAR.run`; what layers are to keep is written outside of the program, which
        would copy it all.
        """
        some = [store for store in stores if store is not None]
        if x.shape[0] * x.shape[1] > FEW or not some:
            return self.model.run(x, given, bias, stores, tail)
        kept = isinstance(some[0], Memory)
        found, fresh = self.program(
            self.model, x, given, bias, [store.before() for store in some], tail, kept
        )
        if kept:
            for store, part in zip(some, fresh, strict=True):
                store.write(*part)
        return cast(Tensor, found)


class FreshStates(Unkept):
    """A store inside a program, of which the caller keeps what is new."""

    def write(self, k: Tensor, v: Tensor) -> Part:
        """After what is stored, ``k`` and ``v`` [R, T, H, D], noted as ``fresh``."""
        self.fresh = k, v
        return super().write(k, v)


def run_blocks(
    model: VAR,
    x: Tensor,
    given: Conditioned,
    bias: Tensor | None,
    before: Sequence[Part],
    tail: int,
    kept: bool,
) -> tuple[Tensor, list[Part]]:
    """The last ``tail`` rows [R, T, C] of the blocks' output, and a layer's new keys and values if
    they are ``kept``.

    ``before``: what each layer stored [R, S, H, D].
    """
    stores = [FreshStates(*part) for part in before]
    found = model.run(x, given, bias, stores, tail)
    return found, [store.fresh for store in stores] if kept else []


def check_method(method: methods.ScalesMethod) -> None:
    """Raise ``ValueError`` for a method whose passes are of too many shapes for programs."""
    if not method.static_shapes:
        raise ValueError(
            f"compiled=True needs ar or code (a scale a pass, always the same), got {method}"
        )
