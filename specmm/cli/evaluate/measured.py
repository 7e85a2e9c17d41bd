"""Shared parts of the ``specmm eval`` commands: arguments, options, and printing of results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specmm.cli.evaluate.sources import SourceReader, name_of
from specmm.cli.options import Json, with_fields
from specmm.cli.output import counted, emit, stdout_reserved

if TYPE_CHECKING:
    from specmm.metrics.features import Protocol
    from specmm.metrics.measurement import Interval, Measurement

Command = Callable[..., Any]
PICTURES = "a folder, glob, .zip, .tar or .npz of pictures, or an .npz of features"
Source = Annotated[str, typer.Argument(help=f"What is measured: {PICTURES}.")]
Reference = Annotated[str, typer.Argument(help=f"What it is measured against: {PICTURES}.")]
STATISTICS = "or statistics (ours, ADM's, clean-fid's, …)"
Statistics = Annotated[
    str, typer.Argument(help=f"What it is measured against: {PICTURES} {STATISTICS}.")
]
Seed = Annotated[int, typer.Option(help="Random seed for resampling and subsets.")]
WithInterval = Annotated[
    bool, typer.Option("--interval", help="With a confidence interval: takes longer.")
]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Of the method, for the report (default: SOURCE's own)."),
]
TITLES = {
    "fid": "FID",
    "fd": "Fréchet distance",
    "rfid": "rFID",
    "kid": "KID",
    "kid_difference": "KID, first less second",
    "inception_score": "Inception Score",
    "clip_score": "CLIPScore",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "vqa": "VQA accuracy",
    "anls": "ANLS",
    "relaxed": "relaxed accuracy",
    "exact": "exact match",
    "bleu": "BLEU",
    "cider": "CIDEr",
}
FINE = ("kid", "kid_difference")  # small numbers


def reading(network: str) -> Callable[[Command], Command]:
    """Make a command from a function of a ``reader``, whose options replace that parameter.

    ``network`` is the default of ``--features``.
    """
    return with_fields(SourceReader, "reader", network=network)


@dataclass
class Printing:
    """Options for printing measurements."""

    name: Name = None
    as_json: Json = False


def measured(network: str) -> Callable[[Command], Command]:
    """As ``reading``, for a function that returns measurements: with ``--name`` and ``--json``."""

    def wrap(function: Command) -> Command:
        @functools.wraps(function)
        def command(reader: SourceReader, printing: Printing, **arguments: Any) -> None:
            with stdout_reserved():
                measurements = function(reader=reader, **arguments)
            several = measurements if isinstance(measurements, Sequence) else [measurements]
            noted = [reader.noted(m) for m in several]
            show(noted, printing.as_json, printing.name or name_of(arguments["source"]))

        return reading(network)(with_fields(Printing, "printing")(command))

    return wrap


def show(measurements: Sequence[Measurement], as_json: bool, name: str) -> None:
    """Print the measurements of a method's samples on stdout."""
    if as_json:
        rows = [m.to_json() for m in measurements]
        emit({**(rows[0] if len(rows) == 1 else {"results": rows}), "name": name})
        return
    typer.echo("\n".join(line(m) for m in measurements))
    typer.echo(protocol_lines([m.protocol for m in measurements]))


def line(measurement: Measurement) -> str:
    """Value, interval and parts of a measurement on one line."""
    form = ".6f" if measurement.metric in FINE else ".4f"
    text = f"{TITLES.get(measurement.metric, measurement.metric)} {measurement.value:{form}}"
    if measurement.interval is not None:
        text += f"  {interval_text(measurement.interval, form)}"
    parts = ", ".join(f"{k.replace('_', ' ')} {v:{form}}" for k, v in measurement.parts.items())
    return f"{text}  ({parts})" if parts else text


def interval_text(interval: Interval, form: str) -> str:
    """An interval with its level and method."""
    return f"[{interval.low:{form}}, {interval.high:{form}}] {interval.level:.0%} {interval.method}"


def protocol_lines(protocols: Sequence[Protocol]) -> str:
    """The protocols as text, an entry a line; the notes last."""
    merged = {k: v for protocol in protocols for k, v in protocol.items() if k != "note"}
    notes = dict.fromkeys(str(p["note"]) for p in protocols if "note" in p)
    rows = [(k.replace("_", " "), _text(v)) for k, v in merged.items()]
    rows += [("note", note) for note in notes]
    width = max((len(k) for k, _ in rows), default=0)
    return "\n".join(f"  {k.ljust(width)}  {v}" for k, v in rows)


def _text(value: object) -> str:
    if isinstance(value, dict):  # numbers of files by source
        return "; ".join(f"{source}: {counted(numbers)}" for source, numbers in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "unknown" if value is None else str(value)
