"""The registry of published models: the files of each, and how they make up a folder of ours.

``published.json`` names repositories and their exact files. A release of loose files (LlamaGen,
VAR, MAR) becomes a folder of links to them in our own layout, with added sizes, settings and class
names, so that all code that opens a folder can open it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmm.extending.registry import unknown

HERE = Path(__file__).parent
REGISTRY = HERE / "published.json"
CLASSES = {"imagenet": HERE / "imagenet.json"}
FOLDERS = Path("~/.cache/specmm/published")
PIPELINES = {"llamagen": "LlamaGenPipeline", "var": "VARPipeline", "mar": "MARPipeline"}
TRANSFORMER = "transformer"  # the part that names a model of several files
PIPELINE = "model_index.json"  # in the folder of an image model
TRANSFORMERS = "config.json"  # in the folder of a transformers model, and beside weights
SETTINGS = "settings.json"  # beside an image model, how it is usually run


@dataclass(frozen=True)
class Part:
    """A file of a release: in a ``repository``, or at an ``address`` outside hubs."""

    file: str
    repository: str = ""
    revision: str | None = None
    bytes: int = 0  # 0 where it is not known
    about: int = 0  # bytes of its parameters in float32, where those of the file are not known
    sha256: str = ""
    address: str = ""

    @property
    def size(self) -> int:
        """Its size in bytes, perhaps approximate."""
        return self.bytes or self.about


@dataclass(frozen=True)
class Published:
    """A model: a whole ``repository``, or ``parts`` by their place in a folder of ours.

    ``configs`` are sizes that cannot be inferred from the weights, by part; ``about`` is the bytes
    of a whole repository's parameters, 0 if unknown; ``goes_with`` names matching drafters, targets
    or text encoders.
    """

    name: str
    family: str
    what: str
    licence: str
    repository: str = ""
    about: int = 0
    parts: Mapping[str, Part] = field(default_factory=dict)
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    classes: str = ""
    goes_with: tuple[str, ...] = ()

    @property
    def repositories(self) -> list[str]:
        """The repositories of its files, each once."""
        repositories = [self.repository, *(part.repository for part in self.parts.values())]
        return list(dict.fromkeys(filter(None, repositories)))

    @property
    def bytes(self) -> int:
        """Its size in bytes; 0 if a part's size is unknown."""
        sizes = [part.bytes for part in self.parts.values()]
        return sum(sizes) if sizes and all(sizes) else 0

    @property
    def estimate(self) -> int:
        """Approximate bytes, from the files' sizes or else the parameters; 0 if unknown."""
        sizes = [part.size for part in self.parts.values()]
        return sum(sizes) if sizes and all(sizes) else self.about

    def as_dict(self) -> dict[str, Any]:
        """The entry for JSON."""
        files = {
            place: {key: value for key, value in vars(part).items() if value}
            for place, part in self.parts.items()
        }
        return {
            "name": self.name,
            "family": self.family,
            "what": self.what,
            "licence": self.licence,
            "repositories": self.repositories,
            "files": files,
            "bytes": self.bytes,
            "estimated_bytes": self.estimate,
            "with": list(self.goes_with),
        }


@functools.cache
def published_models() -> dict[str, Published]:
    """The registry by name."""
    read = json.loads(REGISTRY.read_text())
    files = {key: Part(**facts) for key, facts in read["files"].items()}
    models = {}
    for name, facts in read["models"].items():
        parts = {place: files[key] for place, key in facts.pop("parts", {}).items()}
        goes_with = tuple(facts.pop("with", ()))
        models[name] = Published(name, parts=parts, goes_with=goes_with, **facts)
    return models


def entry_of(name: str, file: str | None = None) -> Published | None:
    """The model called ``name``, or the model in ``file`` of the repository ``name``.

    None if it is not in the registry. Raises ``ValueError`` for a repository of several models
    without a ``file``, and for a file that it does not have.
    """
    models = published_models()
    if name in models:
        if file is not None:
            raise ValueError(f"file must be left out for {name}, which names its files, got {file}")
        return models[name]
    if not name:
        return None
    published = next((entry for entry in models.values() if entry.repository == name), None)
    if published is not None and file is None:
        return published
    of_file = {
        entry.parts[TRANSFORMER].file: entry
        for entry in reversed(models.values())
        if entry.parts and entry.parts[TRANSFORMER].repository == name
    }
    if file is not None and of_file and file not in of_file:
        raise unknown(f"file of {name}", file, of_file)
    if file is None and len(of_file) > 1:
        names = ", ".join(sorted(of_file))
        raise ValueError(f"{name} holds several models, give file=…, one of {names}")
    return of_file.get(file) if file is not None else next(iter(of_file.values()), None)


def entry_of_file(file: Path) -> Published | None:
    """The first model whose transformer has the name of ``file``; None if there is none."""
    for entry in published_models().values():
        if entry.parts and entry.parts[TRANSFORMER].file == file.name and not entry.goes_with:
            return entry
    return None


def linked_folder(entry: Published, files: Mapping[str, Path], into: Path | None = None) -> Path:
    """A folder of ours whose weights are links to ``files``, by part; made unless it exists.

    It is ``into``, or a folder in the cache with a name derived from its content.
    """
    facts = {
        PIPELINE: {"_class_name": PIPELINES[entry.family], "family": entry.family},
        SETTINGS: {**entry.settings, **_classes(entry)},
        **{f"{place}/{TRANSFORMERS}": dict(sizes) for place, sizes in entry.configs.items()},
    }
    held = json.dumps([facts, {place: str(file) for place, file in files.items()}])
    name = f"{entry.name}-{hashlib.sha256(held.encode()).hexdigest()[:12]}"
    folder = into or FOLDERS.expanduser() / name
    if (folder / PIPELINE).is_file() and into is None:
        return folder
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    for place, file in files.items():
        (part / place).mkdir(parents=True)
        _link(file, part / place / weights_name(file))
    for place, content in facts.items():
        (part / place).parent.mkdir(parents=True, exist_ok=True)
        (part / place).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return folder


def _classes(entry: Published) -> dict[str, list[str]]:
    if not entry.classes:
        return {}
    return {"classes": json.loads(CLASSES[entry.classes].read_text())}


def weights_name(file: Path) -> str:
    """The name in our folders for weights from a ``file`` with this ending."""
    return "pytorch_model.bin" if file.suffix == ".bin" else f"model{file.suffix}"


def _link(file: Path, link: Path) -> None:
    try:
        link.symlink_to(file.absolute())
    except OSError:  # on systems where only administrators make symbolic links
        os.link(file, link)
