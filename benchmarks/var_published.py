"""CoDe over its FLOP ideal at the published sizes: VAR-d30 refined by VAR-d16, the pair of CoDe's release.

    python -m benchmarks.var_published

Their weights cannot be had here and are random: what a step costs does not depend on them. Tokens only are counted, for
the tokenizer is a small one. Under the paper's pair a picture takes 18 seconds of two cores and 11 GiB of memory in
float32; in batches the first scales' weights, read for a few rows each, weigh less.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from benchmarks.common import RESULTS, Budget, Dtype, Out, Row, Threads, environment, write_results
from benchmarks.sweep import Setting, time_settings
from benchmarks.var import loop, over_ideal
from specmm import methods
from specmm.dtypes import LARGE, choose_dtype, named_dtype
from specmm.image_ar.scales.ladder import PATCHES_256
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.settings import Settings
from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from specmm.layout import lay_weights

DEMO = Settings(cfg=4.0, temperature=1.0, top_k=900, top_p=0.95)


def published(depth: int, dtype: torch.dtype) -> VAR:
    """A model of the sizes of VAR-d``depth``."""
    return lay_weights(VAR(VARConfig(depth=depth, embed_dim=64 * depth, num_heads=depth)).to(dtype).eval(), long=True)


def pair(large: int, small: int, dtype: torch.dtype) -> VARPipeline:
    """Both models behind a tokenizer of their sizes but for its decoder, whose time is not counted."""
    vae = VQVAE(VQVAEConfig(vocab_size=4096, z_channels=32, ch=32, ch_mult=(1, 2, 2), patch_nums=PATCHES_256))
    pipe = VARPipeline(published(large, dtype), vae.eval(), published(small, dtype), DEMO)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def row(setting: Setting, plain: Setting, batch: int) -> Row:
    """A setting's seconds a picture, its speed-up, and how much of the arithmetic's ideal that is."""
    seconds = loop(setting)
    times = {"batch": batch, "seconds": seconds / batch, "speedup": loop(plain) / seconds}
    return {"method": setting.name} | times | over_ideal(setting, plain, batch) | {"repeats": len(setting.stats)}


def main(
    large: Annotated[int, typer.Option(min=1, help="Depth of the large model.")] = 30,
    small: Annotated[int, typer.Option(min=1, help="Depth of the small one.")] = 16,
    by: Annotated[str, typer.Option(help="CoDe's N, with commas between.")] = "9,8,7,6,0",
    batches: Annotated[str, typer.Option(help="Pictures at once, with commas between.")] = "1,4",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each setting.")] = 3,
    minutes: Annotated[float, typer.Option(min=0, help="No new repeat of a batch size begins after so many.")] = 5.0,
    dtype: Dtype = "auto",
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Measure and write ``var_published.json`` and ``.csv``."""
    torch.set_num_threads(threads)
    held = named_dtype(dtype) or choose_dtype(LARGE, long=True)
    pipe = pair(large, small, held)
    rows, sizes = list[Row](), f"VAR-d{large} and VAR-d{small}, random weights"
    for batch in map(int, batches.split(",")):
        settings = [Setting("ar", pipe, dict(method="ar"))]
        settings += [Setting(f"code, N = {n}", pipe, dict(method=methods.CoDe(int(n)))) for n in by.split(",")]
        time_settings(settings, pipe.transformer.config.num_classes, batch, repeats, Budget(minutes))
        rows += [row(s, settings[0], batch) for s in settings]
        write_results(out, "var_published", rows, environment(model=sizes, dtype=str(held)))


if __name__ == "__main__":
    typer.run(main)
