"""Output of commands: one JSON value on stdout on request, tables, and mistakes on one line."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from specmm.cli.starting import started
from specmm.extending.registry import OPTION, nearest
from specmm.loading.files import sentence_of, write_whole

DEBUG = "SPECMM_DEBUG"  # if set, the traceback of a mistake is shown, too
ClickError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Interrupted(Exception):
    """Ctrl-C, raised once all finished work is saved; its text says where."""


class OneLine(TyperGroup):
    """The group of all commands, which prints users' mistakes on one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; exit status 0, 2 for a user's mistake, 130 after Ctrl-C."""
        try:
            status = super().main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )
        except ClickError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
                sys.exit(2)
            _fail(_wrong_value(error) or _unknown_option(error, self) or error.format_message())
        except typer.Abort:
            _fail("interrupted", 130)
        except Interrupted as stop:  # the only line: typer's own about Ctrl-C would be a second
            say(f"interrupted: {stop}")
            sys.exit(130)
        except (ValueError, OSError) as error:
            if os.environ.get(DEBUG):
                raise
            _fail(sentence_of(error))
        finally:
            started()
        if status == 130:  # how typer reports Ctrl-C itself
            _fail("interrupted", 130)
        sys.exit(status if isinstance(status, int) else 0)


class OwnOrOther(TyperGroup):
    """A command group that passes arguments without a subcommand to the command ``own``."""

    own = "model"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See the class."""
        mine = args[:1] and args[0] in self.commands
        return super().parse_args(ctx, args if mine else [self.own, *args])


def _fail(message: str, status: int = 2) -> NoReturn:
    """Print ``message`` on one line and exit with ``status``."""
    say("error: " + " ".join(message.split()))
    sys.exit(status)


def _wrong_value(error: Any) -> str:
    """The expected and the given value of an option, from typer's ``error``; "" if it has none."""
    checked = getattr(error.__cause__, "errors", None)  # pydantic's, which typer asks
    param = getattr(error, "param", None)
    if checked is None or param is None:
        return ""
    first = checked()[0]
    expected = first["msg"].partition(",")[0].removeprefix("Input should ")
    return f"{max(param.opts, key=len)} must {expected}, got {first['input']}"


def _unknown_option(error: Any, group: Any) -> str:
    """The message for an option that a command lacks, with similar ones or the commands of
    ``group`` that have it; empty for other errors.
    """
    name, context = getattr(error, "option_name", None), error.ctx
    if name is None or context is None:
        return ""
    options = [option.removeprefix("--") for option in sorted(_options(context.command))]
    near = nearest(name.lstrip("-").replace("_", "-"), options, OPTION)
    others = [option for option, command in group.commands.items() if name in _options(command)]
    hint = f"; did you mean --{' or --'.join(near)}?" if near else ""
    if others and not near:
        hint = f", which is one of specmm {', '.join(others)}"
    return f"No such option: {name}{hint}"


def _options(command: Any) -> set[str]:
    """The long names of all options of a ``command`` and of its subcommands."""
    inner = getattr(command, "commands", {}).values()
    flags = {name for param in command.params for name in param.opts if name.startswith("--")}
    return flags.union(*map(_options, inner))


def stdout_reserved() -> contextlib.AbstractContextManager[object]:
    """Context that sends libraries' prints to stderr, so that stdout holds only the result."""
    return contextlib.redirect_stdout(sys.stderr)


def counted(numbers: Mapping[str, int]) -> str:
    """A line with the ``numbers`` of files by kind, the total first."""
    return ", ".join(f"{number} {name}" for name, number in numbers.items())


def say(text: str) -> None:
    """A line for people, on stderr."""
    typer.echo(text, err=True)


def emit(value: Any) -> None:
    """One JSON value on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False, default=str))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned text, the first one underlined."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def write_text(file: Path, text: str) -> None:
    """Write ``file`` whole or not at all."""
    write_whole(file, text.encode())
