"""CoDe over its FLOP ideal at the published sizes: VAR-d30 refined by VAR-d16, the pair of CoDe's release.

    python -m benchmarks.var_published

Their weights cannot be had here and are random: what a step costs does not depend on them. Tokens only are counted, for
the tokenizer is a small one. Under the paper's pair a picture takes half a minute of two cores and 9 GiB of memory.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from benchmarks.common import RESULTS, Budget, Dtype, Out, Threads, environment, write_results
from benchmarks.sweep import Setting, time_settings
from benchmarks.var import loop, over_ideal
from specmm import methods
from specmm.dtypes import named_dtype
from specmm.image_ar.scales.ladder import PATCHES_256
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.settings import Settings
from specmm.image_ar.scales.var import VAR, VARConfig
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig
from specmm.layout import lay_weights

DEMO = Settings(cfg=4.0, temperature=1.0, top_k=900, top_p=0.95)


def published(depth: int, dtype: torch.dtype) -> VAR:
    """A model of the sizes of VAR-d``depth``."""
    return lay_weights(VAR(VARConfig(depth=depth, embed_dim=64 * depth, num_heads=depth)).to(dtype).eval())


def pair(large: int, small: int, dtype: torch.dtype) -> VARPipeline:
    """Both models behind a tokenizer of their sizes but for its decoder, whose time is not counted."""
    vae = VQVAE(VQVAEConfig(vocab_size=4096, z_channels=32, ch=32, ch_mult=(1, 2, 2), patch_nums=PATCHES_256))
    pipe = VARPipeline(published(large, dtype), vae.eval(), published(small, dtype), DEMO)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main(
    large: Annotated[int, typer.Option(min=1, help="Depth of the large model.")] = 30,
    small: Annotated[int, typer.Option(min=1, help="Depth of the small one.")] = 16,
    by: Annotated[str, typer.Option(help="CoDe's N, with commas between.")] = "9,8,7,6,0",
    batch: Annotated[int, typer.Option(min=1, help="Pictures at once.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each setting.")] = 3,
    minutes: Annotated[float, typer.Option(min=0, help="No new repeat begins after so many.")] = 9.0,
    dtype: Dtype = "bfloat16",
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Measure and write ``var_published.json`` and ``.csv``."""
    torch.set_num_threads(threads)
    pipe = pair(large, small, named_dtype(dtype))
    settings = [Setting("ar", pipe, dict(method="ar"))]
    settings += [Setting(f"code, N = {n}", pipe, dict(method=methods.CoDe(int(n)))) for n in by.split(",")]
    time_settings(settings, pipe.transformer.config.num_classes, batch, repeats, Budget(minutes))
    plain = settings[0]
    rows = [
        {"method": s.name, "batch": batch, "seconds": loop(s) / batch, "speedup": loop(plain) / loop(s)}
        | over_ideal(s, plain, batch)
        | {"repeats": len(s.stats)}
        for s in settings
    ]
    sizes = f"VAR-d{large} and VAR-d{small}, random weights"
    write_results(out, "var_published", rows, environment(model=sizes, dtype=dtype))


if __name__ == "__main__":
    typer.run(main)
