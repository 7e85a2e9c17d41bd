"""Which parts of the package may import which."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("specmm", "vlm", "image_ar", "diffusion_drafters", "kernels", "metrics", "demos")
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
    files = [file for part in PARTS for file in (ROOT / part).rglob("*.py") if not file.is_relative_to(COMMANDS)]
    assert len(files) > 100
    assert [str(file) for file in files if above(file)] == []


def test_an_import_of_the_command_line_is_seen(tmp_path: Path) -> None:
    for line in ("from specmm.cli import ask", "from specmm import cli", "def f():\n    import specmm.cli.ask"):
        (tmp_path / "module.py").write_text(line)
        assert above(tmp_path / "module.py"), line
