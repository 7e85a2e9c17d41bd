"""Decisions measured on this machine: CoDe's N.

The planner's rates are fitted to timed scales. Shape letters: B batch, K scales.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from specmm import methods
from specmm.choose.contest import Measured
from specmm.hardware import MOST, prepack
from specmm.image_ar.scales.collaborative import LARGE, Turn, alternate
from specmm.image_ar.scales.next_scale import FeatureMap
from specmm.image_ar.scales.planner import (
    Forecast,
    Machine,
    Work,
    Workload,
    choose_n,
    fit,
    forecast,
    model_work,
    parameters,
)
from specmm.image_ar.scales.sampling import InverseCDF, Sampling, VARSettings
from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from specmm.randomness import Uniforms
from specmm.stats import Clock
from specmm.watching import tell

REPEATS = 2  # of a measured run, after one that is not counted; the fastest counts
CALIBRATION = 3 * (REPEATS + 1)  # runs: two models, and the small one's prefill
MEASURED_BLOCKS = 2  # of published sizes, in place of all


@dataclass(frozen=True)
class CoDePlan:
    """The planner's choice for ``code`` with all it was chosen from."""

    n: int
    reason: str
    forecasts: list[Forecast]
    machine: Machine

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "choice": self.n,
            "reason": self.reason,
            "machine": vars(self.machine),
            "by_n": [vars(f) for f in self.forecasts],
        }

    def lines(self) -> list[str]:
        """For people."""
        rows = [
            f"n {f.n:2d}  {f.seconds:8.3f} s  {f.memory / 2**20:8.1f} MiB  {f.speedup:5.2f}x"
            for f in self.forecasts
        ]
        return [*rows, f"choice  {self.reason}"]


