"""The pocket models shipped with the package, and where a model name leads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specmm.kinds import shown
from specmm.registry import unknown

POCKET = Path(__file__).parent / "pocket"
PIPELINE = "model_index.json"  # in the folder of an image model
TRANSFORMERS = "config.json"  # in the folder of a transformers model
SETTINGS = "settings.json"  # beside an image model, how it is usually run
PACKAGE = "package.json"  # in the folder of a model whose weights come in a separate package


def pocket_models() -> dict[str, Path]:
    """Shipped models by name ("pocket/llamagen")."""
    return {f"pocket/{f.parent.name}": f.parent for f in sorted(POCKET.glob("*/card.json"))}


def find(
    name: str | Path,
    index: str = PIPELINE,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """The folder of a model ``name``: a local folder, a pocket model, or a hub id, downloaded.

    ``index``, ``PIPELINE`` or ``TRANSFORMERS``, is the file that its kind of model has; a hub id's
    ``revision`` comes from ``cache_dir`` or gets there. Raises ``ValueError`` if there is no such
    model.
    """
    if not isinstance(name, str | Path):
        raise ValueError(f"model must be a folder, a pocket name or a hub id, got {shown(name)}")
    folder = Path(name)
    if (folder / index).is_file():
        return folder
    shipped = pocket_models()
    if (shipped.get(str(name), folder) / index).is_file():
        return shipped[str(name)]
    if str(name) in shipped:
        right = [n for n, f in shipped.items() if (f / index).is_file()]
        others = ", ".join(right) or "your own"
        raise ValueError(f"{name} is a model of another kind, this needs one like {others}")
    if str(name).startswith("pocket/"):
        raise unknown("pocket model", name, shipped)
    if folder.exists():
        raise ValueError(
            f"{folder} must hold a {index}; give the folder that save_pretrained wrote"
        )
    return _from_hub(str(name), revision, cache_dir)


def card(name: str) -> dict[str, Any]:
    """The ``card.json`` of a pocket model: data, licence, steps, losses, measurements."""
    file = pocket_models().get(name, Path(name)) / "card.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def classes(folder: Path) -> list[str]:
    """The names of the classes that the image model in ``folder`` draws, by id; none for others."""
    file = folder / SETTINGS
    names: list[str] = json.loads(file.read_text()).get("classes", []) if file.is_file() else []
    return names


def _from_hub(name: str, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        shipped = ", ".join(pocket_models())
        raise ValueError(
            f"model {name!r} is no folder, no pocket model ({shipped}) and could not be fetched "
            f"from the hub ({type(error).__name__}); check the name or the network"
        ) from error
