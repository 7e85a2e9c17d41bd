"""Exact acceleration of a token's denoising chain: draft a window of steps, verify all of them in one head call.

Source: speculation on a diffusion chain (De Bortoli et al. 2025, arXiv 2501.05370), with the generic maximal coupling,
since MAR's learned variances differ from a drafter's. Three things are our own. The chain is run in its natural
parameter η = √ᾱ x / (1 - ᾱ), in which every step adds Δ·w, where Δ is the gain in signal-to-noise ratio and w ~
N(x0, 1/Δ) if the clean token is x0: w is "what the step takes x0 to be", and it is w that is drafted and verified. The
drafter holds a Gaussian belief N(m, V) about x0, so that a whole window is drawn at once and its law is known in closed
form. And V comes with the target's last answer, for free: a learned variance above the posterior's is Δ²·Var(x0) in η,
which makes the drafts bend as the target's predictions do instead of repeating the last one.

Shape letters: R rows (tokens) still running, S steps, W points of a window, C token width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specmm.image_ar.continuous.chain import BoundHead, finite
from specmm.image_ar.continuous.coupling import Normal, counts_by_picture, draw_residual, log_ratio
from specmm.image_ar.continuous.diffusion import Schedule
from specmm.image_ar.continuous.noise import Numbers

Belief = Literal["gaussian", "frozen"]


class WindowTables:
    """Numbers [S + W, 8, 1] of every point, float32; the last point is repeated for windows that reach beyond it.

    snr; the gain Δ of the step into the point, its inverse root, log 1/Δ (all for temperature 1); what turns η into x;
    the shares of η and eps in x0 = a·η - b·eps; half the log of the learned variance's range in the step *out*.
    """

    def __init__(self, schedule: Schedule, window: int, device: torch.device) -> None:
        level = schedule.alphas_cumprod.flip(0)
        snr, rest = level / (1 - level), 1 - level
        gain = torch.cat([snr[:1], snr.diff()])
        spread = (schedule.betas.log() - schedule.posterior_log_variance_clipped).flip(0) / 2
        columns = [
            snr,
            gain,
            gain.rsqrt(),
            -gain.log(),
            rest / level.sqrt(),
            rest / level,
            (rest / level).sqrt(),
            spread,
        ]
        table = torch.stack(columns, dim=1)
        self.rows = torch.cat([table, table[-1:].expand(window, -1)]).float().to(device)[:, :, None]
        self.steps, self.window = len(level), window

    def at(self, k: list[int], width: int) -> list[Tensor]:
        """The columns [R or 1, W + 1, 1] for windows of ``width`` points that start at steps ``k`` [R]."""
        if len(set(k)) == 1:
            return list(self.rows[None, k[0] : k[0] + width + 1].unbind(2))
        span = torch.arange(width + 1, device=self.rows.device)
        return list(self.rows[torch.tensor(k, device=self.rows.device)[:, None] + span].unbind(2))


@dataclass
class Speculated:
    """Finished tokens [R, C], head calls each of them took part in [R], and ``calls`` made one after another."""

    tokens: Tensor
    row_calls: list[int]
    calls: int


@dataclass
class Options:
    """How to speculate; ``residual=False`` leaves the residual out, which is wrong: the tests' broken twin."""

    temperature: float = 1.0
    belief: Belief = "gaussian"
    residual: bool = True


@torch.inference_mode()
def speculate(
    bound: BoundHead,
    tables: WindowTables,
    rows: list[int],
    normal: Numbers,
    log_uniform: Numbers,
    options: Options | None = None,
) -> Speculated:
    """Tokens [R, C] with the law of ``chain.ancestral``, in fewer sequential head calls.

    ``rows[b]`` of the R tokens belong to picture b and take their numbers from its streams. Raises ``ValueError`` when
    a chain leaves the finite numbers, and for a temperature that is not above 0: such a chain has no laws to couple.
    """
    options = options or Options()
    if options.temperature <= 0:
        raise ValueError(f"temperature must be above 0 to speculate, got {options.temperature}: run the chain plainly")
    run = _Run(bound, tables, rows, normal, log_uniform, options)
    while run.left:
        run.round()
    return Speculated(finite(run.tokens), run.row_calls, run.calls)


