"""A user's mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

DEBUG = "SPECMM_DEBUG"  # set: the traceback instead of the line
CommandError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def fail(message: str, status: int = 2) -> NoReturn:
    """Say what is wrong on one line and exit."""
    typer.echo("error: " + " ".join(message.split()), err=True)
    sys.exit(status)


def explain(error: Exception) -> str:
    """One line about an error: a system's error names its file, others speak for themselves."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


class Interrupted(Exception):
    """Ctrl-C, once everything finished is safe; its text says where that is."""


class OneLine(TyperGroup):
    """The group of all commands; it turns the errors of users into one line."""

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
        except CommandError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
                sys.exit(2)
            fail(error.format_message())
        except typer.Abort:
            fail("interrupted", 130)
        except Interrupted as stop:  # said once: the line of typer's own Ctrl-C would be a second
            typer.echo(f"interrupted: {stop}", err=True)
            sys.exit(130)
        except (ValueError, OSError) as error:
            if os.environ.get(DEBUG):
                raise
            fail(explain(error))
        if status == 130:  # how typer reports Ctrl-C itself
            fail("interrupted", 130)
        sys.exit(status if isinstance(status, int) else 0)
