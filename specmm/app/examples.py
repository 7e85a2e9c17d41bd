"""Pictures to ask about, drawn when the app starts: coloured shapes, as in the data of ``pocket/llava``.

Shape letters: none.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

SIDE = 96  # pixels
SHAPES = (("circle", "red"), ("rectangle", "blue"), ("triangle", "green"))


def scenes() -> list[str]:
    """Paths of the example pictures, in a folder of their own."""
    from PIL import Image, ImageDraw

    folder, found = Path(tempfile.mkdtemp(prefix="specmm-")), []
    for shape, colour in SHAPES:
        image = Image.new("RGB", (SIDE, SIDE), "#e8ebf2")
        pen = ImageDraw.Draw(image)
        if shape == "circle":
            pen.ellipse((24, 20, 72, 68), fill=colour)
        elif shape == "rectangle":
            pen.rectangle((18, 34, 78, 66), fill=colour)
        else:
            pen.polygon(((48, 16), (20, 72), (76, 72)), fill=colour)
        found.append(str(folder / f"{colour}-{shape}.png"))
        image.save(found[-1])
    return found
