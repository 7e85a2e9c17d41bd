"""The models of the app's menus, loaded when first used, and errors as sentences."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specmm import zoo
from specmm.hf.pretrained import is_packaged, missing_packages
from specmm.runs.run import HERE, Kind, Place, kinds_of, methods_of, open_model
from specmm.vlm.loading import is_composed, missing_parts

MOST_SECONDS = 120.0  # of one request


class AppModels:
    """Pocket models and the local folders ``extra``, by kind; others cannot be loaded."""

    def __init__(self, extra: tuple[str, ...] = (), place: Place = HERE) -> None:
        self.names: dict[Kind, list[str]] = {"images": [], "questions": [], "text": []}
        pocket = [name for name, folder in zoo.pocket_models().items() if _has_weights(folder)]
        for name in (*extra, *pocket):
            for kind in kinds_of(name):
                self.names[kind].append(name)
        self.place = place
        self._loaded: dict[tuple[Kind, str], Any] = {}

    def get(self, kind: Kind, name: str) -> Any:
        """The pipeline of a listed model; raises ``ValueError`` for others."""
        if name not in self.names[kind]:
            known = ", ".join(self.names[kind]) or "(there are none)"
            raise ValueError(f"model must be one of {known}, got {name!r}")
        if (kind, name) not in self._loaded:
            self._loaded[kind, name] = open_model(kind, name, self.place)
        return self._loaded[kind, name]

    def methods(self, kind: Kind, name: str) -> list[str]:
        """The methods a model can be run by whose answers can be streamed, for a menu."""
        registry = methods_of(kind, name)
        return [method for method in registry if registry.get(method).streams]


def _has_weights(folder: Path) -> bool:
    """Whether the weights are on this machine: some come in packages."""
    if is_composed(folder):
        return not missing_parts(folder)
    return not (is_packaged(folder) and missing_packages(folder))


def in_sentences(function: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """``function`` as a generator of what it returns or yields.

    A user's mistake is shown as its sentence, not as a traceback.
    """
    import gradio as gr

    @functools.wraps(function)
    def told(*args: Any) -> Iterator[Any]:
        try:
            made = function(*args)
            yield from made if inspect.isgeneratorfunction(function) else [made]
        except (ValueError, OSError) as error:
            text = str(error)[:500]
            raise gr.Error(text, print_exception=False, title="That did not work") from None

    return told
