"""Cut-out emoji pictures, each (icon, style) pair wholly in training or wholly in test.

Training sees relatives of the kinds too, and every picture a little otherwise each time
(``variation``).

Shapes: a sprite is [R, R, 4] uint8, red, green, blue and opacity.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ImageOps
from tqdm import tqdm

from recipes import emoji
from recipes.scenes.kinds import KINDS, relatives

Array = npt.NDArray[np.uint8]
SIZE = 64
SPLITS = ("train", "test")


@dataclass(frozen=True, eq=False)  # compared by identity, so that pictures scaled once can be kept
class Sprite:
    """A picture of a thing of kind ``kind``; ``colour`` is empty where the kind has no colour of
    its own.
    """

    kind: str
    colour: str
    pixels: Array  # [R, R, 4]


@dataclass(frozen=True)
class Sprites:
    """The sprites of one split."""

    all: tuple[Sprite, ...]
    varied: bool = False  # drawn a little otherwise each time

    @cached_property
    def of_kind(self) -> dict[str, list[Sprite]]:
        """Sprites by the name of their kind."""
        found: dict[str, list[Sprite]] = {}
        for sprite in self.all:
            found.setdefault(sprite.kind, []).append(sprite)
        return found

    @property
    def kinds(self) -> list[str]:
        """Names of the kinds shown, in the order of ``KINDS``."""
        return [kind.name for kind in KINDS if kind.name in self.of_kind]


def held_out(icon: str, styles: list[str]) -> str:
    """The style of ``icon`` that only the test sees, chosen by a hash of the name."""
    return styles[int(hashlib.sha256(icon.encode()).hexdigest()[:8], 16) % len(styles)]


def load_sprites(folder: Path, split: str = "train") -> Sprites:
    """Sprites of ``split``; the emoji are fetched into ``folder`` and rasterised the first time.

    Raises ``ValueError`` when ``split`` is neither train nor test.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    data = np.load(_build(folder))
    rows: dict[str, dict[str, int]] = {}  # of each icon, by style
    for i, (style, icon) in enumerate(str(name).split("/") for name in data["names"]):
        rows.setdefault(icon, {})[style] = i
    found = []
    for kind in KINDS:
        unseen = {icon: held_out(icon, sorted(rows.get(icon, ()))) for icon in kind.icons}
        for icon, colour in kind.icons.items():
            own = [
                i
                for style, i in rows.get(icon, {}).items()
                if (style == unseen[icon]) == (split == "test")
            ]
            found += [Sprite(kind.name, colour, data["images"][i]) for i in own]
        for icon, colour in relatives(kind.name).items() if split == "train" else ():
            own = [i for style, i in rows.get(icon, {}).items() if style not in unseen.values()]
            found += [Sprite(kind.name, colour, data["images"][i]) for i in own]
    return Sprites(tuple(found), varied=split == "train")


def _build(folder: Path) -> Path:
    icons = [icon for kind in KINDS for icon in (kind.icons | relatives(kind.name))]
    out = folder / f"sprites-{hashlib.sha256(' '.join(icons).encode()).hexdigest()[:8]}.npz"
    if out.exists():
        return out
    emoji.fetch(folder)
    images = []
    names = []
    for style in tqdm(emoji.STYLES, desc="sprites"):
        drawn: dict[str, Any] = json.loads((folder / f"json/{style}.json").read_text())
        for icon in (i for i in icons if i in drawn["icons"]):
            picture = emoji.cut_out(drawn, icon, SIZE)
            images.append(
                np.asarray(ImageOps.pad(picture, (SIZE, SIZE)))
            )  # a few icons are not square
            names.append(f"{style}/{icon}")
    part = out.with_suffix(".part.npz")
    np.savez(part, images=np.stack(images), names=np.array(names))
    part.replace(out)
    return out
