"""MAR's diffusion head as compiled programs: a whole chain of plain steps is one, and a round of
speculation.

For iterations of few tokens, where operators cost more to call than to run. Shape letters as in
:mod:`specmm.image_ar.continuous.diffusion_head`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from specmm import methods
from specmm.compiled import Program, compiled, prepare_compiler
from specmm.image_ar.continuous.chain_round import (
    Drafts,
    Normal,
    RowState,
    Verified,
    draft,
    rejections,
    target_probs,
)
from specmm.image_ar.continuous.chain_windows import WindowTables, columns_of
from specmm.image_ar.continuous.diffusion import ChainSteps
from specmm.image_ar.continuous.diffusion_head import (
    BoundHead,
    HeadWeights,
    ancestral,
    finite,
    guided,
)
from specmm.image_ar.continuous.orders import MARSettings

Array = npt.NDArray[np.float32]

FEW = 8  # tokens of an iteration, in all pictures, up to which a program is ahead (pocket/mar)


class HeadPrograms:
    """Programs of any head on ``device``, one for each number of tokens of an iteration.

    They compute what single operators do, up to rounding, from the same random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        prepare_compiler(device)
        self.chain = compiled(run_chain, device)
        self.round = compiled(run_round, device)

    def ancestral(
        self, bound: BoundHead, steps: ChainSteps, noise: Tensor, temperature: float
    ) -> Tensor:
        """As :func:`ancestral`, which runs as it is for iterations of many tokens."""
        if not _served(bound):
            return ancestral(bound, steps, noise, temperature)
        table = torch.tensor([steps.keep, steps.noise, steps.mid, steps.half]).T.contiguous()
        scale = torch.as_tensor(bound.scale, dtype=torch.float32)
        noise = noise.clone(memory_format=torch.contiguous_format)
        noise[1:] *= temperature  # not of the start
        return finite(self.chain(bound.head.weights, bound.table, table, noise, scale))

    def windows(
        self, bound: BoundHead, tables: WindowTables, log_temperature: float
    ) -> WindowProgram | None:
        """What verifies windows of the tokens of ``bound``; None where that is not compiled."""
        if not _served(bound):
            return None
        return WindowProgram(self.round, bound, tables, log_temperature)


class WindowProgram:
    """Drafts and verifies windows of R tokens; those that are finished stay in the program."""

    def __init__(
        self, program: Program, bound: BoundHead, tables: WindowTables, log_temperature: float
    ) -> None:
        self.program = program
        self.count = len(bound)
        self.last = tables.steps - 1
        numbers = [torch.as_tensor(x, dtype=torch.float32) for x in (bound.scale, log_temperature)]
        self.fixed = (bound.head.weights, bound.table, torch.from_numpy(tables.rows), *numbers)

    def __call__(
        self, left: list[int], k: list[int], state: RowState, noise: Array, log_u: Array
    ) -> Verified:
        """Of the rows ``left``, at steps ``k``; ``noise`` [R, W, C] has the temperature."""
        steps = np.full(self.count, self.last)
        steps[left] = k
        arrays = [self._spread(left, x) for x in (*state, noise, log_u)]
        given = [torch.from_numpy(np.ascontiguousarray(x)) for x in (steps, *arrays)]
        made = self.program(*self.fixed, *given)
        points, drawn, q_mean, q_var, p_mean, p_var, wider, rejected = (
            x.numpy() if len(left) == self.count else x.numpy()[left] for x in made
        )
        drafts = Drafts(points, drawn, Normal(q_mean, q_var))
        return Verified(drafts, Normal(p_mean, p_var), wider, rejected)

    def _spread(self, left: list[int], x: Array) -> Array:
        """``x`` of the rows ``left`` among all, which are at zero."""
        if len(left) == self.count:
            return x
        full = np.zeros((self.count, *x.shape[1:]), x.dtype)
        full[left] = x
        return full


def run_round(
    weights: HeadWeights,
    modulations: Tensor,
    windows: Tensor,
    scale: Tensor,
    log_temperature: Tensor,
    k: Tensor,
    eta: Tensor,
    mean: Tensor,
    var: Tensor,
    noise: Tensor,
    log_u: Tensor,
) -> tuple[Tensor, ...]:
    """What ``Verified`` holds, of rows at steps ``k`` [R] of ``windows`` (``WindowTables``)."""
    at = k[:, None] + torch.arange(noise.shape[1] + 1)
    columns = columns_of(windows[at].numpy())
    wide = log_temperature.numpy()
    state = RowState(eta.numpy(), mean.numpy(), var.numpy())
    drafts = draft(state, columns, noise.numpy(), wide)
    x = torch.from_numpy(drafts.points * columns.to_x[:, :-1])
    rows = torch.arange(len(k))[:, None]
    own = modulations[at[:, :-1].clamp(max=len(modulations) - 1), rows]
    eps, v = guided(weights, x, own, scale)
    p, wider = target_probs(drafts.points, eps.numpy(), v.numpy(), columns, wide)
    rejected = rejections(drafts, p, log_u.numpy())
    q = drafts.q
    made = (drafts.points, drafts.steps, q.mean, q.log_var, p.mean, p.log_var, wider, rejected)
    return tuple(torch.from_numpy(x) for x in made)


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
    if torch.compiler.is_compiling():
        _, x = while_loop(lambda k, _: k <= last, step, (k, x))
        return x
    for _ in range(len(steps)):
        k, x = step(k, x)
    return x


def _served(bound: BoundHead) -> bool:
    """Whether programs serve the tokens of ``bound``."""
    return bound.table is not None and len(bound) <= FEW


def check_compiled(
    method: methods.ContinuousMethod, settings: MARSettings, device: torch.device
) -> None:
    """Raise ``ValueError`` for what has no programs."""
    if not method.static_shapes or settings.solver != "ddpm" or device.type != "cpu":
        raise ValueError(
            "compiled=True of MAR needs a CPU, solver 'ddpm' and ar or cspd's exact that drafts by "
            f"the model itself, got {device.type}, {settings.solver!r} and {method}"
        )
