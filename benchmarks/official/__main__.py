"""Time the releases' own code beside ours and write ``official.json`` and ``.csv``.

    python -m benchmarks.official --var FOLDER --code FOLDER [--model pocket/var] [--model d16]

A model is a folder or name of ours, or ``dN`` or ``dN,dM`` for random weights of published sizes.
Both sides compute in float32. Ratios are theirs over ours, medians of calls with pixels; before
anything is timed, greedy pictures of both must agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.common import (
    RESULTS,
    Budget,
    Out,
    Row,
    Threads,
    environment,
    read_results,
    write_results,
)
from benchmarks.official import scales
from benchmarks.official.duel import Duel, Program
from specmm import methods
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import Sampling, VARSettings
from specmm.image_ar.scales.tuning import random_var
from specmm.image_ar.scales.var import published
from specmm.image_ar.scales.vqvae import VQVAE, VQVAEConfig

NAME = "official"
DEMO = VARSettings(cfg=4.0, temperature=1.0, top_k=900, top_p=0.95)  # of the release's notebook
AGREE = 0.98  # of greedy tokens: rounding decides between near ties, and then what follows
KEYS = ("release", "model", "method", "batch", "threads")


def scale_pipeline(model: str) -> VARPipeline:
    """A VAR in float32: a folder or name of ours, or random weights of published sizes."""
    depths = model.removeprefix("d").replace(",d", ",").split(",")
    if not all(depth.isdigit() for depth in depths):
        pipe = VARPipeline.from_pretrained(model, torch_dtype=torch.float32, device="cpu")
    else:
        torch.manual_seed(0)
        made = [random_var(published(int(depth)), torch.float32) for depth in depths]
        vae = VQVAE(VQVAEConfig()).eval()
        pipe = VARPipeline(made[0], vae, made[1] if len(made) > 1 else None, DEMO)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def scale_programs(
    pipe: VARPipeline, sampling: Sampling, var: Path | None, code: Path | None, n: list[int]
) -> Iterator[tuple[str, str, Program, Program]]:
    """The release, the method and the two programs of every comparison."""
    large, small, vae = pipe.transformer, pipe.small, pipe.vae
    if var is not None:
        theirs = scales.official_var(scales.VAR_SOURCE.load(var), large, vae, sampling)
        yield "VAR", "ar", theirs, scales.ours(pipe, methods.resolve_scales("ar"), sampling)
    if code is not None and small is not None:
        release = scales.CODE_SOURCE.load(code)
        for first in n:
            theirs = scales.official_code(release, large, small, vae, sampling, first)
            name = f"code, N = {first}"
            yield "CoDe", name, theirs, scales.ours(pipe, methods.CoDe(first), sampling)


def compare(duel: Duel, repeats: int, budget: Budget) -> Row:
    """Agreement, times and memory; raises ``ValueError`` where the two draw other pictures."""
    agreement = duel.agreement()
    if agreement["token_equal"] < AGREE:
        raise ValueError(
            f"{duel.method} must draw the release's greedy tokens, got "
            f"{agreement['token_equal']:.1%} of them"
        )
    duel.race(repeats, budget)
    return duel.row() | agreement | duel.peaks()


def merged(out: Path, rows: list[Row]) -> list[Row]:
    """``rows`` and those of earlier runs that they do not replace."""
    before = (read_results(out, NAME) or {"rows": []})["rows"]
    new = [[row[key] for key in KEYS] for row in rows]
    return [row for row in before if [row[key] for key in KEYS] not in new] + rows


def main(
    var: Annotated[Path | None, typer.Option(help="A clone of FoundationVision/VAR.")] = None,
    code: Annotated[Path | None, typer.Option(help="A clone of czg1225/CoDe.")] = None,
    model: Annotated[
        list[str], typer.Option(help="A VAR of ours, or dN or dN,dM: random; may be repeated.")
    ] = ["pocket/var"],  # noqa: B006  typer copies it
    n: Annotated[str, typer.Option(help="CoDe's N, with commas between.")] = "5",
    batches: Annotated[str, typer.Option(help="Pictures at once, with commas between.")] = "1,16",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each.")] = 16,
    minutes: Annotated[
        float, typer.Option(min=0, help="For each row: no new repeat begins after so many.")
    ] = 2.0,
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Measure and write ``official.json`` and ``.csv``."""
    torch.set_num_threads(threads)
    if var is None and code is None:
        raise ValueError("at least one release must be given, got none: --var FOLDER …")
    by = [int(value) for value in n.split(",")]
    rows = list[Row]()
    for name in model:
        pipe = scale_pipeline(name)
        sampling = pipe.target(temperature=1.0)
        for release, method, theirs, ours in scale_programs(pipe, sampling, var, code, by):
            for batch in map(int, batches.split(",")):
                classes = pipe.transformer.config.num_classes
                duel = Duel(method, theirs.fresh(), ours.fresh(), batch, classes)
                facts = {"release": release, "model": name, "threads": threads}
                rows.append(facts | compare(duel, repeats, Budget(minutes)))
                write_results(out, NAME, merged(out, rows), environment(dtype="torch.float32"))


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
