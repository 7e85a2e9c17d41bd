"""The wheel holds every package under ``specmm``, nothing beside it, and lives next to Hugging
Face's ``kernels``.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from specmm import zoo
from specmm.loading.extras import install
from tests.integration.page_snippets import blocks, commands

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PYPROJECT["tool"]["setuptools"]["package-dir"]
FIVE = {name: folder for name, folder in FOLDERS.items() if name != "specmm"}


def sources(suffixes: tuple[str, ...], *names: str) -> set[str]:
    """Files of the packages ``names`` with these suffixes, as the paths they have in a wheel."""
    found = set()
    for name in names:
        base = ROOT / FOLDERS[name]
        for folder, below, files in os.walk(base):  # does not follow the links in specmm/
            below[:] = [b for b in below if b != "__pycache__"]
            inside = Path(name.replace(".", "/")) / Path(folder).relative_to(base)
            found |= {(inside / f).as_posix() for f in files if f.endswith(suffixes)}
    return found


def python(executable: Path, code: str, cwd: Path, path: str = "") -> list[str]:
    """Lines printed by ``code`` in a fresh interpreter, started outside the repository."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (
        {"PYTHONPATH": path} if path else {}
    )
    done = subprocess.run(
        [executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def pip(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    command += map(str, arguments)
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without its links, as a zip download or Windows has it."""
    copy = tmp_path_factory.mktemp("checkout")
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    for folder in FOLDERS.values():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignore)
    for link in [p for p in (copy / "specmm").iterdir() if p.is_symlink()]:
        link.unlink()
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    done = pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, checkout)
    assert done.returncode == 0, done.stderr
    return next(out.glob("specmm-*.whl"))


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it that sees our dependencies, but not the editable
    install.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    executable = folder / "bin/python"
    [site] = python(executable, "import sysconfig; print(sysconfig.get_path('purelib'))", folder)
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done = pip("--python", executable, "install", "--no-deps", wheel)
    assert done.returncode == 0, done.stderr
    return executable


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The folder of the programs of a fresh environment, which sees what specmm needs and no
    specmm; its ``pip`` asks no index.
    """
    needed, programs = tmp_path / "needed", tmp_path / "venv/bin"
    needed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "specmm" not in entry.name:
            (needed / entry.name).symlink_to(entry)
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    [site] = python(programs / "python", code, tmp_path)
    Path(site, "needed.pth").write_text(f"{needed}\n")
    own = f'"{sys.executable}" -m pip --python "{programs}/python" -q'
    offline = "--no-index --no-build-isolation --disable-pip-version-check"
    (programs / "pip").write_text(f'#!/bin/sh\nshift\nexec {own} install {offline} "$@"\n')
    (programs / "pip").chmod(0o755)
    return programs


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_readmes_own_lines_install(number, checkout, wheel, empty, tmp_path):
    """From a checkout, and elsewhere from its wheel."""
    where = (checkout, wheel.parent)[number]
    line = commands(blocks(ROOT / "README.md")[0].code)[number]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PATH"] = f"{empty}:{environment['PATH']}"
    for words, place in ((line, where), (["specmm", "zoo"], tmp_path)):
        done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "pocket/llamagen" in done.stdout and (empty / "specmm").is_file()


@pytest.mark.slow
def test_wheel_holds_every_module_and_only_specmm(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"specmm"}
    assert {n for n in names if n.endswith(".py")} == sources((".py",), *FOLDERS)
    assert "specmm/py.typed" in names
    packages = ("verify", "zoo", "image_ar/tokens/drafters", "recipes/training", "metrics")
    for package in packages:
        assert any(n.startswith(f"specmm/{package}/") for n in names), package


@pytest.mark.slow
def test_wheel_holds_the_pocket_models(wheel):
    data = {
        s
        for s in sources((".safetensors", ".json", ".jinja", ".md"), "specmm")
        if s.startswith("specmm/zoo/")
    }
    assert data <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_trainings_for_models_of_ones_own_are_in_the_wheel(clean_python, text_folder, tmp_path):
    """Those of the pocket models are not: they stay in the checkout, with what makes their data."""
    code = """
import sys
from specmm.cli import main
from specmm.recipes.recipe import load, recipes
for name in recipes():
    load(name).kinds(), print(name)
sys.argv[1:] = "train proxy model --set text=text.txt --set least=1 --out out".split()
main()
"""
    shutil.copytree(text_folder, tmp_path / "model")
    (tmp_path / "text.txt").write_text("one two three " * 20)
    names = ["deer", "dflash", "diffusion", "drafter", "eagle3", "msd", "mtp", "proxy"]
    assert python(clean_python, code, tmp_path)[:8] == names
    assert (tmp_path / "out" / "tokens.pt").is_file()


def test_the_package_needs_nothing_of_the_checkout():
    for name, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            lines = file.read_text(encoding="utf-8").splitlines()
            named = [
                line
                for line in lines
                if re.match(r"\s*(from|import) (recipes|benchmarks|tests)\b", line)
            ]
            assert not named, f"{name}: {file} imports what is not in the wheel: {named[0]}"


@pytest.mark.slow
def test_imports_beside_hugging_face_kernels(clean_python, tmp_path):
    done = pip("install", "--no-deps", "--target", tmp_path / "hf", "kernels")
    if done.returncode:
        pytest.skip(
            f"Hugging Face's kernels could not be installed: {done.stderr.strip().splitlines()[-1]}"
        )
    code = """
import kernels, specmm.kernels, specmm.metrics.frechet, specmm.image_ar.tokens.gpt
from transformers import LlamaForCausalLM
print(kernels.__file__, specmm.metrics.frechet.__file__, *specmm.kernels.__path__)
"""
    theirs, ours, kernels = python(clean_python, code, tmp_path, path=str(tmp_path / "hf"))
    assert theirs.startswith(str(tmp_path / "hf" / "kernels"))
    for path in (ours, kernels):
        assert path.startswith(str(clean_python.parents[1])), path


def tracked() -> list[str]:
    """The files of the repository, links left out; skips where this is no checkout."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("an unpacked sdist is not built again: it has no list of its files")
    return [name for name in done.stdout.splitlines() if not (ROOT / name).is_symlink()]


@pytest.mark.slow
def test_an_sdist_holds_the_repository_and_its_readme_renders_on_an_index(tmp_path):
    names = tracked()
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next((tmp_path / "dist").glob("specmm-*.tar.gz"))) as sdist:
        held = {member.name.partition("/")[2] for member in sdist.getmembers()}
        facts = sdist.extractfile(next(n for n in sdist.getnames() if n.endswith("/PKG-INFO")))
        assert facts is not None
        told = facts.read().decode()
    assert set(names) - held <= {".gitignore"}, sorted(set(names) - held)[:10]
    assert "Description-Content-Type: text/markdown" in told
    assert "Classifier: " in told and "pip install ." in told and "](docs/" not in told


def test_a_line_to_install_names_packages_of_an_extra():
    """Which a checkout and a wheel have alike; no index knows specmm. So do cards' own lines."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert install("app") == "pip install 'gradio>=6' pandas"
    for name in ("fid", "batch", "captions"):
        assert shlex.split(install(name)) == ["pip", "install", *extras[name]]
    for folder in zoo.pocket_models().values():
        line = json.loads((folder / "card.json").read_text()).get("install", "")
        packages = set(line.partition(" && ")[0].split()[2:])
        assert packages <= set(extras["smol"]) and "specmm" not in line
        assert line in (folder / "README.md").read_text()


def test_links_of_the_readme_lead_to_the_repository_or_are_words():
    describe = runpy.run_path(str(ROOT / "setup.py"))["description"]
    text = "![gain](docs/gain.svg) [start](docs/a.md), [paper](https://arxiv.org)"
    assert describe(text, None) == " start, [paper](https://arxiv.org)"
    found = describe(text, "https://example.org/specmm/")
    assert "![gain](https://example.org/specmm/raw/main/docs/gain.svg)" in found
    assert "[start](https://example.org/specmm/blob/main/docs/a.md)" in found
    readme = (ROOT / "README.md").read_text()
    for place in re.findall(r"\]\((?!https?:)([^)]+)\)", readme):
        assert (ROOT / place).is_file(), place


@pytest.mark.slow
def test_checkout_without_links_imports(checkout, tmp_path):
    code = (
        "import specmm.metrics.frechet as f, specmm.image_ar.tokens.gpt as g; "
        "print(f.__file__, g.__file__)"
    )
    frechet, gpt = python(Path(sys.executable), code, tmp_path, path=str(checkout))
    assert Path(frechet) == checkout / "metrics/frechet.py"
    assert Path(gpt) == checkout / "image_ar/tokens/gpt.py"


@pytest.mark.slow
def test_transformers_imports_from_the_root():
    code = "from transformers import LlamaForCausalLM; print(LlamaForCausalLM.__name__)"
    assert python(Path(sys.executable), code, ROOT, path=str(ROOT)) == ["LlamaForCausalLM"]


@pytest.mark.parametrize("name", FIVE)
def test_five_folders_are_plain_and_linked(name):
    assert not (ROOT / FIVE[name] / "__init__.py").exists(), (
        "it would make a top-level package of the folder"
    )
    link = ROOT / name.replace(".", "/")
    if link.is_symlink():
        assert link.resolve() == ROOT / FIVE[name]


def test_packages_below_have_an_init():
    """``setup.py`` finds packages by their ``__init__.py``; a folder of modules without one would
    be left out.
    """
    modules = sources((".py",), *FOLDERS)
    roots = {name.replace(".", "/") for name in FOLDERS}
    folders = {m.rsplit("/", 1)[0] for m in modules} - roots
    assert {f for f in folders if f"{f}/__init__.py" not in modules} == set()
