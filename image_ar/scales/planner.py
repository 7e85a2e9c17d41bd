"""What drawing a picture costs: arithmetic, memory traffic and launches, hence CoDe's N.

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

LAUNCHES_OF_LAYER = 18  # kernels of a block
LAUNCHES_AROUND = 40  # of embedding, head, sampling and the feature map
PASSES = 12  # over a layer's activations; and over the logits when they are filtered and sampled
ALIVE = 9  # rows of a layer at once: itself, normed, fused projection, queries and keys normalised
SPEEDUP_WANTED = 1.7
FID_ALLOWED = 1.1
MARGIN = 1.05


@dataclass(frozen=True)
class Work:
    """Floating-point operations, bytes moved, kernels launched."""

    flops: float = 0.0
    bytes: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        launches = self.launches + other.launches
        return Work(self.flops + other.flops, self.bytes + other.bytes, launches)


@dataclass(frozen=True)
class Machine:
    """Seconds per flop, per byte and per launch, and of decoding one picture's f_hat."""

    per_flop: float
    per_byte: float
    per_launch: float
    decode: float = 0.0

    def seconds(self, work: Work) -> float:
        """Seconds of ``work``; the three add up, as they do where nothing overlaps."""
        computing = self.per_flop * work.flops + self.per_byte * work.bytes
        return computing + self.per_launch * work.launches


@dataclass(frozen=True)
class Workload:
    """``batch`` pictures, with guidance or not, by weights of ``width`` bytes a number."""

    batch: int
    guided: bool = True
    width: int = 4

    @property
    def rows(self) -> int:
        """R."""
        return self.batch * (2 if self.guided else 1)


@dataclass(frozen=True)
class Forecast:
    """CoDe with the first ``n`` scales by the large model.

    Seconds a batch, peak bytes (without the tokenizer's, the same for all n), speedup over n = K.
    """

    n: int
    seconds: float
    memory: float
    speedup: float


def _matrix_weights(config: VARConfig) -> int:
    """Weights of one block's matrices, adaLN apart."""
    return 4 * config.embed_dim**2 + 2 * config.embed_dim * config.hidden_dim


def _condition_weights(config: VARConfig) -> int:
    """Weights of adaLN in all blocks."""
    return 6 * config.embed_dim**2 * (1 if config.shared_aln else config.depth)


def parameters(config: VARConfig) -> int:
    """All weights of a model, to within its biases."""
    ends = config.embed_dim * (config.vocab_size + config.num_classes)
    return config.depth * _matrix_weights(config) + _condition_weights(config) + ends


def condition_work(config: VARConfig, load: Workload) -> Work:
    """The class's part, once a picture."""
    weights = _condition_weights(config)
    return Work(2 * load.rows * weights, weights * load.width, 2 * config.depth)


def forward_work(config: VARConfig, load: Workload, first: int, k: int) -> Work:
    """A forward of scales ``first`` … ``k`` at once, with logits and sampling of ``k`` only.

    Under a mask every row is multiplied with every column, hidden or not. The last layer computes
    ``k`` only.
    """
    starts = config.schedule.starts
    width = config.embed_dim
    seen = starts[k + 1]
    rows = seen - starts[first]
    shown = config.schedule.tokens(k)
    matrices = _matrix_weights(config)
    token_layers = (config.depth - 1) * rows + shown
    keys = 2 * 3 * width**2 * (rows - shown)  # the last layer's, of rows without logits
    flops = load.rows * (2 * matrices * token_layers + 4 * seen * width * token_layers + keys)
    head = 2 * load.batch * shown * width * config.vocab_size  # guidance mixes what it reads
    layer = matrices + 2 * load.rows * seen * width + PASSES * load.rows * rows * width
    traffic = config.depth * layer + width * config.vocab_size
    logits = 4 * PASSES * load.batch * shown * config.vocab_size
    launches = LAUNCHES_OF_LAYER * config.depth + LAUNCHES_AROUND
    return Work(flops + head, load.width * traffic + logits, launches)


def model_work(config: VARConfig, load: Workload, scales: range) -> list[Work]:
    """Each step of a model that draws ``scales``; the first also prefills the coarser ones."""
    if not scales:
        return []
    prefill = condition_work(config, load) + forward_work(config, load, 0, scales.start)
    return [prefill, *(forward_work(config, load, k, k) for k in scales[1:])]


def model_memory(config: VARConfig, load: Workload, scales: range) -> float:
    """Peak bytes beside the weights: the KV cache, and a layer's activations or the logits.

    A layer holds about ``ALIVE`` times its rows at its busiest, in attention; in the last scale,
    whose keys and values are not cached, those of its own layer once more.
    """
    if not scales:
        return 0.0
    starts = config.schedule.starts
    width = config.embed_dim
    cached = 0 if len(scales) == 1 else starts[scales[-1]]
    first = starts[scales.start + 1]
    last = config.schedule.tokens(scales[-1])
    joined = starts[scales[-1] + 1] if cached else 0
    cache = 2 * config.depth * load.rows * cached * width * load.width
    layer = load.rows * width * load.width * max(ALIVE * first, ALIVE * last + 2 * joined)
    logits = 4 * 4 * load.batch * last * config.vocab_size
    condition = load.rows * 6 * config.depth * width * load.width
    return float(cache + condition + max(layer, logits))


def forecast(
    large: VARConfig, small: VARConfig, load: Workload, machine: Machine
) -> list[Forecast]:
    """Time and memory of CoDe for every N from 0 (the small model alone) to K (the large alone)."""
    scales = len(large.schedule)
    seconds, memory = [], []
    for n in range(scales + 1):
        coarse = range(n)
        fine = range(n, scales)
        work = model_work(large, load, coarse) + model_work(small, load, fine)
        seconds.append(sum(map(machine.seconds, work)) + load.batch * machine.decode)
        weights = (parameters(large) if coarse else 0) + (parameters(small) if fine else 0)
        peak = max(model_memory(large, load, coarse), model_memory(small, load, fine))
        memory.append(weights * load.width + peak)
    return [
        Forecast(n, seconds[n], memory[n], seconds[scales] / seconds[n]) for n in range(scales + 1)
    ]


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


def fit(work: Sequence[Work], seconds: Sequence[float]) -> Machine:
    """The machine whose seconds are nearest to those measured, relative to each; no rate < 0."""
    counts = torch.tensor([[w.flops, w.bytes, w.launches] for w in work], dtype=torch.float64)
    rows = counts / torch.tensor(seconds, dtype=torch.float64)[:, None]
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    rates = torch.zeros(3, dtype=torch.float64)
    kept = [0, 1, 2]
    while kept:
        scale = rows[:, kept].norm(dim=0)
        found = torch.linalg.lstsq(rows[:, kept] / scale, ones).solution[:, 0]
        if (found >= 0).all():
            rates[kept] = found / scale
            break
        del kept[int(found.argmin())]
    return Machine(*rates.tolist())
