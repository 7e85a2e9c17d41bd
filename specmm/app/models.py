"""The models of the app's menus, loaded when first used, and errors as sentences."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from specmm import methods, zoo
from specmm.hf.loading.pretrained import is_packaged, missing_packages
from specmm.hf.prompts.options import Options
from specmm.image_ar.pipeline import family_of
from specmm.runs.run import HERE, Kind, Place, kinds_of, methods_of, open_model
from specmm.vlm.loading import is_composed, missing_parts

MOST_SECONDS = 120.0  # a request's limit
TEXT_OPTIONS = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True)
class Start:
    """Initial values of a model's tab: the question or prompt (``asked``), and the ``method`` that
    races against plain decoding.
    """

    asked: str = ""
    method: str = ""
    seed: int = 0


ASKED = {"questions": "What do you see in the picture?", "text": "Once upon a time"}
# chosen by looking at what they draw and write, and by the speeds on the models' cards
STARTS = {
    "pocket/llamagen": Start("heart", "lantern++", 0),
    "pocket/mar": Start("face-smiling", "cspd", 3),
    "pocket/var": Start("heart", "code(n=2)", 2),
    "pocket/coder": Start("def test_sum():\n    assert", "block"),
    "pocket/smollm2": Start("Here are five facts about the moon:\n1.", "block(tree=16)"),
    "pocket/llava": Start(ASKED["questions"], "msd"),
    "pocket/smollava": Start(ASKED["questions"], "msd"),
}


class AppModels:
    """The pocket models, or ``only`` these of them, and the folders or hub ids ``extra``, by kind.

    With ``anything`` users may load other models by typing their names: not for an app that
    strangers can reach. ``text_encoder`` reads the prompts of LlamaGen's text-to-image models.
    """

    def __init__(
        self,
        extra: tuple[str, ...] = (),
        place: Place = HERE,
        only: tuple[str, ...] | None = None,
        anything: bool = False,
        text_encoder: Path | None = None,
    ) -> None:
        self.names: dict[Kind, list[str]] = {"images": [], "questions": [], "text": []}
        pocket = [name for name, folder in zoo.pocket_models().items() if _has_weights(folder)]
        for name in (*extra, *(pocket if only is None else only)):
            self._list(name)
        self.place = place
        self.anything = anything
        self.text_encoder = text_encoder
        self._loaded: dict[tuple[Kind, str], Any] = {}
        self._twins: dict[str, Any] = {}
        self.warmed: set[Any] = set()  # keys of lanes that have run

    def _list(self, name: str) -> tuple[Kind, ...]:
        kinds = kinds_of(local(name))
        for kind in kinds:
            if name not in self.names[kind]:
                self.names[kind].append(name)
        return kinds

    def get(self, kind: Kind, name: str) -> Any:
        """The pipeline of a model. Raises ``ValueError`` for a model of another kind, for an
        unlisted model if only listed models are served, and if it cannot be loaded.
        """
        if name not in self.names[kind]:
            listed = ", ".join(self.names[kind]) or "(there are none)"
            if not self.anything:
                raise ValueError(f"model must be one of {listed}, got {name!r}")
            if kind not in (kinds := self._list(name)):
                raise ValueError(f"{name} is a model of {' and '.join(kinds)}, not of {kind}")
        if (kind, name) not in self._loaded:
            folder = local(name)
            encoder = self.text_encoder
            self._loaded[kind, name] = open_model(kind, folder, self.place, text_encoder=encoder)
        return self._loaded[kind, name]

    def twin(self, name: str) -> Any:
        """A second pipeline of a picture model with the same weights, so that two can draw in
        turns: a pipeline draws one picture at a time.
        """
        if name not in self._twins:
            self._twins[name] = twin(self.get("images", name))
        return self._twins[name]

    def methods(self, kind: Kind, name: str) -> list[str]:
        """The methods, for a menu, that this model can run here with streamed answers."""
        pipe = self.get(kind, name)
        registry = methods_of(kind, local(name))
        streaming = [method for method in registry if registry.get(method).streams]
        if kind != "images":
            return [m for m in streaming if m in (methods.Auto.name,) or pipe.drafters.has(m)]
        options = [methods.make(registry, method) for method in streaming]
        usable = [m.name for m in pipe.runnable(options)]
        return [m for m in streaming if m in usable or m == methods.AR.name]

    def start(self, kind: Kind, name: str) -> Start:
        """The initial values of a model's tab."""
        if name in STARTS:
            return STARTS[name]
        if kind != "images":
            return Start(ASKED[kind], str(methods.Auto.name))
        listed = self.methods(kind, name)
        usual = family_of(local(name)).compared.split(",")
        others = listed[1:]  # plain decoding, the first, is the other side of the race
        return Start(method=next((m for m in [*usual, *others] if m in listed), listed[0]))

    def parameters(self, kind: Kind, name: str) -> dict[str, Any]:
        """A model's parameters by name, with their default values."""
        if kind != "images":
            return {option: getattr(Options(), option) for option in TEXT_OPTIONS}
        pipe = self.get(kind, name)
        defaults = {option: getattr(pipe.settings, option) for option in pipe.sampling_options}
        return defaults | dict.fromkeys(pipe.call_options)


def local(name: str) -> str:
    """The folder of a hub id, fetched if needed; pocket names and folders unchanged."""
    exists = name in zoo.pocket_models() or Path(name).exists()
    return name if exists else str(zoo.find(name))


def twin(pipe: Any) -> Any:
    """A copy of ``pipe`` that shares its weights."""
    networks = [network for network in vars(pipe).values() if isinstance(network, nn.Module)]
    networks += getattr(pipe.parts, "drafters", {}).values() if hasattr(pipe, "parts") else []
    weights = chain.from_iterable(chain(net.parameters(), net.buffers()) for net in networks)
    return copy.deepcopy(pipe, {id(weight): weight for weight in weights})


def value_of(name: str, text: str, own: Any) -> Any:
    """``text`` as a value of the parameter ``name``, of the type of its ``own`` default."""
    kinds: list[Callable[[str], Any]] = [int, float, str] if own is None else [type(own)]
    if isinstance(own, bool):
        kinds = [{"True": True, "False": False}.__getitem__]
    for kind in kinds:
        try:
            return kind(text.strip())
        except (ValueError, KeyError):
            pass
    raise ValueError(f"{name} must be a value such as {own}, got {text!r}")


def changed(own: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """The parameters whose ``texts`` differ from a model's ``own`` values; an empty text stands for
    the own value.

    Raises ``ValueError`` for texts that are not values of the parameter's type.
    """
    edited = {name: text for name, text in texts.items() if text.strip() and text != str(own[name])}
    return {name: value_of(name, text, own[name]) for name, text in edited.items()}


def _has_weights(folder: Path) -> bool:
    """Whether the model's weights are on this machine; some come in packages."""
    if is_composed(folder):
        return not missing_parts(folder)
    return not (is_packaged(folder) and missing_packages(folder))


def in_sentences(function: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """Wrap ``function`` as a generator of the values it returns or yields.

    A user's mistake is shown as a sentence, not as a traceback.
    """
    import gradio as gr

    @functools.wraps(function)
    def told(*args: Any) -> Iterator[Any]:
        try:
            result = function(*args)
            yield from result if inspect.isgeneratorfunction(function) else [result]
        except (ValueError, OSError) as error:
            text = str(error)[:500]
            raise gr.Error(text, print_exception=False, title="That did not work") from None

    return told
