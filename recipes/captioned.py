"""Emoji with words: what pocket/janus draws and is asked about.

A picture is told by its name ("red-apple"), its Unicode subgroup (its kind), its style, and the
keywords that CLDR gives it. (Name, style) pairs are held out as in ``recipes.emoji``, so that what
is held out is a known thing in a known style.

Shape letters: N pictures, V views of each, R pixels a side.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from recipes.data import making
from recipes.emoji import Array, load, subgroup_of_name

SIDE = 96  # R
SMALLER = 88  # pixels a side of a picture that is placed somewhere in the square
STYLES = {  # sets of pictures by the word for their style
    "noto": "noto",
    "glossy": "fluent-emoji",
    "flat": "fluent-emoji-flat",
    "twemoji": "twemoji",
}
SHARED = 3  # names that a keyword is of, at least
LEFT_OUT = ("country-flag",)  # Fluent has none
NOT_MIRRORED = ("arrow", "geometric", "time", "zodiac", "hand-fingers-partial", "person-gesture")
SIDES = ("left", "right", "quarter", "crescent")  # in a name: a mirror image is something else
KIND_WORDS = {  # subgroups as people say them
    "animal-bird": "bird",
    "animal-bug": "bug",
    "animal-mammal": "mammal",
    "animal-marine": "sea animal",
    "arrow": "arrow",
    "cat-face": "cat face",
    "clothing": "clothing",
    "drink": "drink",
    "face-affection": "loving face",
    "face-concerned": "worried face",
    "face-negative": "angry face",
    "face-neutral-skeptical": "neutral face",
    "face-smiling": "happy face",
    "face-unwell": "unwell face",
    "food-fruit": "fruit",
    "food-prepared": "food",
    "food-vegetable": "vegetable",
    "geometric": "shape",
    "hand-fingers-open": "open hand",
    "hand-fingers-partial": "hand sign",
    "heart": "heart sign",
    "person": "person",
    "person-gesture": "gesture",
    "person-role": "role",
    "plant-flower": "flower",
    "plant-other": "plant",
    "sky-weather": "weather",
    "sport": "sport",
    "time": "clock",
    "transport-ground": "vehicle",
    "zodiac": "zodiac sign",
}
KINDS = tuple(KIND_WORDS)


@dataclass(frozen=True)
class Captioned:
    """Pictures of one split: ``images`` [N, R, R, 3] uint8 and ``smaller`` ones, ``kinds`` and
    ``styles`` [N] int64 (indices into ``KINDS`` and ``STYLES``), ``names`` and ``keywords``.
    """

    images: Array
    smaller: Array
    kinds: Array
    styles: Array
    names: list[str]
    keywords: list[list[str]]

    def __len__(self) -> int:
        return len(self.names)

    def some(self, rows: Sequence[int]) -> Captioned:
        """The pictures ``rows`` alone."""
        kept = list(rows)
        return Captioned(
            self.images[kept],
            self.smaller[kept],
            self.kinds[kept],
            self.styles[kept],
            [self.names[i] for i in kept],
            [self.keywords[i] for i in kept],
        )

    def style(self, i: int) -> str:
        """The word for the style of picture ``i``."""
        return list(STYLES)[self.styles[i]]

    def kind(self, i: int) -> str:
        """The words for the kind of picture ``i``."""
        return KIND_WORDS[KINDS[self.kinds[i]]]

    def views(self, count: int, seed: int) -> Array:
        """``count`` views V of every picture, [N, V, R, R, 3] uint8: the first as it is, the others
        a little smaller and somewhere else, every second one mirrored where that changes nothing.
        """
        random = Random(seed)
        return np.stack(
            [[self._view(i, v, random) for v in range(count)] for i in range(len(self))]
        )

    def _view(self, i: int, number: int, random: Random) -> Array:
        found = self.images[i]
        if number > 1:
            found = np.full_like(found, 255)
            top, left = (random.randint(0, SIDE - SMALLER) for _ in range(2))
            found[top : top + SMALLER, left : left + SMALLER] = self.smaller[i]
        return found[:, ::-1] if number % 2 and self.may_be_mirrored(i) else found

    def may_be_mirrored(self, i: int) -> bool:
        """Whether a mirror image of picture ``i`` is still what its name says."""
        told = any(word in self.names[i] for word in SIDES)
        return KINDS[self.kinds[i]] not in NOT_MIRRORED and not told


def captioned(folder: Path, split: str) -> Captioned:
    """The pictures of a split, ``train`` or ``test``."""
    with making(folder):
        found, smaller = (load(folder, split, size) for size in (SIDE, SMALLER))
        keywords = _keywords(folder)
    words = {style: word for word, style in STYLES.items()}
    sets, names = zip(*(name.split("/") for name in found.names), strict=True)
    rows = [
        i
        for i, label in enumerate(found.labels)
        if sets[i] in words and found.classes[label] not in LEFT_OUT
    ]
    styles = [list(STYLES).index(words[sets[i]]) for i in rows]
    kinds = [KINDS.index(found.classes[found.labels[i]]) for i in rows]
    return Captioned(
        found.images[rows],
        smaller.images[rows],
        np.array(kinds),
        np.array(styles),
        [names[i] for i in rows],
        [keywords.get(names[i], []) for i in rows],
    )


def _keywords(folder: Path) -> dict[str, list[str]]:
    """CLDR's keywords by the icons' names, those of one word that several names share."""
    known: set[str] = set(subgroup_of_name(folder))
    data: list[dict[str, Any]] = json.loads((folder / "en/data.json").read_text())
    named = {e["label"].lower().replace(" ", "-").replace("’", ""): e.get("tags", []) for e in data}
    named = {name: tags for name, tags in named.items() if name in known}
    times = Counter(tag for tags in named.values() for tag in tags)
    return {
        name: [tag for tag in tags if tag.isalpha() and times[tag] >= SHARED]
        for name, tags in named.items()
    }
