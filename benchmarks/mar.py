"""MAR and CSpD by setting: seconds, FID, acceptance, claim, and the front of FID against time.

    python -m benchmarks.mar pocket/mar
    python -m benchmarks.mar pocket/mar --compile --threads 1

Beside our methods are the baselines that published speed-ups leave out: fewer iterations, fewer
head steps, and the large model alone with as many passes as the release takes. With ``--compile``
only seconds are measured, of plain decoding and exact speculation as they are and compiled, in
float32 and bfloat16.
"""

from __future__ import annotations

import math
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
from benchmarks.quality import Real
from benchmarks.settings import Options
from benchmarks.sweep import Setting, draw_all, on_front, plot, quality, time_settings, timing
from specmm import methods, zoo
from specmm.image_ar.continuous.pipeline import MARPipeline

WINDOWS = (4, 8)  # of ``release``, in iterations


def passes(iterations: int, window: int, prefill: float) -> int:
    """Passes of the large model in the release's run: its iterations, then one for every window."""
    own = math.floor(prefill * iterations) + 1
    return own + len([k for k in range(own, iterations) if k % window == 0 or k == iterations - 1])


def settings_of(pipe: MARPipeline) -> list[Setting]:
    """The lines of the table; plain decoding first."""
    whole = pipe.settings.num_iter
    steps = int("".join(filter(str.isdigit, pipe.settings.head_steps)))
    exact = methods.CSpD()
    found = [Setting("ar", pipe)]
    found += [
        Setting(f"ar, {n} iterations", pipe, dict(num_iter=n)) for n in (whole // 2, whole // 4)
    ]
    found += [
        Setting(f"ar, {n} head steps", pipe, dict(head_steps=n)) for n in (steps // 2, steps // 4)
    ]
    found += [
        Setting(f"ar, DDIM, {steps // 4} steps", pipe, dict(head_steps=steps // 4, solver="ddim")),
        Setting("exact", pipe, dict(method=exact)),
        Setting("exact, window 8", pipe, dict(method=methods.CSpD(window=8))),
        Setting(f"exact, {whole // 2} iterations", pipe, dict(method=exact, num_iter=whole // 2)),
        Setting(f"exact, {whole // 4} iterations", pipe, dict(method=exact, num_iter=whole // 4)),
    ]
    if pipe.small is None:
        return found
    for window in WINDOWS:
        release = methods.CSpD(variant="release", window=window)
        equal = passes(whole, window, release.prefill)
        found.append(Setting(f"release, window {window}", pipe, dict(method=release)))
        found.append(Setting(f"ar, {equal} iterations", pipe, dict(num_iter=equal)))
    return list({s.name: s for s in found}.values())


def settings_compiled(model: str) -> list[Setting]:
    """Plain decoding and exact speculation in both dtypes, as they are and compiled."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        pipe = load_pipeline(model, dtype)
        kind = "" if dtype == torch.float32 else ", bfloat16"
        for name, method in (("ar", methods.AR()), ("exact", methods.CSpD())):
            for way in (False, True):
                told = f"{name}{kind}{', compiled' if way else ''}"
                found.append(Setting(told, pipe, dict(method=method, compiled=way)))
    return found


def row(setting: Setting, plain: Setting) -> Row:
    """Times and counts of one setting."""
    counts = setting.total
    return timing(setting, plain) | {
        "target_passes": counts.rounds / len(setting.stats),
        "head_calls_per_token": counts.head_calls_per_token,
        "acceptance": counts.acceptance if counts.drafted else None,
        "head_share": counts.head_seconds / counts.seconds if counts.head_seconds else None,
    }


def main(
    model: Annotated[str, typer.Argument(help="A MAR with its small model.")] = "pocket/mar",
    repeats: Annotated[int, typer.Option(min=1, help="Timed pictures of every setting.")] = 12,
    samples: Annotated[int, typer.Option(min=2, help="Samples of every setting for FID.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Samples at a time.")] = 50,
    minutes: Annotated[
        float, typer.Option(min=0, help="For timing, and again for samples.")
    ] = 30.0,
    data: DataFolder = EMOJI,
    cache: CacheFolder = CACHE,
    threads: Threads = 2,
    out: Out = RESULTS,
    compiled: Annotated[bool, typer.Option("--compile", help="Seconds of programs only.")] = False,
) -> None:
    """Measure and write ``mar.json``, ``mar.csv`` and ``mar.png``, or ``mar_compiled``'s."""
    torch.set_num_threads(threads)
    settings = settings_compiled(model) if compiled else settings_of(load_pipeline(model))
    pipe = settings[0].pipe
    folder = zoo.find(model)
    time_settings(settings, pipe.transformer.config.num_classes, 1, repeats, Budget(minutes))
    rows = [row(s, settings[0]) for s in settings]
    facts = environment(
        model=model, batch=1, settings=vars(pipe.settings) | {"classes": len(pipe.settings.classes)}
    )
    write_results(out, "mar_compiled" if compiled else "mar", rows, facts)
    if compiled:
        return
    real = Real(Options(data=data, cache=cache))
    found = draw_all(settings, cache / "mar", folder, real, samples, batch, Budget(minutes))
    for r in rows:
        r |= quality(found[r["method"]], found["ar"], real) if r["method"] in found else {}
    scored = [r for r in rows if "fid" in r]
    for r, front in zip(scored, on_front(scored), strict=True):
        r["front"] = front
    write_results(out, "mar", rows, facts)
    plot(rows, real, out / "mar.png")


if __name__ == "__main__":
    typer.run(main)
