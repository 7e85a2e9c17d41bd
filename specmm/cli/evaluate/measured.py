"""What all measuring commands share: the options about pictures, features and printing, in one
decorator.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from specmm.cli.evaluate import options
from specmm.cli.evaluate.show import show
from specmm.cli.evaluate.sources import Reader, name_of
from specmm.cli.options import Json
from specmm.cli.output import stdout_reserved

Command = Callable[..., Any]


def reading(network: str) -> Callable[[Command], Command]:
    """Make a command of a function that takes a ``reader``: with the options of a ``Reader`` in its
    place.

    Its network is ``network`` if not given.
    """

    def wrap(function: Command) -> Command:
        shared = _picture_options(network)

        @functools.wraps(function)
        def command(**given: Any) -> Any:
            reader = Reader(**{p.name: given.pop(p.name) for p in shared})
            return function(reader=reader, **given)

        own = [p for p in _parameters(function) if p.name != "reader"]
        return _with_parameters(command, [*own, *shared])

    return wrap


def measured(network: str) -> Callable[[Command], Command]:
    """Make a command of a function that takes a ``reader`` and gives one or more measurements: it
    prints them.

    Beside the options of ``reading`` it has ``--name`` and ``--json``.
    """

    def wrap(function: Command) -> Command:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            as_json, name, reader = given.pop("as_json"), given.pop("name"), given["reader"]
            with stdout_reserved():
                found = function(**given)
            several = found if isinstance(found, Sequence) else [found]
            show([reader.noted(m) for m in several], as_json, name or name_of(given["source"]))

        printing = [_parameter("name", options.Name, None), _parameter("as_json", Json, False)]
        return reading(network)(_with_parameters(command, [*_parameters(function), *printing]))

    return wrap


def _parameters(function: Command) -> list[inspect.Parameter]:
    """The parameters of ``function``, their annotations evaluated."""
    hints = get_type_hints(function, include_extras=True)
    return [
        p.replace(annotation=hints[p.name]) for p in inspect.signature(function).parameters.values()
    ]


def _with_parameters(command: Command, parameters: Sequence[inspect.Parameter]) -> Command:
    """``command`` with the signature that typer is to see."""
    changed: Any = command
    changed.__signature__ = inspect.Signature(parameters)
    changed.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _picture_options(network: str) -> list[inspect.Parameter]:
    """The parameters of a ``Reader``, as options."""
    return [
        _parameter("network", options.Network, network),
        _parameter("weights", options.Weights, None),
        _parameter("skip_bad", options.SkipBad, False),
        _parameter("workers", options.Workers, None),
        _parameter("batch", options.Batch, 32),
        _parameter("device", options.Device, "cpu"),
    ]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )
