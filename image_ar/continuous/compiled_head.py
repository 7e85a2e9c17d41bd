"""MAR's diffusion head as compiled programs: a whole chain is one, plain or with speculation.

For iterations of few tokens, where operators cost more to call than to run. Shape letters as in
:mod:`specmm.image_ar.continuous.diffusion_head`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specmm import methods
from specmm.compiled import NotCompiled, compiled, looped, prepare_compiler
from specmm.image_ar.continuous.chain_program import ChainProgram, run_rounds
from specmm.image_ar.continuous.chain_round import ChainOptions
from specmm.image_ar.continuous.chain_windows import WindowTables
from specmm.image_ar.continuous.diffusion_head import BoundHead, ChainHead, HeadWeights, guided
from specmm.image_ar.continuous.masked_decode import Ancestral, PlainSampler
from specmm.image_ar.continuous.orders import MARSettings

FEW = 8  # tokens of an iteration, in all pictures, up to which a program is ahead (pocket/mar)


class HeadPrograms:
    """Programs of any head on ``device``, one for each number of tokens of an iteration.

    They compute what single operators do, up to rounding, from the same random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        prepare_compiler(device)
        self.chain = compiled(run_chain, device)
        self.rounds = compiled(run_rounds, device)

    def chains(self, sampler: PlainSampler) -> Callable[[BoundHead, Tensor], Tensor]:
        """What runs the chains of ``sampler``, by DDPM, and as they are for iterations of many
        tokens.
        """
        assert isinstance(sampler, Ancestral), "see check_compiled"
        steps = sampler.steps
        table = torch.tensor([steps.keep, steps.noise, steps.mid, steps.half]).T.contiguous()

        def chains(bound: BoundHead, noise: Tensor) -> Tensor:
            if not _served(bound):
                return sampler.chains(bound, noise)
            scale = torch.as_tensor(bound.scale, dtype=torch.float32)
            noise = noise.clone(memory_format=torch.contiguous_format)
            noise[1:] *= sampler.temperature  # not of the start
            made: Tensor = self.chain(bound.head.weights, bound.table, table, noise, scale)
            return made

        return chains

    def speculation(
        self, bound: BoundHead, tables: WindowTables, options: ChainOptions, pictures: int
    ) -> ChainProgram | None:
        """Speculation of the tokens of ``bound``, if there is one of each of so many ``pictures``;
        None where it runs as it is: windows of more are bound by arithmetic.
        """
        if not _served(bound) or len(bound) > pictures:
            return None
        return ChainProgram(self.rounds, bound, tables, options, pictures)


def run_chain(
    weights: HeadWeights, modulations: Tensor, steps: Tensor, noise: Tensor, scale: Tensor
) -> Tensor:
    """Tokens [R, C] by ``steps`` [S, 4] (``ChainSteps``) from ``noise`` [S + 1, R, C], under
    ``modulations`` [S, R, G, F].
    """
    last = len(steps) - 1

    def step(k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        at = k.reshape(1)
        keep, lost, mid, half = steps.index_select(0, at)[0]
        eps, v = guided(weights, x, modulations.index_select(0, at)[0], scale)
        added = (v * half + mid).exp() * noise.index_select(0, at + 1)[0]
        return k + 1, x * keep + eps * lost + torch.where(k < last, added, 0.0)

    k = torch.zeros((), dtype=torch.int64)
    x = noise[0].clone()  # what a loop carries shares no memory with what it reads
    tokens: Tensor = looped(lambda k, _: k <= last, step, (k, x))[1]
    return tokens


def _served(bound: BoundHead) -> bool:
    """Whether programs serve the tokens of ``bound``."""
    return bound.table is not None and len(bound) <= FEW


def check_compiled(method: methods.ContinuousMethod, settings: MARSettings, place: str) -> None:
    """Raise ``ValueError`` for what has no programs on a ``place``, a kind of device."""
    if not method.static_shapes or settings.solver != "ddpm" or place != "cpu":
        raise NotCompiled(
            "compiled=True of MAR needs a CPU, solver 'ddpm', and ar or an exact cspd, "
            f"got {place}, {settings.solver!r} and {method}"
        )


def check_tokens(
    method: methods.ContinuousMethod, head: ChainHead, sizes: list[int], batch: int, branches: int
) -> None:
    """Raise ``ValueError`` unless programs draw at least half of the tokens of ``batch`` pictures,
    whose iterations have ``sizes``.
    """
    most = 1 if method.drafts else FEW
    served = (
        n for n in sizes if n <= most and n * batch <= FEW and head.keeps(n * batch, branches)
    )
    if 2 * sum(served) < sum(sizes):
        raise NotCompiled(
            f"compiled=True of MAR needs iterations of at most {FEW} tokens in a batch, for cspd "
            f"of one a picture, got up to {max(sizes)} in each of {batch} pictures: give a larger "
            "num_iter or a smaller batch_size"
        )
