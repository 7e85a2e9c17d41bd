"""The kernels on a GPU: correctness first, then tree attention's time.

Against SDPA, flex_attention and a copy of the bytes: all shapes of ours, SDPA and the copy come
first; flex_attention, which compiles for every shape, gets what is left of the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.common import Row
from benchmarks.gpu import checks
from benchmarks.gpu.contenders import calls
from benchmarks.gpu.parts import Bench, Case
from benchmarks.gpu.shapes import BATCHES, LENGTHS, MODELS, NODES, Inputs, Shape, every_shape
from benchmarks.gpu.timing import copies_of, milliseconds

MISSING = "not measured"
Times = dict[tuple[Shape, str], float]


def cases(bench: Bench) -> Iterator[Case]:
    """Correctness, then times of all shapes; flex_attention, which compiles for each, is last."""
    yield Case("checks", lambda: [{"check": name, **row} for name, row in check(bench).items()])
    shapes = list(every_shape(bench.tiny))
    for names in (("ours", "sdpa", "copy"), ("flex",)):
        for shape in [] if bench.tiny and names == ("flex",) else shapes:
            where = f"{shape.model} S={shape.length} T={shape.nodes} batch {shape.rows}"
            yield Case(
                f"{', '.join(names)}: {where}",
                lambda shape=shape, names=names: measure(bench, shape, names),
            )


def check(bench: Bench) -> dict[str, Row]:
    """What must be true before a time means anything; raises ``ValueError`` where it is not."""
    found: dict[str, Row] = {}
    for model in list(MODELS)[: 1 if bench.tiny else None]:
        for length, nodes, rows in ((257, 1, 2), (1024, 26, 2), (4097, 64, 1)):
            shape = Shape(model, length // 8 if bench.tiny else length, nodes, rows)
            errors = checks.attention_error(shape, bench.device)
            found[f"{model} S={shape.length} T={nodes}"] = {"error": errors["ours"]}
            if not errors["ours"] < checks.TOLERANCE:
                raise ValueError(
                    f"tree attention is off by {errors['ours']:.2e}, expected {checks.TOLERANCE}"
                )
    checks.check_commit(bench.device)
    found["KV commit"] = {"error": 0.0}
    share = checks.check_acceptance(bench.device, 8 if bench.tiny else 512)
    found["acceptance"] = {"error": 1 - share}
    if bench.on_gpu:
        found["host syncs a round"] = {"error": checks.syncs_in_a_round(bench.device)}
    return found


def measure(bench: Bench, shape: Shape, names: Sequence[str]) -> list[Row]:
    """Milliseconds of ``shape`` by the contenders ``names``."""
    count = copies_of(shape.bytes) if bench.on_gpu else 1
    inputs = [Inputs.random(shape, bench.device, seed=i) for i in range(count)]
    facts = {"model": shape.model, "S": shape.length, "T": shape.nodes, "batch": shape.rows}
    facts["bytes"] = shape.bytes
    return [
        facts | {"contender": name, "ms": milliseconds(calls(name, inputs), bench.on_gpu)}
        for name in names
    ]


def times_of(rows: Iterable[Row]) -> Times:
    """The times that ``measure`` gave, by shape and contender."""
    return {
        (Shape(row["model"], row["S"], row["T"], row["batch"]), row["contender"]): row["ms"]
        for row in rows
        if "ms" in row
    }


def table(times: Times) -> str:
    """Medians over models by S, T and batch, of what was measured."""
    lines = ["|     S |  T | batch | ours, ms | over SDPA | over flex | bytes/s over a copy's |"]
    lines.append("|---|---|---|---|---|---|---|")
    for length in LENGTHS:
        for rows in BATCHES:
            for nodes in NODES:
                shapes = [Shape(model, length, nodes, rows) for model in MODELS]
                if not any((shape, "ours") in times for shape in shapes):
                    continue
                found = [
                    _median(f(times, s) for s in shapes)
                    for f in (_ours, _over("sdpa"), _over("flex"), _rate)
                ]
                lines.append(
                    f"| {length} | {nodes} | {rows} | " + " | ".join(map(_text, found)) + " |"
                )
    return "\n".join(lines)


def bars(times: Times, syncs: int | None) -> str:
    """The bars with what was found."""
    wanted = [s for s in every_shape() if s.length >= 1000]
    gains = [g for s in wanted if (g := _over("sdpa")(times, s)) is not None]
    rate = _median(_rate(times, s) for s in every_shape() if s.length == max(LENGTHS))
    least = min(gains) if gains else None
    return "\n".join(
        (
            f"over SDPA with a dense mask, S >= 1k, median (bar 1.5): {_text(_median(gains))}",
            f"the same, least (bar 1.0): {_text(least)}",
            f"bytes/s at S = 32k over a plain copy's, median (bar 0.75): {_text(rate)}",
            f"host syncs a round (bar 0): {MISSING if syncs is None else syncs}",
        )
    )


def _ours(times: Times, shape: Shape) -> float | None:
    return times.get((shape, "ours"))


def _over(name: str) -> Callable[[Times, Shape], float | None]:
    def gain(times: Times, shape: Shape) -> float | None:
        return times[shape, name] / times[shape, "ours"] if (shape, name) in times else None

    return gain


def _rate(times: Times, shape: Shape) -> float | None:
    """Bytes a second over those of a copy, which reads and writes each byte of keys and values."""
    if (shape, "copy") not in times:
        return None
    _, kv, width = shape.sizes
    copied = 2 * 2 * 2 * shape.rows * kv * width * (shape.length + shape.nodes)
    return shape.bytes / times[shape, "ours"] / (copied / times[shape, "copy"])


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _text(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"
