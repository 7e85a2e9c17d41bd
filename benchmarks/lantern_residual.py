"""What LANTERN++ draws from after a rejection: tau, total variation and likelihood by residual.

``python -m benchmarks.lantern_residual``: the samples of the quality benchmark (the same seeds and
classes, the same cache), without the real pictures that FID needs. Writes ``lantern_residual``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.common import (
    CACHE,
    EMOJI,
    RESULTS,
    CacheFolder,
    DataFolder,
    Out,
    Row,
    Threads,
    dtype_name,
    environment,
    label,
    load_pipeline,
    write_results,
)
from benchmarks.quality import make_samples
from benchmarks.samples import SampleSet
from benchmarks.settings import Options
from recipes import emoji
from specmm import methods

METHODS = (
    methods.AR(),
    methods.LanternPP(),
    methods.LanternPP(residual="release"),
    methods.LanternPP(lambda_=40.0, k=100),
)


def training_labels(folder: Path) -> np.ndarray:
    """Classes of the training pictures in the order of ``emoji.load``, without drawing them."""
    emoji.fetch(folder)
    subgroup, found = emoji.subgroup_of_name(folder), []
    for style in emoji.STYLES:
        icons = json.loads((folder / f"json/{style}.json").read_text())["icons"]
        for name in icons:
            trains = emoji._fraction(f"{style}/{name}") >= emoji.HELD_OUT
            if trains and subgroup.get(name) in emoji.CLASSES:
                found.append(emoji.CLASSES.index(subgroup[name]))
    return np.array(found)


def measure(
    chosen: Sequence[methods.Method], name: str, out: Path, data: Path, options: Options
) -> None:
    """Make what samples of the ``chosen`` methods are missing, then measure the first of each into
    ``name``.
    """
    torch.set_num_threads(options.threads)
    pipe = load_pipeline(options.model, torch.float32)
    sets = {
        label(m): SampleSet.of(options.cache, pipe, options.model, m, options.batch) for m in chosen
    }
    make_samples(pipe, chosen, sets, training_labels(data), options)
    rows = [row_of(method, found, options.samples) for method, found in sets.items()]
    facts = environment(model=str(options.model), dtype=dtype_name(pipe))
    write_results(out, name, rows, facts)


def row_of(method: str, found: SampleSet, samples: int) -> Row:
    """What the first ``samples`` of a method were, with the seconds they took."""
    (likelihood,) = found.arrays("log_likelihood", limit=samples)
    counts = found.counts(samples)
    return {
        "method": method,
        "samples": len(likelihood),
        "tau": counts["tokens"] / max(counts["rounds"], 1),
        "tv": counts["tv"],
        "certificate": counts["certificate"],
        "log_likelihood": float(likelihood.mean()),
        "seconds": counts["seconds"],
    }


def main(
    samples: Annotated[int, typer.Option(help="A method.")] = 640,
    cache: CacheFolder = CACHE,
    data: DataFolder = EMOJI,
    out: Out = RESULTS,
    threads: Threads = 1,
) -> None:
    """Make what samples are missing, then measure the first of each method."""
    options = Options(samples=samples, cache=cache, data=data, threads=threads)
    measure(METHODS, "lantern_residual", out, data, options)


if __name__ == "__main__":
    typer.run(main)
