"""The demo: a few classes drawn by three methods, one picture at a time, and a page of them side by
side.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from specmm.choose.threads import settled
from specmm.image_ar.records import write_pictures
from specmm.loading.files import slug, write_whole
from specmm.loading.pictures import packed
from specmm.methods import IMAGE_TOKENS
from specmm.methods.making import parse_methods
from specmm.runs.race import Lane, race, summaries
from specmm.runs.run import Place, open_model

METHODS = "ar,speculative,lantern++"
FAVOURITES = ("face-smiling", "heart", "food-fruit", "country-flag")
COLUMNS = ("method", "seconds a picture", "times faster", "tokens a pass", "certificate")
NOTES = """\
method: ar draws one token (a patch) at a time; the others guess several, which the model checks.
seconds a picture: the median of {count} pictures, on this machine, by {threads}.
times faster: how many times as many tokens a second as ar draws.
tokens a pass: how many tokens one pass through the model gives, on average.
certificate: exact: as likely as by ar; bounded: nearly so, off by at most tv (of 1) a token."""
SCALE = 96  # pixels of a picture's side
GAP = 4  # pixels between pictures
LABEL = 170  # pixels of the column of labels
HEAD = 26  # pixels of the row of class names
CELLS = 24  # letters of a line of a picture in a terminal
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>specmm demo</title>
<style>
body{{font:16px system-ui,sans-serif;margin:2rem auto;max-width:{width}px;padding:0 1rem}}
table{{border-collapse:collapse}}
td,th{{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #ddd}}
img{{max-width:100%}}
p{{color:#555;white-space:pre-line}}
</style>
<h1>specmm demo: {model}</h1>
<table>{table}</table><p>{notes}</p>
<img alt="pictures by method" src="data:image/png;base64,{image}">
</html>
"""
Shown = Callable[[str, Image.Image], None]


