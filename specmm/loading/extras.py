"""The command that installs the packages of an extra of ``pyproject.toml``, however this package
was installed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires


def install(extra: str) -> str:
    """``pip install`` and the packages of ``extra``."""
    try:
        requirements = [line.partition(";") for line in requires("specmm") or ()]
    except PackageNotFoundError:  # a checkout that nothing installed
        return f"pip install -e '.[{extra}]'"
    packages = [name.strip() for name, _, when in requirements if f'extra == "{extra}"' in when]
    return shlex.join(["pip", "install", *packages])


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Context for imports that ``what`` needs; if they fail, raises a ``ValueError`` that says how
    to install the ``extra``.
    """
    try:
        yield
    except ImportError as error:
        if not error.name or error.name.split(".")[0] == "specmm":
            raise
        raise ValueError(f"{what} needs {error.name}, run: {install(extra)}") from error
