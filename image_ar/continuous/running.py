"""Pictures of continuous tokens by any method: the loop that draws a batch, and what it may claim.

Shape letters: B pictures of a batch, L tokens a picture, S head steps, C token width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from specmm import methods
from specmm.core.derived import Derived
from specmm.core.stats import Certificate
from specmm.image_ar.continuous.chain_round import ChainOptions
from specmm.image_ar.continuous.chain_speculation import ChainSpeculation
from specmm.image_ar.continuous.cspd import (
    CSpDBatch,
    CSpDModel,
    DraftWindow,
    ReleaseRule,
    StreamNumbers,
    decode_paper,
    decode_release,
)
from specmm.image_ar.continuous.diffusion import NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import ChainHead
from specmm.image_ar.continuous.mar import MAR
from specmm.image_ar.continuous.masked_decode import (
    Ancestral,
    Deterministic,
    MARProgress,
    MARSampler,
    PlainSampler,
    decode_mar,
)
from specmm.image_ar.continuous.orders import MARSettings, log_uniforms, normals, random_orders
from specmm.image_ar.continuous.programs import HeadPrograms, MARGraphs, check
from specmm.image_ar.shared import Batch
from specmm.programs.graphs import captures

HEAD_STEPS = 16  # the default window of cspd's variant ``exact``
ITERATIONS = 8  # that of the other variants
PLAIN = Certificate("exact", "plain sampling of the target", 0.0)
DDIM = Certificate(
    "heuristic",
    "DDIM leaves out the noise that the target's steps add, and with it the temperature",
)
EXACT = Certificate(
    "exact",
    "every step of every token's chain is kept or drawn by a maximal coupling "
    "with the target's own head",
    0.0,
)
PAPER = Certificate(
    "heuristic",
    "the paper's rule takes the last step's Gaussian, whose noise is never added, for a token's "
    "density, and compares chains that share their noise as if they did not",
)
RELEASE = Certificate(
    "heuristic",
    "the release's rule: the target does not see the drafts of a window, the factor of the spreads "
    "is upside down, densities are widened, and what follows a rejection is kept",
)
ALIGNED = Certificate(
    "heuristic",
    "the target does not see the drafts of a window, and what follows a replaced draft is kept",
)


@dataclass
class MARModels:
    """The target and perhaps a smaller model, with the target's heads made so far, by schedule, and
    what runs for a compiled target.
    """

    target: MAR
    small: MAR | None = None
    heads: dict[str, Derived[ChainHead]] = field(default_factory=dict)
    graphs: MARGraphs | None = None

    @cached_property
    def programs(self) -> HeadPrograms:
        """Of the target's heads; raises ``ValueError`` where there is no compiler."""
        return HeadPrograms(self.target.mask_token.device)

    def quick(
        self, method: methods.ContinuousMethod, settings: MARSettings, batch: int
    ) -> HeadPrograms | MARGraphs:
        """What runs for ``batch`` compiled pictures: graphs on a GPU, else ``programs``.

        Raises ``ValueError`` for what has neither, and as ``programs``.
        """
        head = self.head(settings.head_steps)
        check(method, settings, head, batch, self.target.config.seq_len)
        if not captures(head.device):
            return self.programs
        if self.graphs is None or self.graphs.spent:
            self.graphs = MARGraphs(self.target)
        return self.graphs

    @torch.inference_mode()
    def head(self, spec: str) -> ChainHead:
        """The target's head with ``spec`` steps."""
        net = self.target.head
        found = self.heads.setdefault(spec, Derived())
        return found.of(list(net.parameters()), lambda: ChainHead(net, NoiseSchedule.of(spec)))

    def needed(self, method: str) -> MAR:
        """The small model; raises ``ValueError`` where there is none and ``method`` needs it."""
        if self.small is None:
            raise ValueError(
                f"cspd's {method} needs a small model beside the target, there is none"
            )
        return self.small


def steps_of(
    batch: Batch[methods.ContinuousMethod], models: MARModels
) -> tuple[Iterator[MARProgress], Certificate]:
    """The loop that draws ``batch``, and its certificate.

    Raises ``ValueError`` for a variant without the small model it needs and for a solver without
    distributions to compare.
    """
    settings: MARSettings = batch.target
    quick: HeadPrograms | MARGraphs | None = None if batch.on is settings else batch.on
    orders = random_orders(batch.generators, models.target.config.seq_len)
    if isinstance(batch.method, methods.CSpD):
        if batch.method.variant != "exact":
            return _between_models(batch.method, models, batch, orders)
        _check_solver(settings)
    head = models.head(settings.head_steps)
    normal = normals(batch.generators)
    sampler: MARSampler
    # a chain without noise has nothing to couple
    if isinstance(batch.method, methods.CSpD) and settings.temperature > 0:
        options = ChainOptions(settings.temperature)
        numbers = (normal, log_uniforms(batch.generators))
        window = batch.method.window or HEAD_STEPS
        sampler, claim = ChainSpeculation(head, *numbers, window, options, quick), EXACT
    elif settings.solver == "ddim":
        sampler, claim = Deterministic(head, normal), DDIM
    else:
        sampler, claim = Ancestral(head, normal, settings.temperature), PLAIN
    if quick is not None and isinstance(sampler, PlainSampler):
        sampler.run = quick.chains(sampler)
    conditions = None if quick is None else quick.conditions
    return decode_mar(models.target, batch.of, orders, sampler, settings, conditions), claim


def _check_solver(settings: MARSettings) -> None:
    if settings.solver != "ddpm":
        raise ValueError(
            "solver must be 'ddpm' for cspd, which compares the distributions of its steps, "
            f"got {settings.solver!r}"
        )


def _between_models(
    method: methods.CSpD, models: MARModels, batch: Batch[methods.ContinuousMethod], orders: Tensor
) -> tuple[Iterator[MARProgress], Certificate]:
    """Whole tokens drafted by the small model, by the paper or the release."""
    settings: MARSettings = batch.target
    small = models.needed(f"variant {method.variant!r}")
    _check_solver(settings)
    if settings.temperature == 0:
        raise ValueError(
            f"temperature must be above 0 for variant {method.variant!r}, got 0: its σ would be 0"
        )
    window = DraftWindow(method.window or ITERATIONS, method.prefill)
    normal = normals(batch.generators)
    log_uniform = log_uniforms(batch.generators)
    count, length = orders.shape
    steps = len(models.head(settings.head_steps).schedule) + 1
    width = models.target.config.token_dim
    noise = normal.draw([length] * count, steps * width).view(count, length, steps, width)
    numbers = [StreamNumbers(normal, log_uniform, b, count) for b in range(count)]
    target, draft = (
        CSpDModel(model, batch.of, count, settings) for model in (models.target, small)
    )
    both = CSpDBatch(target, draft, orders, noise, numbers)
    if method.variant == "paper":
        return decode_paper(both, window), PAPER
    if method.variant == "aligned":
        return decode_release(both, None, window), ALIGNED
    return decode_release(both, ReleaseRule(method.relax), window), RELEASE
