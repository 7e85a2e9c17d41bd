"""What this machine makes of two VARs: the planner's rates, fitted to measured scales, and method
``auto``.

Shape letters: B batch, K scales.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specmm.image_ar.scales.drawing import ScaleDrawing
from specmm.image_ar.scales.feature_map import FeatureMap
from specmm.image_ar.scales.planner import (
    Draw,
    Forecast,
    Machine,
    Work,
    choose_n,
    fit,
    forecast,
    model_work,
)
from specmm.image_ar.scales.sampling import Inverse, Sampler, Sampling
from specmm.image_ar.scales.session import Session
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.verified import Verified
from specmm.image_ar.scales.vqvae import VQVAE
from specmm.randomness import Uniforms
from specmm.stats import Clock

REPEATS = 2  # of a measured run; the fastest counts
CLEAR_WIN = 1.05


@dataclass(frozen=True)
class Plan:
    """The planner's choice for ``code`` with all it was chosen from."""

    n: int
    reason: str
    forecasts: list[Forecast]
    machine: Machine

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        table = [
            {"n": f.n, "seconds": f.seconds, "memory": f.memory, "speedup": f.speedup}
            for f in self.forecasts
        ]
        return {
            "choice": self.n,
            "reason": self.reason,
            "machine": vars(self.machine),
            "by_n": table,
        }

    def lines(self) -> list[str]:
        """For people."""
        rows = [
            f"n {f.n:2d}  {f.seconds:8.3f} s  {f.memory / 2**20:8.1f} MiB  {f.speedup:5.2f}x"
            for f in self.forecasts
        ]
        return [*rows, f"choice  {self.reason}"]


def plan(
    large: VAR, small: VAR, vqvae: VQVAE, batch: int, sampling: Sampling, fid: dict[str, float]
) -> Plan:
    """Measure both models at this batch, forecast every N and choose one."""
    setup = setup_of(large, batch, sampling)
    machine = calibrate(large, small, vqvae, batch, sampling)
    forecasts = forecast(large.config, small.config, setup, machine)
    return Plan(*choose_n(forecasts, fid), forecasts, machine)


def setup_of(model: VAR, batch: int, sampling: Sampling) -> Draw:
    """The planner's words for a run."""
    return Draw(batch, sampling.cfg > 0, model.dtype.itemsize)


def calibrate(large: VAR, small: VAR, vqvae: VQVAE, batch: int, sampling: Sampling) -> Machine:
    """Rates fitted to every scale of both models and to the small one's catching up at the last
    scale.
    """
    scales, work, seconds = len(large.config.schedule), list[Work](), list[float]()
    for model, steps in (
        (large, range(scales)),
        (small, range(scales)),
        (small, range(scales - 1, scales)),
    ):
        work += model_work(model.config, setup_of(model, batch, sampling), steps)
        seconds += time_steps(model, vqvae, batch, sampling, steps)
    return replace(fit(work, seconds), decode=time_decode(vqvae))


@torch.inference_mode()
def time_steps(
    model: VAR, vqvae: VQVAE, batch: int, sampling: Sampling, steps: range
) -> list[float]:
    """Seconds of each of ``steps``, drawn after the scales before them; conditions count for the
    first.
    """
    labels = torch.zeros(batch, dtype=torch.int64, device=model.device)
    runs = []
    for _ in range(REPEATS + 1):
        feature_map = FeatureMap(vqvae.quantize, batch)
        uniforms = Inverse(sampling, _uniforms(batch, model.device), len(feature_map.schedule))
        if steps.start:
            _draw_scales(model, labels, sampling, feature_map, uniforms, range(steps.start))
        begin, marks = _now(model.device), list[float]()
        _draw_scales(model, labels, sampling, feature_map, uniforms, steps, marks)
        runs.append([b - a for a, b in zip([begin, *marks], marks, strict=False)])
    return [min(times) for times in zip(*runs[1:], strict=True)]


@torch.inference_mode()
def time_decode(vqvae: VQVAE) -> float:
    """Seconds of decoding one picture."""
    side, weight = vqvae.config.schedule.sides[-1], vqvae.post_quant_conv.weight
    f_hat, times = torch.zeros(1, vqvae.config.z_channels, side, side, device=weight.device), []
    for _ in range(REPEATS + 1):
        begin = _now(weight.device)
        vqvae.decode(f_hat)
        times.append(_now(weight.device) - begin)
    return min(times)


@torch.inference_mode()
def speculation_wins(
    large: VAR, small: VAR, vqvae: VQVAE, batch: int, sampling: Sampling, window: int, until: int
) -> tuple[bool, str]:
    """Whether exact speculation beats plain decoding here by CLEAR_WIN, each run on the same
    pictures; and a reason.
    """
    if sampling.more_smooth:
        return False, "plain decoding: soft codes cannot be verified"
    labels = torch.arange(batch, device=large.device) % large.config.num_classes
    best = {"plain": float("inf"), "speculative": float("inf")}
    for _ in range(REPEATS + 1):
        for name in best:
            begin, feature_map = _now(large.device), FeatureMap(vqvae.quantize, batch)
            uniforms = _uniforms(batch, large.device)
            if name == "speculative":
                list(
                    Verified(
                        large, small, feature_map, labels, sampling, uniforms, window, until
                    ).rounds(Clock())
                )
            else:
                numbers = Inverse(sampling, uniforms, len(feature_map.schedule))
                _draw_scales(
                    large, labels, sampling, feature_map, numbers, range(len(feature_map.schedule))
                )
            best[name] = min(best[name], _now(large.device) - begin)
    gain = best["plain"] / best["speculative"]
    wins = gain >= CLEAR_WIN
    return (
        wins,
        f"{'speculation' if wins else 'plain decoding'}: speculation measured at {gain:.2f}x plain decoding",
    )


def _draw_scales(
    model: VAR,
    labels: Tensor,
    sampling: Sampling,
    feature_map: FeatureMap,
    uniforms: Sampler,
    steps: range,
    marks: list[float] | None = None,
) -> None:
    """Draw ``steps``, noting the time after each in ``marks``."""
    drawing = ScaleDrawing(Session(model, labels, sampling, steps[-1]), feature_map, uniforms)
    for k in steps:
        drawing.step(k)
        if marks is not None:
            marks.append(_now(model.device))


def _uniforms(batch: int, device: torch.device) -> Uniforms:
    return Uniforms([torch.Generator(device).manual_seed(i) for i in range(batch)])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
