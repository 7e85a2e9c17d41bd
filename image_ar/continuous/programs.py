"""Compiles MAR. On a CPU, programs of its head run a whole chain each, plain or with speculation;
on a GPU, the transformer's passes and plain chains are CUDA graphs.

On a CPU programs serve iterations of few tokens, where operators cost more to call than to run.
Results equal the uncompiled ones up to rounding, for the same random numbers. Shape letters as in
:mod:`specmm.image_ar.continuous.diffusion_head`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specmm import methods
from specmm.core.derived import placed
from specmm.image_ar.continuous.chain_program import ChainProgram, run_rounds
from specmm.image_ar.continuous.chain_windows import WindowTables
from specmm.image_ar.continuous.diffusion_head import BoundHead, ChainHead, HeadWeights, guided
from specmm.image_ar.continuous.mar import MAR
from specmm.image_ar.continuous.masked_decode import Ancestral, PlainSampler, head_conditions
from specmm.image_ar.continuous.orders import MARSettings
from specmm.programs.compiled import NotCompiled, compiled, looped, prepare_compiler
from specmm.programs.graphs import Graphs, captures, shared_pool

FEW = 8  # tokens of an iteration, in all pictures, up to which a program is ahead (pocket/mar)
MOST = 1000  # graphs: a picture of 256 iterations has 256 passes
MOST_BYTES = 4 * 2**30  # all graphs' inputs: noise of all steps is large
Chains = Callable[[BoundHead, Tensor], Tensor]


class HeadPrograms:
    """Programs of any head on ``device``, one for each number of tokens of an iteration."""

    conditions = None  # the transformer's passes run uncompiled

    def __init__(self, device: torch.device) -> None:
        prepare_compiler(device)
        self.chain = compiled(run_chain, device)
        self.rounds = compiled(run_rounds, device)

    def chains(self, sampler: PlainSampler) -> Chains:
        """A function that runs the DDPM chains of ``sampler``: compiled for iterations of few
        tokens, uncompiled for others.
        """
        assert isinstance(sampler, Ancestral), "see check"
        steps = sampler.steps
        rows = steps.keep, steps.noise, steps.mid, steps.half
        table = torch.tensor(rows, dtype=torch.float32).T.contiguous()

        def chains(bound: BoundHead, noise: Tensor) -> Tensor:
            if not _served(bound):
                return sampler.chains(bound, noise)
            scale = torch.as_tensor(bound.scale, dtype=torch.float32)
            noise = noise.clone(memory_format=torch.contiguous_format)
            noise[1:] *= sampler.temperature  # not of the start
            tokens: Tensor = self.chain(bound.head.weights, bound.table, table, noise, scale)
            return tokens

        return chains

    def speculation(
        self, bound: BoundHead, tables: WindowTables, temperature: float, pictures: int
    ) -> ChainProgram | None:
        """Compiled speculation for the tokens of ``bound``, if each of ``pictures`` pictures has at
        most one; else None (uncompiled), because arithmetic limits larger windows.
        """
        if not _served(bound) or len(bound) > pictures:
            return None
        return ChainProgram(self.rounds, bound, tables, temperature, pictures)


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
    x = noise[0].clone()  # a loop's state must not share memory with its inputs
    tokens: Tensor = looped(lambda k, _: k <= last, step, (k, x))[1]
    return tokens


def _served(bound: BoundHead) -> bool:
    """Whether programs run the tokens of ``bound`` faster than uncompiled code."""
    return bound.table is not None and len(bound) <= FEW


class MARGraphs:
    """CUDA graphs of a ``model``, one for each number of tokens, valid until its weights move in
    memory. They share memory, so only one can run at a time.

    Rounds of speculation are not captured: on an H200 a captured round of MAR-L takes as long as
    five plain steps and saves three.
    """

    speculation = None

    def __init__(self, model: MAR) -> None:
        self.model = model
        self.weights = placed(model)
        self.pool = shared_pool(model.mask_token.device)
        self.made: dict[Any, Graphs] = {}

    @property
    def spent(self) -> bool:
        """Whether the graphs must be recorded again: the weights have moved, or there are too many
        graphs, or they hold too much memory.
        """
        graphs = [graph for made in self.made.values() for graph in made.by_form.values()]
        moved = placed(self.model) != self.weights
        return moved or len(graphs) > MOST or sum(x.held for x in graphs) > MOST_BYTES

    def _of(self, key: Any, function: Callable[..., tuple[Tensor, ...]]) -> Graphs:
        if key not in self.made:
            self.made[key] = Graphs(function, self.pool)
        return self.made[key]

    def conditions(self, *tensors: Tensor) -> Tensor:
        """As :func:`specmm.image_ar.continuous.masked_decode.head_conditions` of the model."""
        return self._of("passes", lambda *x: (head_conditions(self.model, *x),))(*tensors)[0]

    def chains(self, sampler: PlainSampler) -> Chains:
        """A function that runs the chains of ``sampler``."""
        head = sampler.head

        def run(cond: Tensor, scale: Tensor, noise: Tensor) -> tuple[Tensor]:
            return (sampler.chains(BoundHead(head, cond, scale), noise),)

        graphs = self._of((type(sampler), head, sampler.temperature), run)

        def chains(bound: BoundHead, noise: Tensor) -> Tensor:
            scale = torch.as_tensor(bound.scale, dtype=torch.float32, device=noise.device)
            return graphs(bound.cond, scale, noise)[0]

        return chains


def check(
    method: methods.ContinuousMethod,
    settings: MARSettings,
    head: ChainHead,
    batch: int,
    length: int,
) -> None:
    """Raise ``ValueError`` if programs cannot run ``method`` on the ``head``'s device. On a CPU
    they must draw at least half of the ``length`` tokens of each of ``batch`` pictures.
    """
    if captures(head.device):
        if method.drafts:
            raise NotCompiled(
                f"compiled=True of MAR on a GPU needs ar, which is faster there, got {method}"
            )
        return
    if not method.static_shapes or settings.solver != "ddpm" or head.device.type != "cpu":
        raise NotCompiled(
            "compiled=True of MAR needs a CPU, solver 'ddpm', and ar or an exact cspd, "
            f"got {head.device.type}, {settings.solver!r} and {method}"
        )
    sizes = [iteration.last - iteration.first for iteration in settings.iterations(length)]
    branches = 1 if settings.cfg == 1.0 else 2
    most = 1 if method.drafts else FEW
    served = (
        n for n in sizes if n <= most and n * batch <= FEW and head.keeps(n * batch, branches)
    )
    if 2 * sum(served) < sum(sizes):
        raise NotCompiled(
            f"compiled=True of MAR needs iterations of at most {FEW} tokens a batch (with cspd 1 a "
            f"picture), got up to {max(sizes)} in each of {batch} pictures: give a larger num_iter "
            "or a smaller batch_size"
        )
