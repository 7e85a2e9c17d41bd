"""VAR and CoDe by N: seconds, memory, FID.

    python -m benchmarks.var pocket/var [--specialised FOLDER …]

The FLOP ideal of an N is the arithmetic of the large model alone over that of both in turn, without
pixels; ``realised`` is the measured speed-up of drawing tokens over it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from benchmarks.common import (
    CACHE,
    EMOJI,
    RESULTS,
    Budget,
    CacheFolder,
    DataFolder,
    Out,
    Row,
    Threads,
    environment,
    load_pipeline,
    write_results,
)
from benchmarks.memory import measured_peak
from benchmarks.quality import Real
from benchmarks.settings import Options
from benchmarks.sweep import Setting, draw_all, plot, quality, time_settings, timing
from specmm import methods, zoo
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.var import VARConfig


def settings_of(pipe: VARPipeline, specials: Sequence[VARPipeline]) -> list[Setting]:
    """Plain decoding and CoDe by N; then specialised pairs, each at its N."""
    scales = len(pipe.transformer.config.schedule)
    found = [Setting("ar", pipe, dict(method="ar"))]
    if pipe.small is not None:
        found += [
            Setting(f"code, N = {n}", pipe, dict(method=methods.CoDe(n)))
            for n in range(scales - 1, -1, -1)
        ]
        found.append(Setting("code, planner's N", pipe, dict(method="code")))
    for special in specials:
        n = special.settings.n
        found.append(Setting(f"code, N = {n}, specialised", special, dict(method=methods.CoDe(n))))
    return found


def ideal(pipe: VARPipeline, n: int, batch: int) -> float:
    """Arithmetic of the large model alone over that of CoDe with the first ``n`` scales by it."""
    large, small = pipe.transformer.config, pipe.small.config
    scales, guided = len(large.schedule), pipe.target().cfg > 0
    whole = flops(large, batch, guided, range(scales))
    parts = [flops(large, batch, guided, range(n)), flops(small, batch, guided, range(n, scales))]
    return whole / sum(parts)


def flops(config: VARConfig, batch: int, guided: bool, scales: range) -> float:
    """Of matrix products and attention of a model that draws ``scales``, the class's part included,
    which is once a picture; the first step reads the coarser ones, too.
    """
    if not scales:
        return 0.0
    rows = batch * (2 if guided else 1)
    condition = 12 * rows * config.embed_dim**2 * (1 if config.shared_aln else config.depth)
    steps = [(0 if k == scales.start else k, k) for k in scales]
    return condition + sum(forward_flops(config, batch, rows, *step) for step in steps)


def forward_flops(config: VARConfig, batch: int, rows: int, first: int, k: int) -> float:
    """Of a forward of scales ``first`` … ``k`` at once, with logits of ``k`` only.

    Under a mask every row is multiplied with every column, hidden or not. The last layer computes
    ``k`` only.
    """
    starts, width = config.schedule.starts, config.embed_dim
    seen = starts[k + 1]
    read, shown = seen - starts[first], config.schedule.tokens(k)
    matrices = 4 * width**2 + 2 * width * config.hidden_dim  # of a block, adaLN apart
    token_layers = (config.depth - 1) * read + shown
    keys = 2 * 3 * width**2 * (read - shown)  # the last layer's, of rows without logits
    head = 2 * batch * shown * width * config.vocab_size  # guidance mixes what it reads
    return rows * (2 * matrices * token_layers + 4 * seen * width * token_layers + keys) + head


def row(setting: Setting, plain: Setting, batch: int) -> Row:
    """Times, memory and the arithmetic's ideal of one setting."""
    classes = [0] * batch
    peak = measured_peak(lambda: setting.draw(classes, range(batch)), setting.pipe.device)
    found = timing(setting, plain) | {
        "batch": batch,
        "peak_mib": peak / 2**20,
        "token_seconds": loop(setting),
    }
    found |= forecast(setting, batch)
    return found | over_ideal(setting, plain, batch)


def forecast(setting: Setting, batch: int) -> Row:
    """The N of a setting and the planner's seconds a picture for it; nothing where not planned."""
    method = setting.call["method"]
    if setting.pipe.small is None:
        return {}
    made = setting.pipe.plan(batch)
    n = (
        method.n
        if isinstance(method, methods.CoDe)
        else made.n
        if method == "code"
        else len(made.forecasts) - 1
    )
    return {"n": n, "predicted": made.forecasts[n].seconds / batch}


def over_ideal(setting: Setting, plain: Setting, batch: int) -> Row:
    """The N of a setting of CoDe, its ideal and how much of it is realised; nothing for others."""
    method = setting.call["method"]
    if not isinstance(method, methods.CoDe) or method.n == -1:
        return {}
    best = ideal(setting.pipe, method.n, batch)
    return {"n": method.n, "ideal": best, "realised": loop(plain) / loop(setting) / best}


def loop(setting: Setting) -> float:
    """Median seconds of a batch's tokens, pixels left out."""
    return statistics.median(s.seconds for s in setting.stats)


def main(
    model: Annotated[str, typer.Argument(help="A VAR with its small model.")] = "pocket/var",
    specialised: Annotated[
        list[str], typer.Option(help="A pair that `specmm train code` made of it; may be repeated.")
    ] = [],  # noqa: B006  typer copies it
    repeats: Annotated[int, typer.Option(min=1, help="Timed batches of every setting.")] = 8,
    samples: Annotated[int, typer.Option(min=2, help="Samples of every setting for FID.")] = 1000,
    minutes: Annotated[
        float, typer.Option(min=0, help="For each batch size, and again for samples.")
    ] = 15.0,
    data: DataFolder = EMOJI,
    cache: CacheFolder = CACHE,
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Write ``var.json``, ``var.csv`` and ``var.png``."""
    torch.set_num_threads(threads)
    pipe = load_pipeline(model)
    specials = [load_pipeline(folder) for folder in specialised]
    facts = environment(model=model, dtype=str(pipe.transformer.dtype), cfg=pipe.settings.cfg)
    rows = list[Row]()
    for batch in (1, 16):
        settings = settings_of(pipe, specials)
        time_settings(
            settings, pipe.transformer.config.num_classes, batch, repeats, Budget(minutes)
        )
        rows += [row(s, settings[0], batch) for s in settings]
        write_results(out, "var", rows, facts)
    real = Real(Options(data=data, cache=cache))
    found = draw_all(settings, cache / "var", zoo.find(model), real, samples, 50, Budget(minutes))
    known = {name: quality(made, found["ar"], real) for name, made in found.items()}
    rows = [r | known.get(r["method"], {}) for r in rows]
    write_results(out, "var", rows, facts)
    plot([r for r in rows if r["batch"] == 16 and "fid" in r], real, out / "var.png")


if __name__ == "__main__":
    typer.run(main)