class _Run:
    """The rounds of one ``speculate``: rows still running (``left``), their η, step k and belief N(mean, var)."""

    def __init__(
        self,
        bound: BoundHead,
        tables: WindowTables,
        rows: list[int],
        normal: Numbers,
        log_uniform: Numbers,
        options: Options,
    ) -> None:
        self.bound, self.tables, self.options = bound, tables, options
        self.normal, self.log_uniform, self.batch = normal, log_uniform, len(rows)
        self.heat = options.temperature
        self.eta = normal.draw(rows, bound.head.channels) / tables.rows[0, 4]
        self.mean, self.var = torch.zeros_like(self.eta), torch.ones_like(self.eta)  # latents have unit variance
        self.k = [0] * len(bound)
        self.pictures = [b for b, n in enumerate(rows) for _ in range(n)]
        self.left, self.tokens = list(range(len(bound))), torch.empty_like(self.eta)
        self.calls, self.row_calls = 0, [0] * len(bound)

    def round(self) -> None:
        """Draft, one head call, accept; rows that are through leave."""
        width = min(self.tables.window, self.tables.steps - min(self.k))
        columns = self.tables.at(self.k, width)
        points, steps, q = self._draft(columns, width)
        p, wider = self._score(points, columns)
        kept = self._accept(steps, p, q)
        through = [i for i, (k, n) in enumerate(zip(self.k, kept, strict=True)) if k + n == self.tables.steps - 1]
        self._advance(points, p, wider, q, columns[1], kept)
        if through:
            self._finish(through, p.mean, kept)

    def _draft(self, columns: list[Tensor], width: int) -> tuple[Tensor, Tensor, Normal]:
        """Points η [R, W, C], the drafted steps w [R, W-1, C] between them, and their laws q."""
        snr, gain, root, log_gain = (c[:, :-1] for c in columns[:4])
        noise = self._numbers(self.normal, self.tables.window * self.eta.shape[1])
        noise = noise.view(len(self.left), -1, self.eta.shape[1])[:, :width]
        noise = noise if self.heat == 1.0 else noise * self.heat
        clean = torch.addcmul(self.mean, self.var.sqrt(), noise[:, 0])[:, None]
        steps = torch.addcmul(clean, root[:, 1:], noise[:, 1:])
        moved = (gain[:, 1:] * steps).cumsum(1)
        points = torch.cat([self.eta[:, None], self.eta[:, None] + moved], dim=1)
        surer = torch.addcmul(torch.ones_like(snr), self.var[:, None], snr - snr[:, :1])  # [R, W, C]
        seen = torch.addcmul(self.mean[:, None], self.var[:, None], moved[:, :-1])
        mean = torch.cat([self.mean[:, None], seen / surer[:, 1:-1]], dim=1)
        log_var = surer.log().diff(dim=1).add_(log_gain[:, 1:] + 2 * math.log(self.heat))
        return points, steps, Normal(mean, log_var)

    def _score(self, points: Tensor, columns: list[Tensor]) -> tuple[Normal, Tensor]:
        """The target's laws p of the steps out of the points, and the log of how much wider they are than 1/Δ."""
        to_x, x_share, eps_share, spread = (c[:, :-1] for c in columns[4:])
        eps, v = self.bound.window(self.k, points * to_x)
        clean = torch.addcmul(points * x_share, eps, eps_share, value=-1)
        wider = torch.addcmul(spread, spread, v)
        self.calls += 1
        for row in self.left:
            self.row_calls[row] += 1
        return Normal(clean, wider + (columns[3][:, 1:] + 2 * math.log(self.heat))), wider

    def _accept(self, steps: Tensor, p: Normal, q: Normal) -> list[int]:
        """How many drafted steps of each row are kept."""
        drafted = steps.shape[1]
        luck = self._numbers(self.log_uniform, self.tables.window - 1)[:, :drafted]
        good = luck < log_ratio(Normal(p.mean[:, :-1], p.log_var[:, :-1]), q, steps)
        runs: list[int] = good.to(torch.int64).cumprod(1).sum(1).tolist() if drafted else [0] * len(steps)
        return [min(run, self._drafted(k, drafted)) for run, k in zip(runs, self.k, strict=True)]

    def _drafted(self, k: int, drafted: int) -> int:
        """Drafted steps of a row at step ``k`` that are not beyond its last point."""
        return min(drafted, self.tables.steps - 1 - k)

    def _advance(self, points: Tensor, p: Normal, wider: Tensor, q: Normal, gain: Tensor, kept: list[int]) -> None:
        """Move every row behind the steps it keeps and one more, of the target's own law or of what q lacks of it."""
        drafted, device = q.mean.shape[1], points.device
        where = (torch.arange(len(kept), device=device), torch.tensor(kept, device=device))
        law = p[where]
        step = law.sample(self._numbers(self.normal, points.shape[-1]))
        rejected = [i for i, n in enumerate(kept) if n < self._drafted(self.k[i], drafted)]
        if rejected and self.options.residual:
            rows = torch.tensor(rejected, device=device)
            pictures = [self.pictures[i] for i in rejected]
            q = q[where[0][rows], where[1][rows]]
            step[rows] = draw_residual(law[rows], q, pictures, self.batch, self.normal, self.log_uniform)
        gain = gain.expand(len(kept), -1, -1)[where[0], where[1] + 1]
        self.eta = torch.addcmul(points[where], gain, step)
        self.k = [k + n + 1 for k, n in zip(self.k, kept, strict=True)]
        self.mean, self.var = law.mean, torch.zeros_like(step)
        if self.options.belief == "gaussian":
            excess = wider[where].expm1().clamp_(min=0)  # Δ·Var(x0) by the target
            self.mean = torch.addcmul(law.mean, excess, step).div_(1 + excess)
            self.var = excess / (gain * (1 + excess))

    def _finish(self, through: list[int], clean: Tensor, kept: list[int]) -> None:
        """Take rows ``through`` out: their last point's clean token is the token, since the last step adds no noise."""
        for i in through:
            self.tokens[self.left[i]] = clean[i, kept[i]]
        gone = set(through)
        stay = [i for i in range(len(kept)) if i not in gone]
        self.left, self.k, self.pictures = ([v[i] for i in stay] for v in (self.left, self.k, self.pictures))
        if stay:
            rows = torch.tensor(stay, device=clean.device)
            self.bound.keep(rows)
            self.eta, self.mean, self.var = self.eta[rows], self.mean[rows], self.var[rows]

    def _numbers(self, numbers: Numbers, width: int) -> Tensor:
        """The next ``width`` numbers of every row left: [R, width]."""
        return numbers.draw(counts_by_picture(self.pictures, self.batch), width)