def compare(
    model: str,
    place: Place,
    folder: Path,
    n: int,
    seed: int,
    tell: Callable[[str], None],
    show: Shown,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Draw ``n`` pictures of each of four classes by three methods and write the comparison.

    ``show`` is called with a line about each picture and the picture, as soon as it is saved.
    Returns a row for each method, and the paths of page, sheet and pictures in ``folder``.
    """
    pipe = open_model("images", model, place)
    if pipe.takes != "classes":
        raise ValueError(
            f"{model} draws from prompts and the demo draws classes; run specmm generate --prompt"
        )
    known = pipe.settings.classes or tuple(range(pipe.transformer.config.num_classes))
    names = [*(c for c in FAVOURITES if c in known), *(c for c in known if c not in FAVOURITES)][:4]
    rounds = [[name] for name in names for _ in range(n)]
    contenders = parse_methods(IMAGE_TOKENS, METHODS)
    drawn = ", ".join(map(str, names))
    tell(f"drawing {len(rounds)} pictures ({drawn}) by {len(contenders)} methods, in turn")
    files: dict[str, list[str]] = {method.name: [] for method in contenders}

    def made(lane: Lane) -> None:
        saved = files[lane.method.name]
        (name,) = rounds[len(saved)]
        file = folder / f"{slug(lane.method.name)}-{len(saved):02d}-{slug(str(name))}.png"
        write_pictures(lane.images[-1:], lane.records[-1:], [file])
        saved.append(str(file))
        show(f"{lane.seconds[-1]:6.2f} s  {lane.method.name}: {file}", lane.images[-1])

    with settled(pipe.transformer) as threads:
        lanes = race(pipe, contenders, rounds, seed, made=made)
        rows = summaries(pipe, lanes, rounds, 1)
    rows = [{**row, "threads": threads.count} for row in rows]
    captioned = [(_captions(row), lane.images) for row, lane in zip(rows, lanes, strict=True)]
    sheet = _sheet(captioned, names, n)
    write_whole(folder / "side_by_side.png", packed(sheet))
    write_whole(folder / "index.html", _page(sheet, rows, model).encode())
    whole = [str(folder / name) for name in ("index.html", "side_by_side.png")]
    return rows, [*whole, *(file for saved in files.values() for file in saved)]


def in_letters(image: Image.Image) -> str:
    """``image`` for a terminal of 24-bit colours: two pixels a letter, one above the other."""
    rows = np.asarray(image.convert("RGB").resize((CELLS, CELLS))).tolist()
    lines = []
    for above, below in zip(rows[::2], rows[1::2], strict=True):
        pairs = zip(above, below, strict=True)
        letters = (
            f"\x1b[38;2;{r};{g};{b}m\x1b[48;2;{R};{G};{B}m▀" for (r, g, b), (R, G, B) in pairs
        )
        lines.append("".join(letters) + "\x1b[0m")
    return "\n".join(lines)


def table_of(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """``COLUMNS`` and a row of texts for each summary."""
    return [list(COLUMNS), *map(_cells, rows)]


def notes(rows: Sequence[dict[str, Any]]) -> str:
    """What the columns mean, one sentence each."""
    count = rows[0]["threads"]
    threads = "one thread" if count == 1 else f"{count} threads"
    return NOTES.format(count=rows[0]["runs"], threads=threads)


def _cells(row: dict[str, Any]) -> list[str]:
    tv = row["certificate"]["tv"]
    return [
        row["label"],
        f"{row['seconds_per_picture']:.2f}",
        f"{row['speedup']:.2f}",
        f"{row['tau']:.1f}",
        row["certificate"]["kind"] + (f", tv {tv:.3f}" if tv else ""),
    ]


def _captions(row: dict[str, Any]) -> list[str]:
    """Lines beside a method's pictures."""
    return [
        row["method"],
        f"{row['seconds_per_picture']:.2f} s a picture",
        f"{row['speedup']:.2f}x ar",
        f"{row['tau']:.1f} tokens a pass",
        row["certificate"]["kind"],
    ]


def _sheet(
    rows: Sequence[tuple[Sequence[str], Sequence[Image.Image]]],
    classes: Sequence[str | int],
    repeats: int,
) -> Image.Image:
    """Rows of captions and pictures, with ``repeats`` columns for each of ``classes``."""
    step = SCALE + GAP
    width = LABEL + len(classes) * repeats * step + (len(classes) - 1) * GAP * 2
    sheet = Image.new("RGB", (width, HEAD + len(rows) * (step + GAP)), "white")
    pen = ImageDraw.Draw(sheet)
    bold = ImageFont.load_default(17)
    small = ImageFont.load_default(13)
    for i, name in enumerate(classes):
        pen.text((_left(i * repeats, repeats), 4), str(name), fill="black", font=small)
    for r, ((first, *others), pictures) in enumerate(rows):
        top = HEAD + r * (step + GAP)
        pen.text((6, top), first, fill="black", font=bold)
        for i, line in enumerate(others, 1):
            pen.text((6, top + 8 + 17 * i), line, fill="#444", font=small)
        for i, picture in enumerate(pictures):
            scaled = picture.resize((SCALE, SCALE), Image.Resampling.LANCZOS)
            sheet.paste(scaled, (_left(i, repeats), top))
    return sheet


def _left(column: int, repeats: int) -> int:
    """Left edge of a picture's column; there is more space between classes."""
    return LABEL + column * (SCALE + GAP) + column // repeats * GAP * 2


def _page(sheet: Image.Image, rows: Sequence[dict[str, Any]], model: str) -> str:
    """A self-contained page with the table, the notes and the sheet."""
    head, *body = table_of(rows)
    table = _table_row(head, "th") + "".join(_table_row(row, "td") for row in body)
    return PAGE.format(
        width=max(sheet.width, 700),
        model=html.escape(model),
        table=table,
        notes=html.escape(notes(rows)),
        image=base64.b64encode(packed(sheet)).decode(),
    )


def _table_row(texts: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"
