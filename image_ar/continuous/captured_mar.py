"""MAR on a GPU as graphs: passes of the transformer and denoising chains, which decide nothing on
the way. Shape letters as in :mod:`specmm.image_ar.continuous.masked_decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specmm import methods
from specmm.compiled import NotCompiled
from specmm.derived import placed
from specmm.graphs import Graphs, shared_pool
from specmm.image_ar.continuous.chain_program import ChainProgram, Fixed, State, next_state
from specmm.image_ar.continuous.chain_round import ChainOptions
from specmm.image_ar.continuous.chain_windows import WindowTables
from specmm.image_ar.continuous.diffusion_head import BoundHead, ChainHead
from specmm.image_ar.continuous.mar import MAR
from specmm.image_ar.continuous.masked_decode import PlainSampler, head_conditions
from specmm.late import Late

MOST = 1000  # graphs: a picture of 256 iterations has 256 passes
MOST_BYTES = 4 * 2**30  # of what they are given: tables of modulations are large
AHEAD = 2  # rounds of a graph: those of rows that are finished do nothing


class MARGraphs:
    """Graphs of a ``model``, one for each number of tokens, as long as its weights lie where they
    do. They share memory: one runs at a time.
    """

    def __init__(self, model: MAR) -> None:
        self.model = model
        self.weights = placed(model)
        self.pool = shared_pool(model.mask_token.device)
        self.passes = Graphs(self._pass, self.pool)
        self.plain: dict[tuple[type, ChainHead, float], Graphs] = {}
        self.rounds: dict[tuple[ChainHead, bool], Graphs] = {}

    @property
    def spent(self) -> bool:
        """Whether weights lie elsewhere than when the first graph was recorded, or there are too
        many of them, or they hold too much.
        """
        each = (self.passes, *self.plain.values(), *self.rounds.values())
        graphs = [graph for some in each for graph in some.by_form.values()]
        moved = placed(self.model) != self.weights
        return moved or len(graphs) > MOST or sum(x.held for x in graphs) > MOST_BYTES

    def conditions(self, tokens: Tensor, known: Tensor, classes: Tensor, wanted: Tensor) -> Tensor:
        """As :func:`specmm.image_ar.continuous.masked_decode.head_conditions` of the model."""
        return self.passes(tokens, known, classes, wanted)[0]

    def _pass(self, *given: Tensor) -> tuple[Tensor]:
        return (head_conditions(self.model, *given),)

    def chains(self, sampler: PlainSampler) -> Callable[[BoundHead, Tensor], Tensor]:
        """What runs the chains of ``sampler``."""
        head = sampler.head
        key = type(sampler), head, sampler.temperature
        if key not in self.plain:

            def run(cond: Tensor, scale: Tensor, noise: Tensor) -> tuple[Tensor]:
                return (sampler.chains(BoundHead(head, cond, scale), noise),)

            self.plain[key] = Graphs(run, self.pool)
        graphs = self.plain[key]

        def chains(bound: BoundHead, noise: Tensor) -> Tensor:
            scale = torch.as_tensor(bound.scale, dtype=torch.float32, device=noise.device)
            return graphs(bound.cond, scale, noise)[0]

        return chains

    def speculation(
        self, bound: BoundHead, tables: WindowTables, options: ChainOptions, pictures: int
    ) -> ChainProgram | None:
        """Speculation of the tokens of ``bound``, as many of each of so many ``pictures``; None
        where it runs as it is.
        """
        if bound.table is None:
            return None
        rounds = partial(self._rounds, bound.head)
        return ChainProgram(rounds, bound, tables, options, pictures)

    def _rounds(self, head: ChainHead, fixed: Fixed, state: State, residual: bool) -> State:
        """As :func:`specmm.image_ar.continuous.chain_program.run_rounds`, ``AHEAD`` a graph."""
        key = head, residual
        if key not in self.rounds:
            sizes = len(Fixed._fields) - 1  # all but the weights

            def run(*given: Tensor) -> State:
                own, now = Fixed(head.weights, *given[:sizes]), given[sizes:]
                for _ in range(AHEAD):
                    now = next_state(own, now, residual)
                return now

            self.rounds[key] = Graphs(run, self.pool, fixed=sizes)
        before: Late | None = None
        while before is None or before.read()[0]:  # one graph too many, but no waiting
            before = Late(state[2].any())
            state = self.rounds[key](*fixed[1:], *state)
        return state


def check_captured(method: methods.ContinuousMethod) -> None:
    """Raise ``ValueError`` for what has no graphs."""
    if not method.static_shapes:
        raise NotCompiled(
            f"compiled=True of MAR needs, on a GPU, ar or an exact cspd, got {method}"
        )
