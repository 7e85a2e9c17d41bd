"""Which parts of the package may import which."""

import ast
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ["specmm", "vlm", "image_ar", "diffusion_drafters", "kernels", "metrics"]
PARTS += ["demos", "benchmarks", "recipes"]
COMMANDS = ROOT / "specmm/cli"


def imported(file: Path) -> set[str]:
    """Names of the modules that ``file`` imports anywhere, lazily or not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def above(file: Path) -> bool:
    """Whether ``file`` imports the command line."""
    return any(name == "specmm.cli" or name.startswith("specmm.cli.") for name in imported(file))


def test_nothing_imports_the_command_line() -> None:
    files = [
        file
        for part in PARTS
        for file in (ROOT / part).rglob("*.py")
        if not file.is_relative_to(COMMANDS)
    ]
    files.remove(ROOT / "specmm" / "__main__.py")  # the command itself
    assert len(files) > 100
    assert [str(file) for file in files if above(file)] == []


STRANGERS = {  # a folder and what it must know nothing of
    "vlm": ("specmm.diffusion_drafters", "specmm.image_ar", "specmm.text"),
    "diffusion_drafters": ("specmm.vlm", "specmm.image_ar"),
    "image_ar": ("specmm.vlm", "specmm.diffusion_drafters", "specmm.text"),
    "specmm/hf": ("specmm.vlm", "specmm.diffusion_drafters", "specmm.image_ar", "specmm.text"),
    "specmm/text": ("specmm.vlm", "specmm.diffusion_drafters", "specmm.image_ar"),
    "specmm/verify": ("specmm.hf", "specmm.vlm", "specmm.image_ar"),
}


@pytest.mark.parametrize("folder", STRANGERS)
def test_families_know_nothing_of_one_another(folder: str) -> None:
    strangers = STRANGERS[folder]
    found = [
        (str(file), name)
        for file in (ROOT / folder).rglob("*.py")
        for name in imported(file)
        if any(name == stranger or name.startswith(stranger + ".") for stranger in strangers)
    ]
    assert found == []


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for part in PARTS[:6]:
        for file in (ROOT / part).rglob("*.py"):
            inside = file.relative_to(ROOT).with_suffix("").parts
            if part == "specmm" and inside[1] in PARTS:  # links to the folders at the top
                continue
            name = ".".join(inside if part == "specmm" else ("specmm", *inside))
            found[name.removesuffix(".__init__")] = file
    return found


def of_package(file: Path, known: Collection[str]) -> set[str]:
    """The modules of the package that ``file`` imports; not a package of which it imports parts."""
    found = {name for name in imported(file) if name in known}
    return {n for n in found if not any(other.startswith(n + ".") for other in found)}


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Lazy imports count, too."""
    files = modules()
    assert len(files) > 180
    graph = {name: of_package(file, files) - {name} for name, file in files.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(files)
    graph["specmm.core.tree"].add("specmm.core.decode")
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def test_an_import_of_the_command_line_is_seen(tmp_path: Path) -> None:
    for line in (
        "from specmm.cli import language",
        "from specmm import cli",
        "def f():\n    import specmm.cli.language",
    ):
        (tmp_path / "module.py").write_text(line)
        assert above(tmp_path / "module.py"), line
