"""Views of a lane: the picture so far, its tokens coloured by the model that made them, a marked
text, and a status line.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from specmm.app.lanes import PictureLane, TextLane
from specmm.image_ar.continuous.masked_decode import ChainStats
from specmm.image_ar.scales.collaborative import LARGE
from specmm.loading.files import slug

CELL = 16  # pixels of a token
SIDE = 336  # pixels of a picture shown
KEPT = 3600  # seconds that a saved picture is kept
WAITING = "#e2e8f0"
OWN = "#2563eb"
DRAFTED = "#16a34a"
Cells = list[float | None]
"""By token or scale the share that drafts had in it, None for those still to come."""


@torch.inference_mode()
def preview(lane: PictureLane) -> Image.Image | None:
    """The picture so far; None before the first round, or if only finished pictures have pixels."""
    if lane.out is not None:
        return _enlarged(lane.out.images[0])
    if not lane.state:
        return None
    if lane.pipe.paints:
        return None
    pixels = lane.pipe.decode_tokens(lane.state["tokens"])
    return _enlarged(Image.fromarray(pixels[0].cpu().numpy()))


def _enlarged(picture: Image.Image) -> Image.Image:
    kind = Image.Resampling
    return picture.resize((SIDE, SIDE), kind.NEAREST if picture.width < SIDE // 8 else kind.LANCZOS)


def blank() -> Image.Image:
    """A placeholder for a picture that has not been drawn."""
    return Image.new("RGB", (SIDE, SIDE), WAITING)


def tokens_of(lane: PictureLane) -> Image.Image | None:
    """Tokens by colour: blue from the model itself, green accepted drafts, grey not yet drawn."""
    pipe = lane.pipe
    if lane.watch.calls:
        return grid(_landed(lane), pipe.grid)
    if pipe.plans == "scales":
        return strip(_scales(lane), pipe.transformer.config.patch_nums)
    return grid(raster(lane.counts, pipe.grid**2), pipe.grid) if pipe.grid else None


def raster(counts: Sequence[int], total: int) -> Cells:
    """Cells drawn in order, by whether drafts made them: the last of each round is the model's."""
    own_cells = {count - 1 for count in [1, *counts]}
    done = max(counts, default=0)
    return [None if i >= done else float(i not in own_cells) for i in range(total)]


def _landed(lane: PictureLane) -> Cells:
    """Cells of a picture whose tokens come in any order: the share of a token's chain steps that
    needed no separate head call.
    """
    cells: Cells = [None] * lane.pipe.grid**2
    for call in lane.watch.calls:
        places = call.places[0].tolist()
        for cell in places:
            cells[cell] = 1 - call.calls / len(places) / call.steps
    return cells


def _scales(lane: PictureLane) -> Cells:
    """Cells of a VAR's scales, by whether the small model drew them."""
    scales = len(lane.pipe.transformer.config.patch_nums)
    done = max(lane.counts, default=0)
    if not lane.watch.turns:  # drafted and verified: the last of a pass is the large model's
        return raster(lane.counts, scales)
    small = {k for turn in lane.watch.turns if turn.name != LARGE for k in turn.scales}
    return [None if k >= done else float(k in small) for k in range(scales)]


def grid(cells: Cells, side: int) -> Image.Image:
    """Cells as squares in rows of ``side``."""
    image = Image.new("RGB", (side * CELL, side * CELL), "white")
    pen = ImageDraw.Draw(image)
    for i, share in enumerate(cells):
        y, x = divmod(i, side)
        _square(pen, x * CELL, y * CELL, CELL - 2, share)
    return image


def strip(cells: Cells, sides: Sequence[int]) -> Image.Image:
    """Scales as squares of ``sides`` tokens side by side, the coarsest first."""
    unit = 4
    image = Image.new("RGB", (sum(sides) * unit + len(sides) * unit, max(sides) * unit), "white")
    pen = ImageDraw.Draw(image)
    x = 0
    for share, side in zip(cells, sides, strict=True):
        _square(pen, x, (max(sides) - side) * unit, side * unit - 1, share)
        x += (side + 1) * unit
    return image


def _square(pen: ImageDraw.ImageDraw, x: int, y: int, side: int, share: float | None) -> None:
    """A square filled with green from the top, by the ``share`` that drafts made."""
    pen.rectangle((x, y, x + side, y + side), fill=WAITING if share is None else OWN)
    if share and (high := round(share * (side + 1))):
        pen.rectangle((x, y, x + side, y + high - 1), fill=DRAFTED)


def marked(pieces: Sequence[tuple[str, bool]]) -> str:
    """A text as HTML with accepted drafts marked, without breaking words."""
    joined: list[tuple[str, bool]] = []
    for text, drafted in pieces:
        if joined and joined[-1][1] == drafted:
            joined[-1] = (joined[-1][0] + text, drafted)
        else:
            joined.append((text, drafted))
    parts = [f"<mark>{escape(text)}</mark>" if d else escape(text) for text, d in joined]
    # people without a mouse scroll it, too, where it is taller than its place
    opening = '<div class="answer" role="group" aria-label="Text" tabindex="0">'
    return f"{opening}{''.join(parts)}</div>"


def line(lane: PictureLane | TextLane, name: str, total: int | str) -> str:
    """A line of HTML about a lane, at the end with its certificate."""
    seconds = f"{lane.clock.seconds:.2f} s"
    if lane.out is None:
        done = max(lane.counts, default=0)
        return f"<b>{escape(name)}</b> {seconds} · {done} of {total}"
    claim = lane.out.certificate
    summary = f"<b>{escape(name)}</b> <b>{seconds}</b> · {counted(lane)}"
    about = claim.kind if claim.tv is None or not claim.tv else f"{claim.kind}, TV {claim.tv:.3f}"
    kind = f'<span class="claim">{about}</span>'
    more = f"<details><summary>Certificate: {kind}</summary>{escape(str(claim))}</details>"
    ran = "" if lane.out.method in (name, name.split("(")[0]) else escape(lane.out.method)
    return f"{summary}<br>{ran}{more}"


def counted(lane: PictureLane | TextLane) -> str:
    """A line about a finished run's savings: forwards, head calls or scales."""
    stats = lane.out.stats
    if isinstance(stats, ChainStats) and lane.watch.calls:
        steps = lane.watch.calls[0].steps
        calls = stats.head_calls_per_token
        return f"{calls:.0f} head calls a token for {steps} steps ({steps / calls:.1f} a call)"
    if isinstance(stats, ChainStats):
        return f"{stats.tokens} tokens in {stats.rounds} passes, {stats.acceptance:.0%} kept drafts"
    if lane.watch.turns:
        turns = [f"{len(turn.scales)} by the {turn.name} model" for turn in lane.watch.turns]
        return f"scales: {', '.join(turns)}"
    return f"{stats.tokens} tokens in {stats.rounds} rounds, τ {stats.tau:.2f}"


def saved(out: Any, name: str, seed: int) -> str:
    """The path of the picture of ``out``, a PNG with its record inside, in a new folder.

    The page copies it; older files are removed, or a long-running app would fill the disk.
    """
    folder = Path(own_folder("pictures").name)
    for old in folder.iterdir():
        if time.time() - old.stat().st_mtime > KEPT:
            shutil.rmtree(old, ignore_errors=True)
    file = Path(tempfile.mkdtemp(dir=folder)) / f"{slug(name)}-{seed}.png"
    out.save(file)
    return str(file)


@functools.cache
def own_folder(purpose: str) -> tempfile.TemporaryDirectory[str]:
    """A folder of this process for a ``purpose``, deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix=f"specmm-{purpose}-")
