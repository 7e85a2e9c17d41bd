"""``specmm doctor``: finds out why few of a drafter's drafts are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specmm.cli.options import Json, Threads
from specmm.cli.output import emit, say, stdout_reserved, table
from specmm.loading.files import writable

if TYPE_CHECKING:
    from specmm.recipes.doctor import Diagnosis

SHOWN = 8  # changes
Model = Annotated[str, typer.Argument(help="The target: a folder, a pocket model or a hub id.")]
Drafter = Annotated[
    str | None,
    typer.Option("--drafter", help="Its drafter's folder, where it is not alone beside the model."),
]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="FILE", help="Chats that it was not trained on; several."),
]
Questions = Annotated[int, typer.Option(min=1, help="That the target answers.")]
Seed = Annotated[int, typer.Option(min=0)]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write here what is kept of its drafts, for specmm plan --trace."),
]
Temperature = Annotated[float, typer.Option(min=0, help="Of the answers that are traced.")]


def doctor(
    model: Model,
    drafter: Drafter = None,
    data: Data = None,
    questions: Questions = 16,
    seed: Seed = 0,
    trace: TraceFile = None,
    temperature: Temperature = 0.0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say why few of a drafter's drafts are kept: how it is read wrongly, or where it is weak."""
    from specmm.recipes.doctor import examined

    if trace is None and temperature:
        raise ValueError(f"temperature is for --trace FILE, got {temperature} without it")
    if trace is not None:
        writable(trace.parent, "--trace")
    with stdout_reserved():
        case = examined(model, drafter, data or (), questions, seed)
        if trace is not None:
            case.trace(temperature).save(trace)
            say(f"{trace} written, for specmm plan --trace {trace} --costs FILE")
        diagnosis, drafter_path = case.diagnosis(), str(case.place)
    if as_json:
        return emit(_facts(diagnosis, drafter_path))
    for line in _lines(diagnosis, drafter_path):
        typer.echo(line)


def _facts(diagnosis: Diagnosis, drafter: str) -> dict[str, object]:
    """The diagnosis for JSON."""
    usual, best = diagnosis.own, diagnosis.best
    changes = [
        {"change": change.named, "hint": change.hint, "tau": one.tau, "sampled": one.sampled}
        for change, one in diagnosis.changes
    ]
    return {
        "drafter": drafter,
        "answers": len(usual.seen.tokens),
        "tau": usual.tau,
        "sampled": usual.sampled,
        "by_depth": usual.by_depth,
        "by_kind": usual.parts(),
        "change": None if best is None else best[0].named,
        "changes": changes,
        "asked": [
            {"how": how, "tau": one.tau, "sampled": one.sampled} for how, one in diagnosis.asked
        ],
    }


def _lines(diagnosis: Diagnosis, drafter: str) -> Iterator[str]:
    """The diagnosis as text, line by line."""
    usual, best = diagnosis.own, diagnosis.best
    count = int(usual.seen.long.sum())
    yield f"{drafter}, on {len(usual.seen.tokens)} answers of its target ({count} tokens, greedy)"
    yield f"  tokens a round: {usual.tau:.2f} greedy, {usual.sampled:.2f} at T = 1"
    yield f"  drafts kept by depth: {' '.join(f'{x:.0%}' for x in usual.by_depth)}"
    yield f"  first drafts kept: {', '.join(f'{n} {x:.0%}' for n, x in usual.parts().items())}"
    rows = [("read otherwise", "tokens a round", "at T = 1")]
    for change, other in diagnosis.changes[:SHOWN]:
        rows.append((change.named, f"{other.tau:.2f}", f"{other.sampled:.2f}"))
    yield table(rows)
    if diagnosis.asked:
        rows = [("asked otherwise", "tokens a round", "at T = 1")]
        rows += [(how, f"{one.tau:.2f}", f"{one.sampled:.2f}") for how, one in diagnosis.asked]
        yield table(rows)
    if (better := diagnosis.better_asked) is not None:
        yield f"It keeps more of answers to questions {better[0]}: it may have learnt from such."
    if best is not None:
        yield f"Read it with {best[0].named}: {best[0].hint}."
        return
    weakest = min(range(len(usual.by_depth)), key=usual.by_depth.__getitem__)
    kind, share = min(usual.parts().items(), key=lambda pair: pair[1])
    yield (
        "No other way of reading it is worth more: what it keeps is its own. Weakest at depth "
        f"{weakest + 1} ({usual.by_depth[weakest]:.0%}), of first drafts: {kind} ({share:.0%})."
    )
