"""Options that several commands take."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_type_hints

import typer

Model = Annotated[
    str, typer.Argument(help="A folder, a pocket model (see specmm zoo) or a hub id.")
]
Options = Annotated[
    list[str], typer.Option("--option", "-o", help="KEY=VALUE of the method; may be repeated.")
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Folder of the method's drafter, if it is not beside the model, or the name of one of "
        "your own."
    ),
]
Height = Annotated[int | None, typer.Option(help="Pixels, for models of any size.")]
Width = Annotated[int | None, typer.Option(help="Pixels; goes with --height.")]
Seed = Annotated[
    int | None, typer.Option(min=0, max=2**63 - 1, help="Without it one is drawn and printed.")
]


def _check_device(name: str) -> str:
    """``name``; raises ``ValueError`` for "meta", on which nothing runs."""
    if name.partition(":")[0] == "meta":
        raise ValueError("device must be one of this machine's, such as cpu, got 'meta'")
    return name


Device = Annotated[
    str,
    typer.Option(
        callback=_check_device, help="auto (a GPU where there is one), cpu, cuda, cuda:1 and so on."
    ),
]
Dtype = Annotated[
    str, typer.Option(help="auto (the device's fastest), float32, bfloat16 or float16.")
]


def _name_threads(count: int | None) -> None:
    """Apply ``--threads``, for every command."""
    if count is not None:
        from specmm.choose.threads import name_number

        name_number(count, "--threads")


Threads = Annotated[
    int | None,
    typer.Option(callback=_name_threads, help="Of a CPU's products; else the fastest, measured."),
]
Key = Annotated[
    str,
    typer.Option(
        envvar="SPECMM_API_KEY",
        show_envvar=False,
        help="The key of clients; better as SPECMM_API_KEY, which no list of processes shows.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout, all else on stderr.")]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile rounds: about twice as fast, after a minute (a GPU: at once, more); "
        "--compiled true.",
    ),
]
Compiled = Annotated[
    str | None,
    typer.Option(
        help="true, false (the usual), or auto: once the time saved exceeds what compiling takes."
    ),
]


def compiled_as(text: str | None, always: bool) -> bool | Literal["auto"]:
    """The value of --compiled, or of --compile (``always``); raises ``ValueError`` for any other
    value and if the two contradict each other.
    """
    if text is None:
        return always
    meanings: dict[str, bool | Literal["auto"]] = {"true": True, "false": False, "auto": "auto"}
    if text not in meanings:
        raise ValueError(f"--compiled must be true, false or auto, got {text}")
    if always and text != "true":
        raise ValueError(f"--compile is --compiled true, got --compiled {text}; leave one out")
    return meanings[text]


def with_fields(
    kind: type[Any], name: str, **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a command from a function with a parameter ``name`` of the dataclass ``kind``: the
    fields, annotated as options, replace the parameter, with ``defaults`` instead of the fields'
    defaults.

    The function's own annotations must be evaluated, not text: typer reads them.
    """
    hints = get_type_hints(kind, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    fields = {
        field.name: inspect.Parameter(
            *(field.name, keyword),
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(kind)
    }

    def wrap(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(*args: Any, **arguments: Any) -> Any:
            values = kind(**{field: arguments.pop(field) for field in fields if field in arguments})
            return command(*args, **{name: values}, **arguments)

        others = inspect.signature(command).parameters.values()
        parameters = [*(each for each in others if each.name != name), *fields.values()]
        command_with_fields: Any = called
        command_with_fields.__signature__ = inspect.Signature(parameters)
        command_with_fields.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return wrap


def given(**options: Any) -> dict[str, Any]:
    """The ``options`` that were given, which are not None."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(models: str, **options: object) -> None:
    """Raise ``ValueError`` for the first of ``options`` that is set: ``models`` do not read it."""
    for name, value in options.items():
        if not (value is None or value is False or value == []):
            option = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} does not serve {models}; leave it out")
