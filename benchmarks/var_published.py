"""CoDe over its FLOP ideal at the published sizes: VAR-d30 refined by VAR-d16.

    python -m benchmarks.var_published

The weights are random: the cost of a step does not depend on them. Only tokens are counted, since
the tokenizer is a small one. With this pair a picture takes 18 seconds of two cores and 11 GiB of
memory in float32; in batches the first scales' weights, read for a few rows each, weigh less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from benchmarks.common import RESULTS, Budget, Dtype, Out, Row, Threads, environment, write_results
from benchmarks.sweep import Setting, time_settings
from benchmarks.var import loop, over_ideal
from specmm import methods
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import Sampling, VARSettings
from specmm.image_ar.scales.tuning import Forecast, plan_of_sizes, random_var, random_vqvae
from specmm.image_ar.scales.var import published
from specmm.loading.hardware import LARGE, choose_dtype, named_dtype

DEMO = VARSettings(cfg=4.0, temperature=1.0, top_k=900, top_p=0.95)


def pair(large: int, small: int, dtype: torch.dtype) -> VARPipeline:
    """Both models with a tokenizer of their sizes, but a small decoder, which is not timed."""
    models = [random_var(published(depth), dtype) for depth in (large, small)]
    pipe = VARPipeline(models[0], random_vqvae(models[0].config), models[1], DEMO)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def row(setting: Setting, plain: Setting, batch: int, forecasts: Sequence[Forecast]) -> Row:
    """A setting's seconds a picture, the forecast, its speed-up, and the realised share."""
    seconds = loop(setting)
    method = setting.call["method"]
    expected = forecasts[method.n if isinstance(method, methods.CoDe) else -1].seconds
    times = {
        "batch": batch,
        "seconds": seconds / batch,
        "predicted": expected / batch,
        "speedup": loop(plain) / seconds,
    }
    return (
        {"method": setting.name}
        | times
        | over_ideal(setting, plain, batch)
        | {"repeats": len(setting.stats)}
    )


def main(
    large: Annotated[int, typer.Option(min=1, help="Depth of the large model.")] = 30,
    small: Annotated[int, typer.Option(min=1, help="Depth of the small one.")] = 16,
    by: Annotated[str, typer.Option(help="CoDe's N, with commas between.")] = "9,8,7,6,0",
    batches: Annotated[str, typer.Option(help="Pictures at once, with commas between.")] = "1,4",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each setting.")] = 3,
    minutes: Annotated[
        float, typer.Option(min=0, help="No new repeat of a batch size begins after so many.")
    ] = 5.0,
    dtype: Dtype = "auto",
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Measure and write ``var_published.json`` and ``.csv``."""
    torch.set_num_threads(threads)
    held = named_dtype(dtype) or choose_dtype(LARGE, long=True)
    counts = [int(batch) for batch in batches.split(",")]
    sizes = (published(large), published(small))
    sampling = Sampling(DEMO.cfg, DEMO.top_k, DEMO.top_p)
    planned = {batch: plan_of_sizes(*sizes, batch, sampling, held).forecasts for batch in counts}
    pipe = pair(large, small, held)
    rows = list[Row]()
    what = f"VAR-d{large} and VAR-d{small}, random weights"
    for batch in counts:
        settings = [Setting("ar", pipe, dict(method="ar"))]
        settings += [
            Setting(f"code, N = {n}", pipe, dict(method=methods.CoDe(int(n))))
            for n in by.split(",")
        ]
        time_settings(
            settings, pipe.transformer.config.num_classes, batch, repeats, Budget(minutes)
        )
        rows += [row(s, settings[0], batch, planned[batch]) for s in settings]
        write_results(out, "var_published", rows, environment(model=what, dtype=str(held)))


if __name__ == "__main__":
    typer.run(main)
