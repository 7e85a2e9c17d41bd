"""The pocket models shipped with the package, and the search for a model by its name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specmm.extending.kinds import shown
from specmm.extending.registry import unknown
from specmm.zoo.hub import Source as Source
from specmm.zoo.hub import Wanted, check_release, fetch, told
from specmm.zoo.published import PIPELINE as PIPELINE
from specmm.zoo.published import SETTINGS as SETTINGS
from specmm.zoo.published import TRANSFORMERS as TRANSFORMERS
from specmm.zoo.published import Part, Published, linked_folder, published_models
from specmm.zoo.published import entry_of as entry_of

POCKET = Path(__file__).parent / "pocket"
POCKETS = "pocket/"  # prefix of their names
PACKAGE = "package.json"  # in the folder of a model whose weights come in a separate package


def pocket_models() -> dict[str, Path]:
    """Shipped models by name ("pocket/llamagen")."""
    return {f"{POCKETS}{f.parent.name}": f.parent for f in sorted(POCKET.glob("*/card.json"))}


USUAL = Source()
LOCATED: dict[tuple[str, Source], Path] = {}  # folders found by name, in this process


def kind_of(folder: Path) -> str:
    """The use of the pocket model in ``folder``: "images", "questions" or "text"."""
    if (folder / PIPELINE).is_file():
        return "images"
    config = folder / TRANSFORMERS
    sees = config.is_file() and "vision_config" in json.loads(config.read_text())
    return "questions" if sees else "text"


def find(
    name: str | Path, index: str = PIPELINE, source: Source = USUAL, kind: str | None = None
) -> Path:
    """The folder of a model ``name``: a local folder, a pocket model, a published name or a hub
    id, fetched as ``source`` says.

    ``index``, ``PIPELINE`` or ``TRANSFORMERS``, is the file that marks its type of model; a pocket
    model must be of the ``kind`` (see :func:`kind_of`), if given. A hub id's ``revision`` is read
    from ``cache_dir``, or fetched into it. Raises ``ValueError`` if there is no such model.
    """
    if not isinstance(name, str | Path):
        raise ValueError(f"model must be a folder, a pocket name or a hub id, got {shown(name)}")
    folder = Path(name)
    if (folder / index).is_file():
        return folder
    if str(name).startswith(POCKETS) and not folder.exists():
        return _shipped(str(name), lambda f: kind_of(f) == kind if kind else (f / index).is_file())
    if folder.exists():
        raise ValueError(
            f"{folder} must hold a {index}; give the folder that save_pretrained wrote"
        )
    entry = entry_of(str(name), source.file)
    if index == TRANSFORMERS and entry is not None and entry.parts:
        raise ValueError(f"{name} draws pictures, this needs another kind; run: specmm generate")
    return fetched(str(name), source)


def _shipped(name: str, suits: Callable[[Path], bool]) -> Path:
    """The folder of a pocket model; raises ``ValueError`` unless its folder ``suits``."""
    shipped = pocket_models()
    suit = [model for model, folder in shipped.items() if suits(folder)]
    if name in suit:
        return shipped[name]
    if name in shipped:
        others = ", ".join(suit) or "your own"
        raise ValueError(f"{name} is a model of another kind, this needs one like {others}")
    raise unknown("pocket model", name, suit)


def fetched(name: str, source: Source = USUAL) -> Path:
    """The folder of a published or hub model, fetched unless it is cached; see :func:`find`."""
    if name.startswith(POCKETS):
        return _shipped(name, lambda folder: True)
    if not name:
        raise ValueError("a model's name must not be empty; see specmm zoo --published")
    key = (name, source)
    if key not in LOCATED or not LOCATED[key].is_dir():
        entry = entry_of(name, source.file)
        if entry is not None and entry.parts:
            LOCATED[key] = linked_folder(entry, files_of(entry, source))
        else:
            LOCATED[key] = _repository(name, entry, source)
    return LOCATED[key]


def files_of(
    entry: Published, source: Source = USUAL, parts: Mapping[str, Part] | None = None
) -> dict[str, Path]:
    """The fetched files of a model of several files, or of some of its ``parts``.

    Raises ``ValueError`` as :func:`specmm.zoo.hub.fetch`, and for parts that no hub has.
    """
    parts = entry.parts if parts is None else parts
    for part in parts.values():
        if part.address:
            raise ValueError(
                f"{entry.name} must be fetched by hand, no hub has its {part.file}"
                f"{told(part.size)}: {part.address}; then run: specmm convert {part.file} FOLDER "
                f"--like {entry.name}"
            )
    requests = [
        Wanted(part.repository, (part.file,), part.revision, part.size) for part in parts.values()
    ]
    files = dict(zip(parts, fetch(entry.name, requests, source), strict=True))
    for place, part in parts.items():
        check_release(files[place], part.file, "" if source.revision else part.sha256)
    return {place: folder / parts[place].file for place, folder in files.items()}


def _repository(name: str, entry: Published | None, source: Source) -> Path:
    """The folder of a whole hub repository; none for a single file that is not in the registry."""
    if source.file is not None:
        raise ValueError(
            f"file must be one of a published repository (specmm zoo --published), got {name}; "
            "fetch it yourself and run: specmm convert FILE FOLDER --like NAME"
        )
    if entry is None and "/" not in name:
        names = [*pocket_models(), *published_models()]
        if difflib.get_close_matches(name, names, n=1, cutoff=0.6):
            raise unknown("model", name, names)
    repository = name if entry is None else entry.repository
    size = None if entry is None else entry.about
    return fetch(name, [Wanted(repository, bytes=size)], source)[0]


def card(name: str) -> dict[str, Any]:
    """The ``card.json`` of a pocket model: data, licence, steps, losses, measurements."""
    file = pocket_models().get(name, Path(name)) / "card.json"
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content


def classes(folder: Path) -> list[str]:
    """The class names of the image model in ``folder``, by id; empty for other models."""
    file = folder / SETTINGS
    names: list[str] = json.loads(file.read_text()).get("classes", []) if file.is_file() else []
    return names
