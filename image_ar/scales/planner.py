"""What drawing a picture costs: arithmetic, memory traffic and launches by scale, hence time and
memory by N of CoDe.

The counts are exact for the matrix products and attention, and approximate for what surrounds them;
a ``Machine`` turns them into seconds, from its data sheet or fitted to seconds measured here
(``tuning.calibrate``). Shape letters: B batch, R rows (2B under guidance), C width, V vocabulary, K
scales, L tokens of all scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specmm.image_ar.scales.var import VARConfig

LAUNCHES_OF_LAYER, LAUNCHES_AROUND = (
    18,
    40,
)  # kernels of a block; of embedding, head, sampling and painting
PASSES = 12  # over a layer's activations; and over the logits when they are filtered and sampled
ALIVE = 9  # rows of a layer at once: itself, normed, fused projection, queries and keys normalised
SPEEDUP_WANTED, FID_ALLOWED, MARGIN = 1.7, 1.1, 1.05


@dataclass(frozen=True)
class Work:
    """Floating-point operations, bytes moved, kernels launched."""

    flops: float = 0.0
    bytes: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops, self.bytes + other.bytes, self.launches + other.launches
        )


@dataclass(frozen=True)
class Machine:
    """Seconds a unit of each: per flop, per byte, per launch; and those of decoding one picture's
    f_hat.
    """

    per_flop: float
    per_byte: float
    per_launch: float
    decode: float = 0.0

    def seconds(self, work: Work) -> float:
        """What ``work`` takes; the three add up, as they do where nothing overlaps."""
        return (
            self.per_flop * work.flops
            + self.per_byte * work.bytes
            + self.per_launch * work.launches
        )


@dataclass(frozen=True)
class Draw:
    """How a run is set up: ``batch`` pictures, with guidance or not, weights of ``width`` bytes a
    number.
    """

    batch: int
    guided: bool = True
    width: int = 4

    @property
    def rows(self) -> int:
        """R."""
        return self.batch * (2 if self.guided else 1)


@dataclass(frozen=True)
class Forecast:
    """CoDe with the first ``n`` scales by the large model: seconds a batch, peak bytes (without the
    tokenizer's, the same for all n), speedup over n = K.
    """

    n: int
    seconds: float
    memory: float
    speedup: float


def matrix_weights(config: VARConfig) -> int:
    """Weights of one block's matrices, adaLN apart."""
    return 4 * config.embed_dim**2 + 2 * config.embed_dim * config.hidden_dim


def parameters(config: VARConfig) -> int:
    """All weights of a model, to within its biases."""
    ada = 6 * config.embed_dim**2 * (1 if config.shared_aln else config.depth)
    return (
        config.depth * matrix_weights(config)
        + ada
        + config.embed_dim * (config.vocab_size + config.num_classes)
    )


def condition_work(config: VARConfig, draw: Draw) -> Work:
    """The class's part, once a picture."""
    weights = 6 * config.embed_dim**2 * (1 if config.shared_aln else config.depth)
    return Work(2 * draw.rows * weights, weights * draw.width, 2 * config.depth)


def forward_work(config: VARConfig, draw: Draw, first: int, k: int) -> Work:
    """A forward of scales ``first`` … ``k`` at once, of which only ``k`` gets logits, with sampling
    and painting.

    Under a mask every row is multiplied with every column, hidden or not. The last layer computes
    ``k`` only.
    """
    starts, width = config.schedule.starts, config.embed_dim
    steps, seen, shown = starts[k + 1] - starts[first], starts[k + 1], config.schedule.tokens(k)
    matrices = matrix_weights(config)
    token_layers = (config.depth - 1) * steps + shown
    keys = 2 * 3 * width**2 * (steps - shown)  # of the rows that the last layer only looks at
    flops = draw.rows * (2 * matrices * token_layers + 4 * seen * width * token_layers + keys)
    head = 2 * draw.batch * shown * width * config.vocab_size  # guidance mixes what it reads
    traffic = config.depth * (
        matrices + 2 * draw.rows * seen * width + PASSES * draw.rows * steps * width
    )
    logits = 4 * PASSES * draw.batch * shown * config.vocab_size
    launches = LAUNCHES_OF_LAYER * config.depth + LAUNCHES_AROUND
    return Work(flops + head, draw.width * (traffic + width * config.vocab_size) + logits, launches)


def model_work(config: VARConfig, draw: Draw, scales: range) -> list[Work]:
    """Each step of a model that draws ``scales``, catching up with the coarser ones in the first."""
    if not scales:
        return []
    steps = [forward_work(config, draw, 0, scales.start)]
    steps += [forward_work(config, draw, k, k) for k in scales[1:]]
    return [condition_work(config, draw) + steps[0], *steps[1:]]


def model_memory(config: VARConfig, draw: Draw, scales: range) -> float:
    """Peak bytes beside the weights: keys and values of all but the last scale, and a layer or the
    logits.

    A layer holds about ``ALIVE`` times its rows at its busiest, in attention; in the last scale,
    whose keys and values are not stored, those of its own layer once more.
    """
    if not scales:
        return 0.0
    starts, width = config.schedule.starts, config.embed_dim
    stored = 0 if len(scales) == 1 else starts[scales[-1]]
    first, last = starts[scales.start + 1], config.schedule.tokens(scales[-1])
    joined = starts[scales[-1] + 1] if stored else 0
    cache = 2 * config.depth * draw.rows * stored * width * draw.width
    layer = draw.rows * width * draw.width * max(ALIVE * first, ALIVE * last + 2 * joined)
    logits = 4 * 4 * draw.batch * last * config.vocab_size
    given = draw.rows * 6 * config.depth * width * draw.width
    return float(cache + given + max(layer, logits))


def forecast(large: VARConfig, small: VARConfig, draw: Draw, machine: Machine) -> list[Forecast]:
    """Time and memory of CoDe for every N from 0 (the small model alone) to K (the large alone)."""
    scales = len(large.schedule)
    seconds = [_seconds(large, small, draw, machine, n) for n in range(scales + 1)]
    return [
        Forecast(
            n, seconds[n], _memory(large, small, draw, n, scales), seconds[scales] / seconds[n]
        )
        for n in range(scales + 1)
    ]


def _seconds(large: VARConfig, small: VARConfig, draw: Draw, machine: Machine, n: int) -> float:
    work = model_work(large, draw, range(n)) + model_work(
        small, draw, range(n, len(large.schedule))
    )
    return sum(machine.seconds(w) for w in work) + draw.batch * machine.decode


def _memory(large: VARConfig, small: VARConfig, draw: Draw, n: int, scales: int) -> float:
    weights = (parameters(large) if n else 0) + (parameters(small) if n < scales else 0)
    parts = model_memory(large, draw, range(n)), model_memory(small, draw, range(n, scales))
    return weights * draw.width + max(parts)


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
        best, why = max(good, key=lambda f: f.speedup), f"the fastest with FID at most {limit:.2f}"
    else:
        quick = [f for f in forecasts[1:-1] if f.speedup >= SPEEDUP_WANTED]
        best = quick[-1] if quick else max(forecasts[1:], key=lambda f: f.speedup)
        why = (
            f"the largest with {SPEEDUP_WANTED}x"
            if quick
            else f"the fastest, none reaches {SPEEDUP_WANTED}x"
        )
    if best.n != last.n and best.speedup < MARGIN:
        best, why = last, "the large model alone: no switch is faster"
    return best.n, f"n {best.n}: {why}; {best.speedup:.2f}x expected"


def fit(work: Sequence[Work], seconds: Sequence[float]) -> Machine:
    """The machine whose seconds are nearest to those measured, relative to each; no rate below 0."""
    counts = torch.tensor([[w.flops, w.bytes, w.launches] for w in work], dtype=torch.float64)
    rows = counts / torch.tensor(seconds, dtype=torch.float64)[:, None]
    kept, rates = [0, 1, 2], torch.zeros(3, dtype=torch.float64)
    while kept:
        scale = rows[:, kept].norm(dim=0)
        found = torch.linalg.lstsq(
            rows[:, kept] / scale, torch.ones(len(rows), 1, dtype=torch.float64)
        ).solution[:, 0]
        if (found >= 0).all():
            rates[kept] = found / scale
            break
        del kept[int(found.argmin())]
    return Machine(*rates.tolist())
