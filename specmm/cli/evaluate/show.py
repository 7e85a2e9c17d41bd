"""Results for people and for programs: value, interval, counts, and the protocol line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from specmm.cli.output import emit

TITLES = {
    "fid": "FID",
    "fd": "Fréchet distance",
    "rfid": "rFID",
    "kid": "KID",
    "kid_difference": "KID, first less second",
    "inception_score": "Inception Score",
    "mifid": "MiFID",
    "clip_score": "CLIPScore",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "lpips": "LPIPS",
    "vqa": "VQA accuracy",
    "anls": "ANLS",
    "relaxed": "relaxed accuracy",
    "exact": "exact match",
    "bleu": "BLEU",
    "cider": "CIDEr",
}
FINE = ("kid", "kid_difference")  # small numbers


def show(found: Any, as_json: bool, name: str | None = None) -> None:
    """Print one ``Measurement`` or several of the same samples, on stdout."""
    several = list(found) if isinstance(found, Sequence) else [found]
    extra = {} if name is None else {"name": name}
    if as_json:
        rows = [m.to_json() for m in several]
        emit({**rows[0], **extra} if len(rows) == 1 else {"results": rows, **extra})
        return
    typer.echo("\n".join(line(m) for m in several))
    typer.echo(protocol_lines([m.protocol for m in several]))


def line(found: Any) -> str:
    """Value, interval and parts of a ``Measurement`` on one line."""
    form = ".6f" if found.metric in FINE else ".4f"
    text = f"{TITLES.get(found.metric, found.metric)} {found.value:{form}}"
    if found.interval is not None:
        text += f"  {interval(found.interval, form)}"
    parts = ", ".join(f"{k.replace('_', ' ')} {v:{form}}" for k, v in found.parts.items())
    return f"{text}  ({parts})" if parts else text


def interval(found: Any, form: str = ".4f") -> str:
    """An ``Interval`` in words."""
    return f"[{found.low:{form}}, {found.high:{form}}] {found.level:.0%} {found.method}"


def protocol_lines(protocols: Sequence[dict[str, Any]]) -> str:
    """What was measured, an entry a line; the notes last."""
    whole: dict[str, Any] = {}
    for protocol in protocols:
        whole |= protocol
    notes = list(dict.fromkeys(str(p["note"]) for p in protocols if "note" in p))
    rows = [(k.replace("_", " "), _text(v)) for k, v in whole.items() if k != "note"] + [
        ("note", n) for n in notes
    ]
    width = max((len(k) for k, _ in rows), default=0)
    return "\n".join(f"  {k.ljust(width)}  {v}" for k, v in rows)


def _text(value: Any) -> str:
    return (
        ", ".join(map(_text, value))
        if isinstance(value, list | tuple)
        else "unknown"
        if value is None
        else str(value)
    )
