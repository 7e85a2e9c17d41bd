"""Package discovery: the folders of ``[tool.setuptools.package-dir]`` and every package below them.

Declared here because setuptools cannot search several folders under different prefixes by itself,
and because the links ``specmm/kernels -> ../kernels`` are absent from an sdist and from a checkout
without symlinks.
"""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]


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


setup(packages=packages())
