"""Pictures as they are drawn: previews, and a grid of tokens that shows which were drafted and
accepted.

Shape letters: T tokens of a picture.
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

from specmm.app.models import MOST_SECONDS

EVERY = 0.25  # seconds between two previews
CELL, SIDE = 20, 336  # pixels: of a token of the grid, of a picture shown
WAITING, OWN, DRAFTED = "#e2e8f0", "#3b82f6", "#22c55e"


@dataclass
class Frame:
    """What is there of a picture: ``counts`` of its tokens after each round, a preview, and at the
    end ``out``.
    """

    counts: list[int]
    total: int
    seconds: float
    preview: Any = None
    out: Any = None

    def grid(self, side: int) -> Any:
        """The tokens as a PIL grid: blue the target's own, green accepted drafts, grey those to
        come.
        """
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (side * CELL, side * CELL), "white")
        pen, own = ImageDraw.Draw(image), {count - 1 for count in [1, *self.counts]}
        for token in range(side * side):
            y, x = divmod(token, side)
            colour = (
                WAITING
                if token >= max(self.counts, default=0)
                else OWN
                if token in own
                else DRAFTED
            )
            pen.rectangle(
                (x * CELL, y * CELL, x * CELL + CELL - 2, y * CELL + CELL - 2), fill=colour
            )
        return image

    def says(self, name: str) -> str:
        """A line about it."""
        if self.out is None:
            return f"**{name}** · {max(self.counts, default=0)} of {self.total} steps · {self.seconds:.1f} s"
        stats = self.out.stats
        text = f"**{name}** · {self.seconds:.2f} s · {stats.tokens} tokens in {stats.rounds} rounds, τ {stats.tau:.2f}"
        return f"{text}\n\n{self.out.certificate}"


class Stopped(Exception):
    """The one who asked has gone, or waited too long."""


@dataclass
class Easel:
    """Draws one picture in a thread and hands out frames."""

    pipe: Any
    method: str
    name: str
    seed: int
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.frames: queue.Queue[Frame | BaseException] = queue.Queue()
        self.stop, self.begin, self.shown = threading.Event(), time.monotonic(), 0.0
        self.watched = 0.0  # seconds spent on previews, which are not the method's

    def run(self) -> Iterator[Frame]:
        """Frames as they come, the last one with the picture; raises what the pipeline raises."""
        thread = threading.Thread(target=self._draw, daemon=True)
        thread.start()
        try:
            while True:
                frame = self.frames.get(timeout=MOST_SECONDS)
                if isinstance(frame, BaseException):
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
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        try:
            out = self.pipe(
                classes=[self.name],
                generator=generator,
                method=self.method,
                callback_on_step_end=self._step,
            )
        except Exception as error:
            self.frames.put(error)
        else:
            self.frames.put(self._frame(out=out, preview=out.images[0]))

    def _step(self, pipe: Any, step: int, count: int, state: dict[str, Any]) -> dict[str, Any]:
        now = time.monotonic()
        if self.stop.is_set() or now - self.begin > MOST_SECONDS:
            raise Stopped
        self.counts.append(count)
        if now - self.shown > EVERY:
            self.frames.put(self._frame(preview=self._preview(state["tokens"])))
            self.shown = time.monotonic()
            self.watched += self.shown - now
        return state

    def _preview(self, tokens: Any) -> Any:
        """The picture so far, for models whose unfinished tokens can be decoded."""
        from PIL import Image

        side = grid_of(self.pipe)
        return (
            Image.fromarray(self.pipe.decode_tokens(tokens[:, : side**2])[0].numpy())
            if side
            else None
        )

    def _frame(self, **what: Any) -> Frame:
        total = grid_of(self.pipe) ** 2 or len(self.counts)
        return Frame(list(self.counts), total, time.monotonic() - self.begin - self.watched, **what)


def grid_of(pipe: Any) -> int:
    """Tokens along a side of a picture drawn token by token; 0 for the other families."""
    return int(getattr(pipe.transformer.config, "grid", 0))


def enlarged(image: Any) -> Any:
    """A small picture, large enough to look at."""
    from PIL import Image

    return image.resize(
        (SIDE, SIDE),
        Image.Resampling.NEAREST if image.width < SIDE // 8 else Image.Resampling.LANCZOS,
    )


def shown_of(frame: Frame, method: str, side: int) -> tuple[Any, Any, str]:
    """A frame as picture, token grid (where there is one) and line."""
    picture = enlarged(frame.preview) if frame.preview else None
    return picture, frame.grid(side) if side else None, frame.says(method)


def saved(out: Any, model: str, name: str, seed: int) -> str:
    """The picture of ``out`` as a PNG with its description inside, in a folder of its own; the path
    of it.
    """
    from specmm.files import slug
    from specmm.jobs.items import Item
    from specmm.jobs.store import Result, encode

    facts = {"method": out.method, "certificate": out.certificate.as_dict()}
    data = encode(
        Result(Item(f"{name}-{seed}", "class", name, seed), facts, image=out.images[0]),
        "png",
        model,
    )
    file = Path(tempfile.mkdtemp(prefix="specmm-")) / f"{slug(name)}-{seed}.png"
    file.write_bytes(data)
    return str(file)
