"""``specmm eval compare``: the quality gate. Do two sets differ beyond sampling noise, and by how
much.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.evaluate.measured import reading
from specmm.cli.evaluate.options import PICTURES, Seed
from specmm.cli.evaluate.show import TITLES, interval, line, protocol_lines
from specmm.cli.evaluate.sources import Reader, generator
from specmm.cli.options import Json
from specmm.cli.output import emit, say, stdout_reserved

First = Annotated[
    str, typer.Argument(help=f"{PICTURES}; or a result that --json printed (.json).", metavar="A")
]
Second = Annotated[str, typer.Argument(help="The other one, likewise.", metavar="B")]


@reading("inception")
def compare(
    first: First,
    second: Second,
    reader: Reader,
    reference: Annotated[
        str | None, typer.Option(help="Real pictures: how much worse A is than B.")
    ] = None,
    permutations: Annotated[int, typer.Option(min=1, help="Relabellings.")] = 999,
    alpha: Annotated[float, typer.Option(help="Share of false alarms to put up with.")] = 0.05,
    paired: Annotated[
        bool, typer.Option("--paired", help="Picture i of both has one prompt and seed.")
    ] = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Whether two sets of pictures differ by more than luck (a permutation test), or two results of
    eval do.
    """
    results = [s.endswith(".json") for s in (first, second)]
    if any(results):
        if not all(results) or reference is not None:
            raise ValueError(
                "compare takes two results (.json) and no reference, or two sets of pictures or features"
            )
        _results(Path(first), Path(second), as_json)
        return
    if paired and reader.skip_bad:
        raise ValueError(
            "--paired must see every picture, got --skip-bad, which would shift the pairs; leave one out"
        )
    with stdout_reserved():
        from specmm.metrics.compare import compare as test

        one, two = reader.both(first, second)
        third = None if reference is None else reader.features(reference)
        settings: dict[str, Any] = {"permutations": permutations, "alpha": alpha, "paired": paired}
        found = reader.noted(test(one, two, third, generator=generator(seed), **settings))
    if as_json:
        emit({**found.to_json(), "verdict": verdict(found)})
        return
    typer.echo(verdict(found))
    typer.echo(
        f"squared MMD {found.distance:.6f}, p = {found.p_value:.4f}, alpha = {found.alpha:g}"
    )
    if found.loss is not None:
        typer.echo(line(found.loss))
    typer.echo(protocol_lines([found.protocol]))


def verdict(found: Any) -> str:
    """What a ``Comparison`` means, in one sentence."""
    chance = f"p = {found.p_value:.3g}"
    if not found.differ:
        text = f"No difference beyond sampling noise was found ({chance}); this does not prove that there is none"
    else:
        text = f"The two sets differ by more than sampling noise ({chance})"
    loss = found.loss
    if loss is None or loss.interval is None:
        return text + "."
    ends = (
        f"KID differs by {loss.value:.2g}, from {loss.interval.low:.2g} to {loss.interval.high:.2g}"
    )
    if loss.interval.low <= 0 <= loss.interval.high:
        return f"{text}; neither is clearly closer to the reference ({ends})."
    return f"{text}; {'B' if loss.value > 0 else 'A'} is closer to the reference ({ends})."


def _results(first: Path, second: Path, as_json: bool) -> None:
    with stdout_reserved():
        from specmm.metrics.measurement import unequal_counts
        from specmm.metrics.results import compare_results, read_measurements

        one, two = read_measurements(first), read_measurements(second)
        if len(one) != len(two):
            raise ValueError(
                f"both results must hold the same metrics, got {len(one)} and {len(two)}"
            )
        found = [compare_results(a, b) for a, b in zip(one, two, strict=True)]
        for warning in filter(None, map(unequal_counts, one, two)):
            say(f"note: {warning}")
    if as_json:
        emit(
            {
                "differences": [
                    {**vars(d), "interval": d.interval and vars(d.interval)} for d in found
                ]
            }
        )
        return
    typer.echo("\n".join(_difference(d) for d in found))


def _difference(found: Any) -> str:
    title = f"{TITLES.get(found.metric, found.metric)} of A less that of B: {found.value:.6g}"
    if found.interval is None:
        return f"{title}; without intervals nobody can say whether that is noise: measure both with --interval"
    meaning = "more than" if found.differ else "within"
    return f"{title}, {meaning} sampling noise  {interval(found.interval, '.6g')}"
