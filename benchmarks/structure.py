"""How large and how tangled the package is: ``python -m benchmarks.structure``.

Counts lines, modules, imports and annotations of what the wheel holds (recipes excepted), and the
files that a picture, an answer and a completion pass between the command and the attention. Writes
``results/structure.json`` and ``.csv``.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from benchmarks.common import Row, write_results

ROOT = Path(__file__).parents[1]
FOLDERS = ("specmm", "vlm", "image_ar", "diffusion_drafters", "kernels", "metrics", "demos")
RECIPES = "specmm/recipes/"
SMALL = 80  # lines: a module of one importer should have more, or be part of it
WIDTH = 100
COMMANDS = {
    "picture": "generate pocket/llamagen --class heart --seed 0 --method lantern++ --out {out}",
    "answer": "ask pocket/llava {out}/0000-heart.png -q What? --method msd --max-new-tokens 8",
    "completion": "complete pocket/coder -p def --method block --max-new-tokens 16",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(prog="benchmarks.structure", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--static", action="store_true", help="run no command")
    asked = parser.parse_args(arguments)
    rows = static_rows(sources(ROOT))
    if not asked.static:
        rows += passed_rows()
    for row in rows:
        print(f"{row['what']:62} {row['value']:>8}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    write_results(asked.out, "structure", rows, {"commit": commit.stdout.strip()})
    return 0


def sources(root: Path) -> dict[str, str]:
    """The text of every module of the package, by its path; folders linked elsewhere count once."""
    files = [f for folder in FOLDERS for f in sorted((root / folder).rglob("*.py"))]
    linked = tuple(f"specmm/{folder}/" for folder in FOLDERS)
    names = {f.relative_to(root).as_posix(): f for f in files}
    return {name: f.read_text() for name, f in names.items() if not name.startswith(linked)}


def module_name(path: str) -> str:
    """What a file is imported as."""
    inside = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return inside if inside.split(".")[0] == "specmm" else f"specmm.{inside}"


def imports(text: str, known: Sequence[str]) -> set[str]:
    """The ``known`` modules that ``text`` imports, lazily or not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside if inside & set(known) else {node.module}
    return found & set(known)


def registered(text: str, known: Sequence[str]) -> set[str]:
    """The ``known`` modules that a registry in ``text`` names as "module:function"."""
    return set(re.findall(r"\"(specmm[\w.]*):\w+\"", text)) & set(known)


def static_rows(texts: dict[str, str]) -> list[Row]:
    """What can be counted without running anything."""
    files = {module_name(path): path for path in texts}
    uses = {name: imports(texts[path], list(files)) - {name} for name, path in files.items()}
    named = [registered(texts[path], list(files)) - {name} for name, path in files.items()]
    importers = Counter(module for used in [*uses.values(), *named] for module in used)
    counted = {path: text for path, text in texts.items() if not path.startswith(RECIPES)}
    lines = {path: text.count("\n") for path, text in counted.items()}
    lone = [
        path
        for path in counted
        if importers[module_name(path)] == 1
        and lines[path] < SMALL
        and not path.endswith("__init__.py")
    ]
    nodes = [node for text in counted.values() for node in ast.walk(ast.parse(text))]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = sorted((n.end_lineno or n.lineno) - n.lineno + 1 for n in functions)
    public = Counter(
        n.name
        for text in counted.values()
        for n in ast.parse(text).body
        if isinstance(n, ast.ClassDef) and not n.name.startswith("_")
    )
    wide = sum(len(line) > WIDTH for text in counted.values() for line in text.split("\n"))
    asked = sum(
        bool(re.search(r"\b(isinstance|hasattr)\(", line))
        for text in counted.values()
        for line in text.split("\n")
    )
    pairs = [n for n in nodes if isinstance(n, ast.Assign) and _pair(n)]
    return [
        _row("lines, recipes not counted", sum(lines.values())),
        _row("modules, recipes not counted", len(counted)),
        _row(f"modules with one importer and under {SMALL} lines", len(lone)),
        _row("import cycles, lazy imports included", _cycles(uses)),
        _row("lines with isinstance or hasattr, of anything", asked),
        _row("Any in annotations", sum(isinstance(n, ast.Name) and n.id == "Any" for n in nodes)),
        _row("public classes whose name another has", sum(n > 1 for n in public.values())),
        _row("assignments of several values, as a, b = x, y", len(pairs)),
        _row(f"lines of more than {WIDTH} characters", wide),
        _row("functions: median lines", lengths[len(lengths) // 2]),
        _row("functions of more than 60 lines", sum(n > 60 for n in lengths)),
        _row("longest module, lines", max(lines.values())),
    ]


def passed_rows() -> list[Row]:
    """The files and functions of the package that each command runs through."""
    rows = []
    with tempfile.TemporaryDirectory() as out:
        for name, command in COMMANDS.items():
            words = [word.format(out=out) for word in command.split()]
            program = [sys.executable, "-m", "benchmarks.structure_trace", *words]
            run = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=True)
            files, functions = run.stdout.split()[-2:]
            rows.append(_row(f"files passed, {name}", int(files)))
            rows.append(_row(f"functions passed, {name}", int(functions)))
    return rows


def _row(what: str, value: int) -> Row:
    return {"what": what, "value": value}


def _pair(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _cycles(uses: dict[str, set[str]]) -> int:
    """1 if modules import one another in a circle. A package and its own modules are none."""
    graph = {
        name: {other for other in used if not name.startswith(f"{other}.")}
        for name, used in uses.items()
    }
    graph["specmm"] = set()  # its names are imported when they are asked for
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
