"""``specmm eval``: distances between two sets of pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.generate import Json
from specmm.cli.output import emit, stdout_reserved

app = typer.Typer(no_args_is_help=True, help="Measure pictures: fid, kid.", rich_markup_mode=None)
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")

First = Annotated[Path, typer.Argument(help="Folder of pictures, or .npz of pictures or features.")]
Second = Annotated[Path, typer.Argument(help="The other one, such as real pictures.")]


@app.command()
def fid(first: First, second: Second, as_json: Json = False) -> None:
    """Fréchet Inception distance; compare equal counts only, small sets are biased upwards."""
    with stdout_reserved():
        from specmm.metrics.frechet import frechet_distance

        result = frechet_distance(*_features(first, second))
    found = {"metric": "fid", "value": result.value, "protocol": result.protocol}
    _print(found, f"FID {result.value:.4f}", as_json)


@app.command()
def kid(
    first: First,
    second: Second,
    subsets: Annotated[int, typer.Option(min=1, help="Random subsets.")] = 100,
    subset_size: Annotated[int, typer.Option(min=2, help="Pictures of a subset.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the subsets.")] = 0,
    as_json: Json = False,
) -> None:
    """Kernel Inception distance: the steadier number below 5,000 pictures."""
    with stdout_reserved():
        from specmm.metrics.kernel import kernel_distance

        one, two = _features(first, second)
        result = kernel_distance(one, two, subsets=subsets, subset_size=subset_size, seed=seed)
    found = {"metric": "kid", "value": result.full, "subsets_mean": result.mean, "subsets_std": result.std}
    text = f"KID {result.full:.6f} (whole sets); {result.mean:.6f} ± {result.std:.6f} over subsets"
    _print({**found, "protocol": result.protocol}, text, as_json)


def _print(found: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        emit(found)
    else:
        typer.echo(f"{text}; counts {found['protocol']['counts']}")
        typer.echo("\n".join(f"  {k}: {v}" for k, v in found["protocol"].items() if k != "counts"))


def _features(*paths: Path) -> tuple[Any, ...]:
    """Features of both sets; the network is loaded once, and only if one of them holds pictures."""
    from specmm.metrics.features import FeatureSet

    sets = [read_set(p) for p in paths]
    network: Any = None
    if not all(isinstance(s, FeatureSet) for s in sets):
        from specmm.metrics.inception import Inception

        network = Inception()
    return tuple(s if isinstance(s, FeatureSet) else network.features(s) for s in sets)


def read_set(path: Path) -> Any:
    """The features in an .npz, or pictures [N, R, R, 3] uint8 of an .npz or a folder.

    Raises ``ValueError`` when there is nothing to measure or the pictures differ in size.
    """
    import numpy as np

    from specmm.metrics.features import FeatureSet

    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise ValueError(f"{path} must be a folder of pictures or an .npz file, there is none")
    if path.suffix != ".npz":
        raise ValueError(f"{path} must be a folder of pictures or an .npz file, got {path.suffix or 'no suffix'}")
    with np.load(path) as data:
        names = set(data.files)
        if {"values", "protocol"} <= names:
            return FeatureSet.load(path)
        if "images" in names or len(names) == 1:
            return data["images" if "images" in names else names.pop()]
    raise ValueError(f"{path} must hold 'images' or what FeatureSet.save wrote, got {', '.join(sorted(names))}")


def _read_folder(folder: Path) -> Any:
    import numpy as np
    from PIL import Image

    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES)
    if len(files) < 2:
        raise ValueError(f"{folder} must hold at least 2 pictures ({', '.join(SUFFIXES)}), got {len(files)}")
    pictures = []
    for file in files:
        with Image.open(file) as image:
            pictures.append(np.asarray(image.convert("RGB")))
        if pictures[-1].shape != pictures[0].shape:
            sizes = [f"{p.shape[1]}x{p.shape[0]}" for p in (pictures[0], pictures[-1])]
            raise ValueError(f"pictures must have one size, got {sizes[0]} and {sizes[1]} ({file}), resize them first")
    return np.stack(pictures)
