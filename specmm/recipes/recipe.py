"""A recipe: a config file that names what is trained and holds its settings.

    train = "specmm.recipes.deer:deer"  # a function; a config file of yours has recipe = "deer"

    [settings]
    steps = 1500

The function's annotations define the settings: ``Annotated[int, 1]`` is at least 1,
``Annotated[float, 0, 1]`` also at most 1; a setting that may be ``None`` can be left out. Settings
that several trainings share are the fields of a dataclass. ``open`` names the function that reads
``data``.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import specmm
from specmm.extending.registry import named, unknown

SHIPPED = Path(__file__).parent
CHECKOUT = Path(specmm.__file__).resolve().parents[1] / "recipes"  # not in the wheel
Count = Annotated[int, 1]
Width = Annotated[int, 4]
Share = Annotated[float, 0, 1]
Amount = Annotated[float, 0]
Size = Annotated[int, 0]
Seed = Annotated[int, 0]
Found = dict[str, Any]  # a training's result: kind, steps, outputs
Open = Callable[..., Any]  # a setting that is read by the function the recipe names as ``open``
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
}
BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class Places:
    """A setting that names several ``places``, which the recipe's ``open`` reads."""

    places: list[str]
    open: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        """The data, read by the recipe's ``open``."""
        return self.open(self.places, *arguments)


@dataclass(frozen=True)
class Recipe:
    """``train`` names the training's function, ``open`` the function that reads its ``data``.

    ``chosen`` are the settings that the user gave.
    """

    name: str
    train: str
    settings: Mapping[str, Any]
    open: str = ""
    chosen: frozenset[str] = field(default=frozenset())

    def function(self) -> Callable[..., Found]:
        """The training's function, imported now."""
        if any(name.startswith("recipes.") for name in (self.train, self.open)):
            _import_checkout()
        function: Callable[..., Found] = named(self.train)
        return function

    def kinds(self) -> dict[str, Any]:
        """The annotations of the settings by name."""
        kinds: dict[str, Any] = {}
        for name, hint in self._hints().items():
            kinds |= _fields(hint) or {name: hint}
        return kinds

    def _hints(self) -> dict[str, Any]:
        """The annotations of the training's parameters: settings, or dataclasses of settings."""
        hints = _hints(self.function())
        return {name: hint for name, hint in hints.items() if name not in ("return", "recipe")}

    def having(self, chosen: Mapping[str, Any]) -> Recipe:
        """This recipe with settings that the user chose; raises ``ValueError`` for unknown ones."""
        kinds = self.kinds()
        for name in chosen:
            if name not in kinds:
                raise unknown(f"setting of recipe {self.name}", name, kinds)
        return replace(self, settings={**self.settings, **chosen}, chosen=self.chosen | set(chosen))

    def run(self) -> Found:
        """Run the training; raises ``ValueError`` for missing or invalid settings."""
        function = self.function()
        settings: dict[str, Any] = {}
        for name, kind in self.kinds().items():
            value = self.settings.get(name)
            if value is None and type(None) not in typing.get_args(kind):
                raise ValueError(
                    f"recipe {self.name} must be given {name}, got none; give --set {name}=…"
                )
            if kind == Open:
                settings[name] = partial(named(self.open), str(value))
            elif kind == Places:
                places = [str(place) for place in _as_list(value) if str(place)]
                settings[name] = Places(places, named(self.open))
            else:
                settings[name] = _fitting(name, value, kind)
        arguments: dict[str, Any] = {}
        for name, hint in self._hints().items():
            values = {field: settings[field] for field in _fields(hint)}
            arguments[name] = hint(**values) if values else settings[name]
        if "recipe" in function.__annotations__:
            arguments["recipe"] = replace(self, settings=settings)
        return function(**arguments)


def recipes() -> dict[str, Path]:
    """The config files by name: the package's and, in a checkout, the pocket models'."""
    places = [SHIPPED, CHECKOUT] if (CHECKOUT / "coder.toml").is_file() else [SHIPPED]
    return {file.stem: file for folder in places for file in sorted(folder.glob("*.toml"))}


def load(name: str) -> Recipe:
    """The recipe ``name``, a name or a config file; raises ``ValueError`` if there is none."""
    is_file = name.endswith(".toml")
    files = recipes()
    if not is_file and name not in files:
        raise unknown("recipe", name, files)
    file = Path(name) if is_file else files[name]
    try:
        read = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} must be TOML, got an error: {error}") from error
    settings = read.get("settings", {})
    keys = set(read) - {"settings"}
    if "recipe" in read and keys <= {"recipe", "open"}:
        base = load(read["recipe"])
        base = replace(base, name=name, open=read.get("open", base.open))
        if is_file:
            return base.having(settings)
        return replace(base, settings={**base.settings, **settings})
    if is_file or "train" not in read or not keys <= {"train", "open"}:
        raise ValueError(
            f'{file} must hold recipe = "NAME" and a table [settings], '
            f"got {', '.join(sorted(keys))}"
        )
    return Recipe(name, read["train"], settings, read.get("open", ""))


def train(name: str, **settings: Any) -> Found:
    """Train by the recipe ``name`` with other ``settings``.

    Raises ``ValueError`` for settings that do not fit it.
    """
    return load(name).having(settings).run()


def beside(model: str, folder: Path) -> Path:
    """The ``folder`` of a model to which a training adds a drafter.

    Raises ``ValueError`` for a shipped model (by name or installed folder), whose files all users
    share.
    """
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if model.startswith("pocket/") or any(
        folder.resolve().is_relative_to(library) for library in installed
    ):
        raise ValueError(
            f"{model} is shipped with the package and is not written to; "
            f"copy it (cp -r {folder} my-model) and give the copy"
        )
    return folder


def _import_checkout() -> None:
    """Make ``recipes`` importable wherever the command runs, without a change of ``sys.path``."""
    if "recipes" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location("recipes", CHECKOUT / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipes"] = module
    spec.loader.exec_module(module)


def _hints(thing: Any) -> dict[str, Any]:
    return typing.get_type_hints(thing, include_extras=True)


def _fields(hint: Any) -> dict[str, Any]:
    """The settings that are fields of the dataclass ``hint``."""
    return _hints(hint) if is_dataclass(hint) and hint is not Places else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _fitting(name: str, value: Any, kind: Any) -> Any:
    """``value`` converted to ``kind``; a text, as from a command line, is parsed."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if value is None:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is list:
        return [_fitting(name, item, typing.get_args(kind)[0]) for item in _as_list(value)]
    kind, *bounds = typing.get_args(kind) or (kind,)
    parsed = _read(value, kind)
    if not isinstance(parsed, kind) or (kind is int and isinstance(parsed, bool)):
        raise ValueError(f"{name} must be {WORDS[kind]}, got {value!r}")
    if bounds:
        _check_bounds(name, parsed, *bounds)
    return parsed


def _check_bounds(name: str, value: float, least: float, most: float = float("inf")) -> None:
    if not least <= value <= most:  # true for NaN, too
        bounds = f"at least {least}" if most == float("inf") else f"from {least} to {most}"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def _read(value: Any, kind: Any) -> Any:
    """``value``, or the ``kind`` that a text spells; what does not parse is returned as is."""
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and isinstance(value, Path):
        return str(value)
    if not isinstance(value, str):
        return value
    if kind is bool:
        return BOOLEANS.get(value.lower(), value)
    if kind is Path:
        return Path(value).expanduser()
    try:
        return kind(value)
    except ValueError:
        return value
