"""Pictures and texts as they are made, with accepted drafts marked.

Pictures come as previews, and as a grid of tokens that shows which were drafted and accepted.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from specmm.app.models import MOST_SECONDS
from specmm.files import slug
from specmm.hf.running import Said
from specmm.image_ar.shared import ImageOutput
from specmm.jobs.folder import Result, encode
from specmm.jobs.items import Item

EVERY = 0.25  # seconds between two previews
CELL = 20  # pixels of a token of the grid
SIDE = 336  # pixels of a picture shown
WAITING, OWN, DRAFTED = "#e2e8f0", "#3b82f6", "#22c55e"
DRAFT = "accepted draft"
Pieces = list[tuple[str, str | None]]


@dataclass
class Frame:
    """A picture so far: ``counts`` of its tokens after each round, a preview, at the end ``out``."""

    counts: list[int]
    total: int
    seconds: float
    preview: Image.Image | None = None
    out: ImageOutput | None = None

    def grid(self, side: int) -> Image.Image:
        """The tokens: blue the target's own, green accepted drafts, grey those to come."""
        image = Image.new("RGB", (side * CELL, side * CELL), "white")
        pen = ImageDraw.Draw(image)
        own = {count - 1 for count in [1, *self.counts]}
        done = max(self.counts, default=0)
        for token in range(side * side):
            y, x = divmod(token, side)
            colour = OWN if token in own else DRAFTED
            box = (x * CELL, y * CELL, x * CELL + CELL - 2, y * CELL + CELL - 2)
            pen.rectangle(box, fill=colour if token < done else WAITING)
        return image

    def line(self, name: str) -> str:
        """A line about it."""
        if self.out is None:
            done = f"{max(self.counts, default=0)} of {self.total} steps"
            return f"**{name}** · {done} · {self.seconds:.1f} s"
        stats = self.out.stats
        tokens = f"{stats.tokens} tokens in {stats.rounds} rounds, τ {stats.tau:.2f}"
        return f"**{name}** · {self.seconds:.2f} s · {tokens}\n\n{self.out.certificate}"

    def shown(self, method: str, side: int) -> tuple[Image.Image | None, Image.Image | None, str]:
        """Picture, token grid (where there is one) and line."""
        picture = self.preview
        if picture is not None:
            kind = Image.Resampling
            smooth = kind.NEAREST if picture.width < SIDE // 8 else kind.LANCZOS
            picture = picture.resize((SIDE, SIDE), smooth)
        return picture, self.grid(side) if side else None, self.line(method)


class Stopped(Exception):
    """The user has left, or waited too long."""


@dataclass
class PictureStream:
    """Draws one picture in a thread and yields frames."""

    pipe: Any
    method: str
    name: str
    seed: int
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.frames: queue.Queue[Frame | Exception] = queue.Queue()
        self.stop = threading.Event()
        self.begin = time.monotonic()
        self.last = 0.0  # when a preview was shown
        self.previewing = 0.0  # seconds spent on previews, which are not the method's

    def run(self) -> Iterator[Frame]:
        """Frames as they come, the last one with the picture; raises what the pipeline raises."""
        thread = threading.Thread(target=self._draw, daemon=True)
        thread.start()
        try:
            while True:
                frame = self.frames.get(timeout=MOST_SECONDS)
                if isinstance(frame, Exception):
                    raise frame
                yield frame
                if frame.out is not None:
                    return
        except (queue.Empty, Stopped):
            raise ValueError(
                f"a picture may take {MOST_SECONDS:.0f} seconds, got longer; is the machine busy?"
            ) from None
        finally:
            self.stop.set()
            thread.join()

    def _draw(self) -> None:
        try:
            out = self.pipe(
                classes=[self.name],
                generator=torch.Generator().manual_seed(self.seed),
                method=self.method,
                callback_on_step_end=self._step,
            )
        except Exception as error:
            self.frames.put(error)
        else:
            self.frames.put(self._frame(out.images[0], out))

    def _step(self, pipe: Any, step: int, count: int, state: dict[str, Any]) -> dict[str, Any]:
        now = time.monotonic()
        if self.stop.is_set() or now - self.begin > MOST_SECONDS:
            raise Stopped
        self.counts.append(count)
        if now - self.last > EVERY:
            side = self.pipe.grid  # without one, unfinished tokens cannot be decoded
            preview = None
            if side:
                pixels = self.pipe.decode_tokens(state["tokens"][:, : side**2])[0]
                preview = Image.fromarray(pixels.numpy())
            self.frames.put(self._frame(preview))
            self.last = time.monotonic()
            self.previewing += self.last - now
        return state

    def _frame(self, preview: Image.Image | None, out: ImageOutput | None = None) -> Frame:
        total = self.pipe.grid**2 or len(self.counts)
        seconds = time.monotonic() - self.begin - self.previewing
        return Frame(list(self.counts), total, seconds, preview, out)


def saved(out: ImageOutput, model: str, name: str, seed: int) -> str:
    """The path of the picture of ``out``, a PNG with its description inside, in a new folder."""
    facts = {"method": out.method, "certificate": out.certificate.as_dict()}
    item = Item(f"{name}-{seed}", "class", name, seed)
    data = encode(Result(item, facts, image=out.images[0]), "png", model)
    file = Path(tempfile.mkdtemp(prefix="specmm-")) / f"{slug(name)}-{seed}.png"
    file.write_bytes(data)
    return str(file)


def text_pieces(rounds: Iterator[list[Said]]) -> Iterator[tuple[Pieces, str]]:
    """The pieces of one answer after each round, and a line about it.

    Raises ``ValueError`` when it takes too long.
    """
    pieces: Pieces = []
    begin, tokens = time.monotonic(), 0
    for count, (said,) in enumerate(rounds, 1):
        seconds = time.monotonic() - begin
        if seconds > MOST_SECONDS:
            raise ValueError(
                f"an answer may take {MOST_SECONDS:.0f} seconds, got longer; ask for fewer tokens"
            )
        tokens += said.tokens
        pieces += [(text, DRAFT if drafted else None) for text, drafted in said.pieces]
        yield pieces, f"{tokens} tokens in {count} rounds, {seconds:.1f} s"
