"""The models of the app's menus, loaded when first used, and errors as sentences.

Shape letters: none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specmm import methods, zoo
from specmm.registry import Registry

MOST_SECONDS = 120.0  # of one request
KINDS = ("images", "questions", "text")


class Models:
    """Pocket models and the local folders ``extra``, by what they do; a name that is not listed cannot be loaded."""

    def __init__(self, extra: tuple[str, ...] = ()) -> None:
        self.names: dict[str, list[str]] = {kind: [] for kind in KINDS}
        for name in (*extra, *(name for name, folder in zoo.pocket_models().items() if _is_here(folder))):
            self.names[_kind(name)].append(name)
        self._loaded: dict[tuple[str, str], Any] = {}

    def get(self, kind: str, name: str) -> Any:
        """The pipeline of a listed model; raises ``ValueError`` for others."""
        if name not in self.names[kind]:
            raise ValueError(f"model must be one of {', '.join(self.names[kind]) or '(there are none)'}, got {name!r}")
        if (kind, name) not in self._loaded:
            self._loaded[kind, name] = _open(kind, name)
        return self._loaded[kind, name]

    def methods(self, kind: str, name: str) -> list[str]:
        """The methods a model can be run by, for a menu."""
        registry = _registry(kind, name)
        return [m for m in registry if m != methods.Verdict.name]


def _is_here(folder: Path) -> bool:
    """Whether the weights are: some come in packages of their own."""
    from specmm.hf.packaged import is_packaged, missing_packages
    from specmm.vlm.composed import is_composed, missing_parts

    if is_composed(folder):
        return not missing_parts(folder)
    return not (is_packaged(folder) and missing_packages(folder))


def _kind(name: str) -> str:
    """What a model does; raises ``ValueError`` when it is not found."""
    folder = zoo.pocket_models().get(name, Path(name))
    if (folder / zoo.PIPELINE).is_file():
        return "images"
    if (folder / zoo.PACKAGE).is_file():
        return "text"
    if not (folder / zoo.TRANSFORMERS).is_file():
        raise ValueError(
            f"model must be a folder or a pocket model, got {name!r}; specmm zoo lists those that are here"
        )
    return "questions" if (folder / "preprocessor_config.json").is_file() or _sees(folder) else "text"


def _sees(folder: Path) -> bool:
    """Whether a transformers model reads pictures."""
    from specmm.checkpoints import read_json

    return "vision_config" in read_json(folder / zoo.TRANSFORMERS)


def _registry(kind: str, name: str) -> Registry:
    from specmm.image_ar.pipeline import family_of

    return {"questions": methods.VQA, "text": methods.TEXT}.get(kind) or family_of(name).methods


def _open(kind: str, name: str) -> Any:
    if kind == "images":
        from specmm.cli.drawing import load

        return load(name)
    if kind == "questions":
        from specmm.vlm.pipeline import VQAPipeline

        return VQAPipeline.from_pretrained(name)
    from specmm.text.pipeline import TextPipeline

    return TextPipeline.from_pretrained(name)


def in_sentences(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` (or generator) with a user's mistake shown as its sentence, not as a traceback."""
    import gradio as gr

    def told(error: Exception) -> Exception:
        return gr.Error(str(error)[:500], print_exception=False, title="That did not work")

    @functools.wraps(function)
    def once(*args: Any) -> Any:
        try:
            return function(*args)
        except (ValueError, OSError) as error:
            raise told(error) from None

    @functools.wraps(function)
    def often(*args: Any) -> Iterator[Any]:
        try:
            yield from function(*args)
        except (ValueError, OSError) as error:
            raise told(error) from None

    return often if inspect.isgeneratorfunction(function) else once
