"""The demo's picture and page: one row a method, one group of columns a class."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

SCALE, GAP, LABEL, HEAD = (
    96,
    4,
    170,
    26,
)  # pixels: a picture's side, between pictures, label column, class names

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>specmm demo</title>
<style>body{{font:16px system-ui,sans-serif;margin:2rem auto;max-width:{width}px;padding:0 1rem;color:#222}}
table{{border-collapse:collapse}}td,th{{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #ddd}}
img{{max-width:100%}}p{{color:#555;white-space:pre-line}}</style>
<h1>specmm demo: {model}</h1>
<table>{table}</table><p>{notes}</p>
<img alt="pictures by method" src="data:image/png;base64,{image}">
</html>
"""


def side_by_side(
    rows: Sequence[tuple[Sequence[str], Sequence[Any]]], classes: Sequence[Any], repeats: int
) -> Any:
    """A PIL sheet of ``rows`` (lines of the label, pictures), ``repeats`` columns for each of
    ``classes``.
    """
    from PIL import Image, ImageDraw, ImageFont

    step, count = SCALE + GAP, len(rows[0][1])
    width = LABEL + count * step + (len(classes) - 1) * GAP * 2
    sheet = Image.new("RGB", (width, HEAD + len(rows) * (step + GAP)), "white")
    pen, bold, small = ImageDraw.Draw(sheet), ImageFont.load_default(17), ImageFont.load_default(13)
    for i, name in enumerate(classes):
        pen.text((_left(i * repeats, repeats), 4), str(name), fill="black", font=small)
    for r, (lines, pictures) in enumerate(rows):
        top = HEAD + r * (step + GAP)
        for i, line in enumerate(lines):
            pen.text(
                (6, top + (0 if not i else 8 + 17 * i)),
                line,
                fill="black" if not i else "#444",
                font=small if i else bold,
            )
        for i, picture in enumerate(pictures):
            sheet.paste(
                picture.resize((SCALE, SCALE), Image.Resampling.LANCZOS), (_left(i, repeats), top)
            )
    return sheet


def _left(column: int, repeats: int) -> int:
    """Left edge of a picture's column; classes are set a little apart."""
    return LABEL + column * (SCALE + GAP) + column // repeats * GAP * 2


def page(sheet: Any, rows: Sequence[Sequence[str]], notes: str, model: str) -> str:
    """A self-contained page with the table, the notes and the sheet."""
    packed = io.BytesIO()
    sheet.save(packed, format="PNG")
    head, *body = [
        "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) for row, tag in _tagged(rows)
    ]
    return PAGE.format(
        width=max(sheet.width, 700),
        model=html.escape(model),
        table="".join(f"<tr>{row}</tr>" for row in (head, *body)),
        notes=html.escape(notes),
        image=base64.b64encode(packed.getvalue()).decode(),
    )


def _tagged(rows: Sequence[Sequence[str]]) -> list[tuple[Sequence[str], str]]:
    return [(row, "td" if i else "th") for i, row in enumerate(rows)]