@dataclass
class Chooser:
    """Decides what a method leaves open, once for each number of pictures at once and sampling.

    ``settings`` hold the FID by N, and the N of specialised models.
    """

    large: VAR
    small: VAR | None
    vqvae: VQVAE
    settings: VARSettings
    plans: dict[tuple[int, Sampling], CoDePlan] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget what was measured: the models have moved."""
        self.plans.clear()

    def settle(
        self, method: methods.ScalesMethod, batch: int, sampling: Sampling
    ) -> tuple[methods.ScalesMethod, str]:
        """``method`` with nothing left open for ``batch`` pictures at once, and the reason."""
        match method:
            case methods.CoDe(n=-1):
                if self.settings.n != -1:
                    return replace(method, n=self.settings.n), self._specialised()
                made = self.plan(batch, sampling)
                return replace(method, n=made.n), made.reason
            case methods.Auto():
                return (methods.AR(), "plain decoding: no other method is exact")
        return method, ""

    def plan(self, batch: int, sampling: Sampling) -> CoDePlan:
        """What ``code`` costs by N, measured once, and the N it takes.

        Raises ``ValueError`` without a small model.
        """
        small = needed(self.small, "code")
        key = batch, sampling
        if key not in self.plans:
            machine = calibrate(self.large, small, self.vqvae, batch, sampling)
            load = workload(self.large, batch, sampling)
            forecasts = forecast(self.large.config, small.config, load, machine)
            n, reason = choose_n(forecasts, self.settings.fid)
            if self.settings.n != -1:
                n = self.settings.n
                reason = self._specialised()
            self.plans[key] = CoDePlan(n, reason, forecasts, machine)
        return self.plans[key]

    def _specialised(self) -> str:
        return f"n {self.settings.n}: what the models were specialised for"


def needed(small: VAR | None, method: str) -> VAR:
    """``small``; raises ``ValueError`` where there is none and ``method`` needs it."""
    if small is None:
        raise ValueError(
            f"method {method!r} needs a small model, give from_pretrained(…, small=folder) "
            "or use ar"
        )
    return small


def workload(model: VAR, batch: int, sampling: Sampling) -> Workload:
    """What the planner has to know of a run."""
    return Workload(batch, sampling.cfg > 0, model.dtype.itemsize)


def calibrate(large: VAR, small: VAR, vqvae: VQVAE, batch: int, sampling: Sampling) -> Machine:
    """Rates fitted to every scale of both models and to the small one's prefill of all but one.

    Watchers are told after each of ``CALIBRATION`` runs.
    """
    runs = count(1)

    def ran() -> None:
        tell(Measured(next(runs), CALIBRATION))

    scales = len(large.config.schedule)
    work: list[Work] = []
    seconds: list[float] = []
    everything = range(scales)
    for model, steps in ((large, everything), (small, everything), (small, everything[-1:])):
        work += model_work(model.config, workload(model, batch, sampling), steps)
        seconds += time_steps(model, vqvae, batch, sampling, steps, ran)
    return replace(fit(work, seconds), decode=time_decode(vqvae))


@torch.inference_mode()
def time_steps(
    model: VAR,
    vqvae: VQVAE,
    batch: int,
    sampling: Sampling,
    steps: range,
    ran: Callable[[], object],
) -> list[float]:
    """Seconds of each of ``steps``, after the scales before them; the first with the condition.

    ``ran`` is called after each of ``REPEATS`` + 1 runs.
    """
    labels = torch.zeros(batch, dtype=torch.int64, device=model.device)
    runs = []
    for _ in range(REPEATS + 1):
        feature_map = FeatureMap(vqvae.quantize, batch)
        draw = _plain(model, feature_map, labels, sampling)
        if steps.start:
            draw(range(steps.start))
        runs.append(draw(steps))
        ran()
    return [min(times) for times in zip(*runs[1:], strict=True)]


@torch.inference_mode()
def time_decode(vqvae: VQVAE) -> float:
    """Seconds of decoding one picture."""
    side = vqvae.config.schedule.sides[-1]
    device = vqvae.post_quant_conv.weight.device
    f_hat = torch.zeros(1, vqvae.config.z_channels, side, side, device=device)
    times = []
    for _ in range(REPEATS + 1):
        begin = _now(device)
        vqvae.decode(f_hat)
        times.append(_now(device) - begin)
    return min(times)


def _plain(
    model: VAR, feature_map: FeatureMap, labels: Tensor, sampling: Sampling
) -> Callable[[range], list[float]]:
    """A function that draws scales by ``model`` and returns the seconds of each."""
    uniforms = _uniforms(len(labels), model.device)
    sampler = InverseCDF(sampling, uniforms, len(feature_map.schedule))

    def draw(steps: range) -> list[float]:
        own = [Turn(LARGE, model, steps)]
        seconds = []
        begin = _now(model.device)
        for _ in alternate(own, feature_map, labels, sampling, lambda _: sampler, Clock()):
            end = _now(model.device)
            seconds.append(end - begin)
            begin = end
        return seconds

    return draw


def _uniforms(batch: int, device: torch.device) -> Uniforms:
    return Uniforms([torch.Generator(device).manual_seed(i) for i in range(batch)])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def random_var(config: VARConfig, dtype: torch.dtype, whole: VARConfig | None = None) -> VAR:
    """A model of random weights, prepacked as a loaded one of size ``whole`` (its own) would be."""
    model = VAR(config).to(dtype).eval()
    return prepack(model, long=True) if parameters(whole or config) <= MOST else model


def random_vqvae(config: VARConfig) -> VQVAE:
    """A tokenizer that fits ``config`` and, but for its decoder, has the published one's sizes."""
    sizes = VQVAEConfig(config.vocab_size, config.z_channels, ch=32, ch_mult=(1, 2, 2))
    return VQVAE(replace(sizes, patch_nums=config.patch_nums)).eval()


def plan_of_sizes(
    large: VARConfig, small: VARConfig, batch: int, sampling: Sampling, dtype: torch.dtype
) -> CoDePlan:
    """CoDe by N for models of these sizes without their weights: time depends on sizes alone.

    The rates are fitted to ``MEASURED_BLOCKS`` blocks of each width. Seconds are those of tokens,
    without decoding pixels.
    """
    short_large, short_small = (
        random_var(replace(config, depth=MEASURED_BLOCKS), dtype, config)
        for config in (large, small)
    )
    measured = calibrate(short_large, short_small, random_vqvae(large), batch, sampling)
    machine = replace(measured, decode=0.0)
    load = Workload(batch, sampling.cfg > 0, dtype.itemsize)
    forecasts = forecast(large, small, load, machine)
    return CoDePlan(*choose_n(forecasts), forecasts, machine)
