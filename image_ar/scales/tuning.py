"""Chooses CoDe's N by measurements on this machine.

Every scale of both models is timed, and the small model's first pass over all of them; the time for
an N is a sum of these. Shape letters: B batch, K scales, L tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from specmm.choose.contest import MARGIN, Measured
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.watching import tell
from specmm.image_ar.scales.collaborative import LARGE, Turn, alternate
from specmm.image_ar.scales.next_scale import FeatureMap
from specmm.image_ar.scales.sampling import InverseCDF, Sampling, VARSettings
from specmm.image_ar.scales.scale_schedule import ScaleSchedule
from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE

REPEATS = 2  # measured runs after a warm-up; the fastest counts
CALIBRATION = 3 * (REPEATS + 1)  # runs: two models, and the small one's first pass over all scales
ALIVE = 9  # rows of a layer at once: itself, normed, fused projection, queries and keys normalised
SPEEDUP_WANTED = 1.7
FID_ALLOWED = 1.1


@dataclass(frozen=True)
class Forecast:
    """CoDe with the first ``n`` scales by the large model.

    Seconds a batch, peak bytes (without the tokenizer's, the same for all n), speedup over n = K.
    """

    n: int
    seconds: float
    memory: float
    speedup: float


@dataclass(frozen=True)
class ScaleSeconds:
    """Seconds of each scale by the ``large`` and by the ``small`` model [K], of the small model's
    pass over all scales at once (``prefill``), and of decoding a batch.
    """

    large: list[float]
    small: list[float]
    prefill: float
    decode: float

    def of(self, n: int, schedule: ScaleSchedule) -> float:
        """Seconds of CoDe with ``n`` scales by the large model. The small model begins with a pass
        over n + 1 scales, whose time grows with their tokens.
        """
        if not n < len(self.large):
            return sum(self.large) + self.decode
        first, all_of = schedule.starts[1], schedule.starts[-1]
        share = (schedule.starts[n + 1] - first) / max(all_of - first, 1)
        begin = self.small[0] + share * (self.prefill - self.small[0])
        return sum(self.large[:n]) + begin + sum(self.small[n + 1 :]) + self.decode


@dataclass(frozen=True)
class CoDePlan:
    """The N chosen for ``code``, with the forecast of every N."""

    n: int
    reason: str
    forecasts: list[Forecast]
    seconds: ScaleSeconds

    def as_dict(self) -> dict[str, object]:
        """The plan for JSON."""
        return {
            "choice": self.n,
            "reason": self.reason,
            "seconds": vars(self.seconds),
            "by_n": [vars(f) for f in self.forecasts],
        }

    def lines(self) -> list[str]:
        """The plan as text, line by line."""
        rows = [
            f"n {f.n:2d}  {f.seconds:8.3f} s  {f.memory / 2**20:8.1f} MiB  {f.speedup:5.2f}x"
            for f in self.forecasts
        ]
        return [*rows, f"choice  {self.reason}"]


def plan_code(
    large: VAR, small: VAR, vqvae: VQVAE, batch: int, sampling: Sampling, settings: VARSettings
) -> CoDePlan:
    """Measures the cost of ``code`` by N for ``batch`` pictures at once, and chooses an N.

    ``settings`` hold the FID by N, and the N that the models are specialised for, if any.
    """
    seconds = measured(large, small, vqvae, batch, sampling)
    sizes = (large.config, small.config)
    forecasts = forecast(*sizes, seconds, batch, sampling, large.dtype)
    n, reason = specialised(settings) or choose_n(forecasts, settings.fid)
    return CoDePlan(n, reason, forecasts, seconds)


def specialised(settings: VARSettings) -> tuple[int, str] | None:
    """The N that two models were specialised for, with the reason as text; None for other pairs."""
    if settings.n == -1:
        return None
    return settings.n, f"n {settings.n}: what the models were specialised for"


def needed(small: VAR | None, method: str) -> VAR:
    """``small``; raises ``ValueError`` where there is none and ``method`` needs it."""
    if small is None:
        raise ValueError(
            f"method {method!r} needs a small model, give from_pretrained(…, small=folder) "
            "or use ar"
        )
    return small


def measured(large: VAR, small: VAR, vqvae: VQVAE, batch: int, sampling: Sampling) -> ScaleSeconds:
    """Seconds of every scale for ``batch`` pictures."""
    runs = count(1)

    def called() -> None:
        tell(Measured(next(runs), CALIBRATION))

    everything = range(len(large.config.schedule))
    common = (vqvae, batch, sampling)
    of_large = time_steps(large, *common, everything, called)
    of_small = time_steps(small, *common, everything, called)
    [prefill] = time_steps(small, *common, everything[-1:], called)
    return ScaleSeconds(of_large, of_small, prefill, batch * time_decode(vqvae))


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
    """A function that draws scales with ``model`` and returns each one's seconds."""
    uniforms = Uniforms([torch.Generator(model.device).manual_seed(i) for i in range(len(labels))])
    sampler = InverseCDF(sampling, uniforms, len(feature_map.schedule))

    def draw(steps: range) -> list[float]:
        turns = [Turn(LARGE, model, steps)]
        seconds = []
        begin = _now(model.device)
        for _ in alternate(turns, feature_map, labels, sampling, lambda _: sampler, Clock()):
            end = _now(model.device)
            seconds.append(end - begin)
            begin = end
        return seconds

    return draw


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def parameters(config: VARConfig) -> int:
    """All weights of a model, to within its biases."""
    block = 4 * config.embed_dim**2 + 2 * config.embed_dim * config.hidden_dim
    condition = 6 * config.embed_dim**2 * (1 if config.shared_aln else config.depth)
    ends = config.embed_dim * (config.vocab_size + config.num_classes)
    return config.depth * block + condition + ends


def model_memory(
    config: VARConfig, scales: range, batch: int, sampling: Sampling, dtype: torch.dtype
) -> float:
    """Peak bytes beside the weights: the KV cache, and a layer's activations or the logits.

    At its peak, in attention, a layer holds about ``ALIVE`` times its rows. In the last scale,
    which is not cached, it also holds the joined keys and values of all scales.
    """
    if not scales:
        return 0.0
    rows = batch * (2 if sampling.cfg > 0 else 1)
    starts = config.schedule.starts
    width = config.embed_dim
    cached = 0 if len(scales) == 1 else starts[scales[-1]]
    first = starts[scales.start + 1]
    last = config.schedule.tokens(scales[-1])
    joined = starts[scales[-1] + 1] if cached else 0
    cache = 2 * config.depth * rows * cached * width * dtype.itemsize
    layer = rows * width * dtype.itemsize * max(ALIVE * first, ALIVE * last + 2 * joined)
    logits = 4 * 4 * batch * last * config.vocab_size
    condition = rows * 6 * config.depth * width * dtype.itemsize
    return float(cache + condition + max(layer, logits))


def forecast(
    large: VARConfig,
    small: VARConfig,
    seconds: ScaleSeconds,
    batch: int,
    sampling: Sampling,
    dtype: torch.dtype,
) -> list[Forecast]:
    """Time and memory of CoDe for every N from 0 (the small model alone) to K (the large alone)."""
    scales = len(large.schedule)
    load = (batch, sampling, dtype)
    total_seconds = seconds.of(scales, large.schedule)
    forecasts = []
    for n in range(scales + 1):
        coarse, fine = range(n), range(n, scales)
        weights = (parameters(large) if coarse else 0) + (parameters(small) if fine else 0)
        peak = max(model_memory(large, coarse, *load), model_memory(small, fine, *load))
        took = seconds.of(n, large.schedule)
        forecasts.append(Forecast(n, took, weights * dtype.itemsize + peak, total_seconds / took))
    return forecasts


def choose_n(
    forecasts: Sequence[Forecast], fid: Mapping[str, float] | None = None
) -> tuple[int, str]:
    """The N to run and why.

    With measured ``fid`` by N (keys as text): the fastest whose FID is at most FID_ALLOWED times
    the large model's. Without: the largest N, hence the most of the large model, that is
    SPEEDUP_WANTED times as fast; else the fastest. The large model alone where nothing beats it by
    MARGIN.
    """
    last = forecasts[-1]
    measured = {int(n): value for n, value in (fid or {}).items()}
    if last.n in measured:
        limit = FID_ALLOWED * measured[last.n]
        good = [f for f in forecasts if measured.get(f.n, float("inf")) <= limit]
        best = max(good, key=lambda f: f.speedup)
        why = f"the fastest with FID at most {limit:.2f}"
    elif quick := [f for f in forecasts[1:-1] if f.speedup >= SPEEDUP_WANTED]:
        best = quick[-1]
        why = f"the largest with {SPEEDUP_WANTED}x"
    else:
        best = max(forecasts[1:], key=lambda f: f.speedup)
        why = f"the fastest, none reaches {SPEEDUP_WANTED}x"
    if best.n != last.n and best.speedup < MARGIN:
        best = last
        why = "the large model alone: no switch is faster"
    return best.n, f"n {best.n}: {why}; {best.speedup:.2f}x expected"
