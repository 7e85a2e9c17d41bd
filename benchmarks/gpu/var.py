"""VAR and CoDe on a GPU by batch size: eager, and with the whole picture as one captured graph.

At published sizes and pocket/var. Without a GPU captured means eager. Seconds are of tokens and
sums of codes; pixels, the same for all, are in another column.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.common import Row, dtype_name, load_pipeline
from benchmarks.gpu.parts import Bench, Case
from benchmarks.gpu.published import filled
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.image_ar.scales.collaborative import code_turns, draw_picture
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import VARSettings
from specmm.image_ar.scales.var import VAR, VARConfig, published
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from specmm.programs.graphs import Graph

BATCHES = (1, 16, 64)
SHARES = (8, 6, 5, 3, 0)  # scales that the large model draws
CODE = VARSettings(cfg=4.0, temperature=1.0, top_k=900, top_p=0.95)  # the release's demonstration
TINY = VARConfig(2, 64, 4, vocab_size=4096, num_classes=5, patch_nums=(1, 2, 3, 4))


@dataclass
class Run:
    """Seconds by part and repeat of a mode; the first ``n`` scales are the large model's."""

    mode: str
    n: int
    pipe: VARPipeline
    picture: Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # of labels and uniforms
    tokens: list[float] = field(default_factory=list)
    pixels: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of a batch's tokens, the median, the warm-up apart."""
        return statistics.median(self.tokens[1:])

    def once(self, labels: Tensor, numbers: Tensor) -> None:
        """Draw one batch and note the seconds."""
        clock = Clock(labels.is_cuda)
        with clock("tokens"):
            _, sums, _ = self.picture(labels, numbers)
        with clock("pixels"):
            self.pipe.decode(sums)
        self.tokens.append(clock.seconds["tokens"])
        self.pixels.append(clock.seconds["pixels"])


def published_pair(bench: Bench) -> Iterator[Case]:
    """VAR-d30 refined by VAR-d16, as in CoDe."""

    @cache
    def made() -> VARPipeline:
        depths = (2, 1) if bench.tiny else (30, 16)
        configs = [TINY if bench.tiny else published(depth) for depth in depths]
        place = bench.device, bench.dtype
        models = (filled(lambda c=config: VAR(c), *place) for config in configs)
        large, small = (model.to(bench.dtype) for model in models)  # its tables, too
        for model in (large, small):
            model.reset_mask()
        config = large.config
        sizes = VQVAEConfig(config.vocab_size, config.z_channels, ch=32, ch_mult=(1, 2, 2))
        vqvae = VQVAE(replace(sizes, patch_nums=config.patch_nums)).eval().to(bench.device)
        return VARPipeline(large, vqvae, small, CODE)

    return _cases(bench, "VAR-d30 and d16", made)


def pocket(bench: Bench) -> Iterator[Case]:
    """pocket/var."""
    made = cache(lambda: load_pipeline("pocket/var", device=bench.device))
    return _cases(bench, "pocket/var", made)


def _cases(bench: Bench, model: str, made: Callable[[], VARPipeline]) -> Iterator[Case]:
    for batch in BATCHES[:1] if bench.tiny else BATCHES:
        yield Case(f"batch {batch}", lambda batch=batch: measure(bench, made(), model, batch))


def measure(bench: Bench, pipe: VARPipeline, model: str, batch: int) -> list[Row]:
    """Rows of every mode and N at ``batch``, interleaved; speed-ups over the fastest plain."""
    scales = len(pipe.transformer.config.schedule)
    shares = [scales, *(n for n in SHARES if n < scales)]
    runs = []
    for n in shares:
        turns = code_turns(pipe.transformer, pipe.small or pipe.transformer, n)
        eager = partial(draw_picture, turns, pipe.vae.quantize, pipe.target())
        runs += [Run("eager", n, pipe, eager), Run("graph", n, pipe, Graph(eager))]
    labels = torch.arange(batch, device=pipe.device) % pipe.transformer.config.num_classes
    repeats = max(1, bench.repeats // 3)
    with bench.memory() as memory, torch.inference_mode():
        for repeat in range(repeats + 1):  # the first warms up
            seeds = range(repeat * batch, (repeat + 1) * batch)
            generators = [torch.Generator(pipe.device).manual_seed(seed) for seed in seeds]
            numbers = Uniforms(generators).draw(pipe.transformer.config.schedule.length)
            for run in runs:
                run.once(labels, numbers)
    plain = min(run.seconds for run in runs if run.n == scales)
    facts = {"model": model, "batch": batch, "repeats": repeats, **memory}
    facts["dtype"] = dtype_name(pipe)
    return [facts | _row(run, scales, plain) for run in runs]


def _row(run: Run, scales: int, plain: float) -> Row:
    return {
        "mode": run.mode,
        "method": "ar" if run.n == scales else f"code, N = {run.n}",
        "seconds": run.seconds,
        "pixels": statistics.median(run.pixels[1:]),
        "speedup": plain / run.seconds,
    }
