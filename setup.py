"""Package discovery, and the README as an index shows it.

The folders of ``[tool.setuptools.package-dir]`` and every package below them are declared here,
because setuptools cannot search several folders under different prefixes by itself, and because
the links ``specmm/kernels -> ../kernels`` are absent from an sdist and from a checkout without
symlinks.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PYPROJECT["tool"]["setuptools"]["package-dir"]
REPOSITORY = PYPROJECT["project"].get("urls", {}).get("Repository")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)]+)\)")  # to a file of the repository


def packages() -> list[str]:
    """Names of all packages; folders without ``__init__.py`` below the roots are data, links are
    not followed.
    """
    below = [
        f"{name}.{sub}"
        for name, folder in FOLDERS.items()
        for sub in find_packages(str(ROOT / folder))
    ]
    return sorted([*FOLDERS, *below])


def description(readme: str, repository: str | None) -> str:
    """The README where its files are not beside it: links lead to the ``repository``, or, without
    one, are words.
    """

    def link(found: re.Match[str]) -> str:
        picture, text, place = found.groups()
        if repository is None:
            return "" if picture else text
        kind = "raw" if picture else "blob"
        return f"{picture}[{text}]({repository.rstrip('/')}/{kind}/main/{place})"

    return LINK.sub(link, readme)


if __name__ == "__main__":
    setup(
        packages=packages(),
        long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), REPOSITORY),
        long_description_content_type="text/markdown",
    )
