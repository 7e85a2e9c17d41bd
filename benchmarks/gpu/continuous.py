"""MAR-L: a picture's transformer passes, and the steps of its head.

As graphs (``compiled=True``); without them it is measured last, since it takes a minute a picture.
A round is a call of the diffusion head for the tokens of an iteration. All times come from whole
pictures; what is not the head, the transformer's passes, is ``fixed_ms``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.common import Row
from benchmarks.gpu.parts import Bench, Case
from benchmarks.gpu.published import filled, mar
from benchmarks.gpu.rounds import PLAIN
from specmm import methods
from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig
from specmm.image_ar.continuous.mar import MAR, MARConfig
from specmm.image_ar.continuous.orders import MARSettings
from specmm.image_ar.continuous.pipeline import MARPipeline

ITERATIONS = (64, 256)
TINY = dict(img_size=64, encoder_embed_dim=32, encoder_depth=1, encoder_num_heads=2) | dict(
    decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=2, diffloss_d=1, diffloss_w=32
)
TINY_KL = KLConfig(ch=32, ch_mult=(1, 1, 1, 1, 1), num_res_blocks=1, resolution=64)
STEPS, TINY_STEPS = 100, 10  # of the head
TINY_CALLS = 7


def pipeline(bench: Bench) -> MARPipeline:
    """MAR-L with the published autoencoder, on the device."""
    sizes: Any = TINY
    config = MARConfig(**sizes, class_num=5) if bench.tiny else mar("MAR-L")
    model = filled(lambda: MAR(config), bench.device, bench.dtype)
    kl = TINY_KL if bench.tiny else KLConfig()
    vae = filled(lambda: AutoencoderKL(kl), bench.device, torch.float32)
    pipe = MARPipeline(model, vae, settings=MARSettings(cfg=3.0))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@dataclass(frozen=True)
class Pictures:
    """Of ``iterations``, in a ``mode``."""

    iterations: int
    mode: str


def seconds_of(
    bench: Bench, pipe: MARPipeline, method: Any, what: Pictures, steps: int
) -> tuple[float, float]:
    """Seconds of a picture of ``steps`` head steps, and the head calls that a token waited for,
    summed over iterations. The least of some calls: other work only adds, and steps are told from
    differences.
    """
    options = {"num_iter": what.iterations, "head_steps": str(steps), "method": method}
    options["compiled"] = what.mode == "graph" and bench.on_gpu
    repeats = bench.repeats // 5 if what.mode == "graph" else 1
    seconds = []
    for _ in range(1 + max(TINY_CALLS if bench.tiny else 1, repeats)):  # one warms up
        start = bench.now()
        generator = torch.Generator().manual_seed(0)
        stats = pipe(classes=[0], generator=generator, output_type="latent", **options).stats
        seconds.append(bench.now() - start)
    return min(seconds[1:]), stats.head_calls / stats.tokens * what.iterations


def plain_row(bench: Bench, pipe: MARPipeline, what: Pictures) -> Row:
    """A step of the head is what half of the steps saves."""
    steps = TINY_STEPS if bench.tiny else STEPS
    with bench.memory() as memory:
        whole, half = (
            seconds_of(bench, pipe, methods.AR(), what, count) for count in (steps, steps // 2)
        )
    step = (whole[0] - half[0]) / (whole[1] - half[1])
    return {
        "method": PLAIN,
        "nodes": 1,
        "depth": 0,
        "round_ms": 1000 * step,
        "fixed_ms": 1000 * (whole[0] - step * whole[1]),
        "rounds": whole[1],
        "seconds": whole[0],
        **memory,
    }


def cases(bench: Bench) -> Iterator[Case]:
    """Plain sampling with few and with all iterations, then without graphs."""
    made = cache(lambda: pipeline(bench))

    def measure(what: Pictures) -> list[Row]:
        facts = {"model": f"MAR-L, {what.iterations} iterations", "batch": 1, "mode": what.mode}
        return [facts | plain_row(bench, made(), what)]

    counts = (4,) if bench.tiny else ITERATIONS
    for what in (*(Pictures(count, "graph") for count in counts), Pictures(counts[0], "eager")):
        name = f"{what.iterations} iterations, {what.mode}"
        yield Case(name, lambda given=what: measure(given))
