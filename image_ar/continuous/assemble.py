"""From a method's options to a run: its loop, and what the pictures may claim.

Shape letters: B pictures, L tokens a picture, S head steps, C token width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specmm.image_ar.continuous.chain import ChainHead
from specmm.image_ar.continuous.cspd import Side, StreamNumbers, Window, decode_release
from specmm.image_ar.continuous.decode import Plan, Progress, Sampler, conditions, decode_mar
from specmm.image_ar.continuous.diffusion import Schedule
from specmm.image_ar.continuous.mar import MAR
from specmm.image_ar.continuous.noise import Stream, log_uniforms, normals
from specmm.image_ar.continuous.orders import random_orders
from specmm.image_ar.continuous.paper import decode_paper
from specmm.image_ar.continuous.ratios import Aligned, Release, Version
from specmm.image_ar.continuous.samplers import Ancestral, Deterministic, SmallHead, Speculative
from specmm.image_ar.continuous.settings import Solver
from specmm.image_ar.continuous.speculate import Options
from specmm.methods import AR, ContinuousMethod, CSpD
from specmm.stats import Certificate

STEPS, ITERATIONS = (
    16,
    8,
)  # default windows: head steps of ``exact``, iterations of the other variants
PLAIN = Certificate("exact", "plain sampling of the target", 0.0)
DDIM = Certificate(
    "heuristic",
    "DDIM leaves out the noise that the target's steps add, and with it the temperature",
)
EXACT = Certificate(
    "exact",
    "every step of every token's chain is kept or drawn by a maximal coupling with the target's own head",
    0.0,
)
PAPER = Certificate(
    "heuristic",
    "the paper's rule takes the last step's Gaussian, whose noise is never added, for a token's density, and compares "
    "chains that share their noise as if they did not",
)
RELEASE = Certificate(
    "heuristic",
    "the release's rule: the target does not see the drafts of a window, the factor of the spreads is upside down, "
    "densities are widened, and what follows a rejection is kept",
)
ALIGNED = Certificate(
    "heuristic",
    "the target does not see the drafts of a window, and what follows a replaced draft is kept",
)


@dataclass
class Models:
    """The target and perhaps a smaller model, with the heads made of them so far, by schedule."""

    target: MAR
    small: MAR | None = None
    heads: dict[str, ChainHead] = field(default_factory=dict)

    @torch.inference_mode()
    def head(self, spec: str) -> ChainHead:
        """The target's head with ``spec`` steps."""
        if spec not in self.heads:
            self.heads[spec] = ChainHead(self.target.head, Schedule.of(spec))
        return self.heads[spec]


@dataclass
class Draw:
    """What is to be drawn: ``labels`` [B], one generator each, and how."""

    labels: Tensor
    generators: Sequence[torch.Generator]
    plan: Plan
    solver: Solver = "ddpm"


def assemble(
    method: ContinuousMethod, models: Models, draw: Draw
) -> tuple[Iterator[Progress], Certificate]:
    """The loop that draws by ``method``, and its certificate.

    Raises ``ValueError`` for a variant without the small model it needs and for a solver without
    distributions to compare.
    """
    orders = random_orders(draw.generators, models.target.config.seq_len)
    if isinstance(method, CSpD) and method.variant != "exact":
        return _between_models(method, models, draw, orders)
    sampler, certificate = _sampler(method, models, draw)
    return decode_mar(models.target, draw.labels, orders, sampler, draw.plan), certificate


def _sampler(method: ContinuousMethod, models: Models, draw: Draw) -> tuple[Sampler, Certificate]:
    head, normal, temperature = (
        models.head(draw.plan.head_steps),
        normals(draw.generators),
        draw.plan.temperature,
    )
    if isinstance(method, AR):
        return (
            (Deterministic(head, normal), DDIM)
            if draw.solver == "ddim"
            else (Ancestral(head, normal, temperature), PLAIN)
        )
    _check_solver(draw)
    if temperature == 0:  # a chain without noise has nothing to couple
        return Ancestral(head, normal, temperature), PLAIN
    small = _small_head(models, draw) if method.predictor == "small" else None
    window = method.window or STEPS
    luck = log_uniforms(draw.generators)
    return Speculative(
        head, normal, luck, window, Options(temperature, method.predictor), small
    ), EXACT


@torch.inference_mode()
def _small_head(models: Models, draw: Draw) -> SmallHead:
    if models.small is None:
        raise ValueError(
            "cspd's prediction 'small' needs a small model beside the target, there is none"
        )
    head = ChainHead(models.small.head, Schedule.of(draw.plan.head_steps))
    return SmallHead(
        models.small, head, conditions(models.small, draw.labels, len(draw.labels), draw.plan.cfg)
    )


def _check_solver(draw: Draw) -> None:
    if draw.solver != "ddpm":
        raise ValueError(
            f"solver must be 'ddpm' for cspd, which compares the distributions of its steps, got {draw.solver!r}"
        )


def _between_models(
    method: CSpD, models: Models, draw: Draw, orders: Tensor
) -> tuple[Iterator[Progress], Certificate]:
    if models.small is None:
        raise ValueError(
            f"cspd's variant {method.variant!r} needs a small model beside the target, there is none"
        )
    _check_solver(draw)
    if draw.plan.temperature == 0:
        raise ValueError(
            f"temperature must be above 0 for variant {method.variant!r}, got 0: its σ would be 0"
        )
    window = Window(method.window or ITERATIONS, method.prefill)
    normal, luck = normals(draw.generators), log_uniforms(draw.generators)
    noise, batch = _noise(normal, models, draw.plan, orders), len(orders)
    numbers = [StreamNumbers(normal, luck, b, batch) for b in range(batch)]
    target, small = (Side(m, draw.labels, batch, draw.plan) for m in (models.target, models.small))
    if method.variant != "paper":
        version: Version
        version, claim = (
            (Aligned(), ALIGNED)
            if method.variant == "aligned"
            else (Release(method.relax), RELEASE)
        )
        return decode_release(target, small, orders, noise, numbers, version, window), claim
    return decode_paper(target, small, orders, noise, numbers, window), PAPER


def _noise(normal: Stream, models: Models, plan: Plan, orders: Tensor) -> Tensor:
    """Noise [B, L, S + 1, C] of every position: both models' chains start from it and are moved by
    it.
    """
    batch, length = orders.shape
    steps, width = len(Schedule.of(plan.head_steps)) + 1, models.target.config.token_dim
    return normal.draw([length] * batch, steps * width).view(batch, length, steps, width)
