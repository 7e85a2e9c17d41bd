"""A drafter written in the layout of another project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from specmm.extending.registry import named
from specmm.hf.drafters.drafter_formats import FORMATS, ModelFolder, recognised
from specmm.hf.drafters.inspection import find_folder, read_folder
from specmm.hf.loading.pretrained import find, find_target, load_target
from specmm.runs.run import kinds_of


def export(drafter: str, layout: str, out: Path, target: str | None = None) -> dict[str, Any]:
    """Write the ``drafter`` of a folder, pocket model or hub id to ``out`` in a ``layout``; what
    was written, for JSON.

    ``target`` is the drafter's model, by default the one in whose folder it is. Raises
    ``ValueError`` for layouts that are not known or cannot describe it, and an ``out`` that is
    there.
    """
    disable_progress_bar()
    folder = ModelFolder(find_folder(drafter))
    kind = recognised(folder)
    layouts = sorted({name for one in FORMATS for name in one.exports})
    if layout not in layouts:
        raise ValueError(f"format must be one of {', '.join(layouts)}, got {layout!r}")
    if layout not in kind.exports:
        able = f"it can be written as {', '.join(kind.exports)}" if kind.exports else "give another"
        raise ValueError(f"a {kind.title} has no form as {layout}, got {folder.path}; {able}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out must be a new folder, got {out}, which is there; name another")
    model = _target(target or _beside(folder.path))
    if why := read_folder(folder).wanted.misfits(model.config):
        raise ValueError(
            f"{folder.path} must be a drafter of {model.config.name_or_path}, {why[0]}"
        )
    note = named(kind.exports[layout])(folder.path, model, out) or ""
    return {"format": kind.title, "layout": layout, "folder": str(out), "note": note}


def _beside(folder: Path) -> str:
    """The model whose drafter is in ``folder``."""
    whole = folder.resolve()
    model = whole.parent.parent
    if whole.parent.name != "drafters":
        raise ValueError(
            f"the drafter's model is needed, got {folder}, which is in no model's drafters; give "
            "--target MODEL"
        )
    return str(model)


def _target(name: str) -> Any:
    if "questions" in kinds_of(name):
        from specmm.vlm.loading import load_model

        return load_model(find(name))
    return load_target(find_target(name))[0]
