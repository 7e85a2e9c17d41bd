"""What every benchmark shares: contenders by name, the machine's facts, tables, budgets, seeds."""

from __future__ import annotations

import ast
import csv
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from recipes import data
from specmm import methods
from specmm.image_ar.pipeline import ImagePipeline
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.loading import hardware

RESULTS = Path("benchmarks/results")
CACHE = Path("runs/benchmarks")  # ignored by git
COMMIT = "SPECMM_COMMIT"
EMOJI = data.EMOJI.expanduser()
Row = dict[str, Any]

DataFolder = Annotated[Path, typer.Option(help="Folder of the emoji.")]
CacheFolder = Annotated[Path, typer.Option(help="Where samples are kept.")]
Out = Annotated[Path, typer.Option(help="Folder of the tables.")]
File = Annotated[Path | None, typer.Option(help="Where the result is written, too.")]
Threads = Annotated[int, typer.Option(min=1, help="Of torch.")]
Dtype = Annotated[
    str, typer.Option(help="Of model and drafters; greedy texts are token-equal in float32.")
]


def label(method: methods.Method) -> str:
    """The name and the options that tell contenders apart, ``lantern++(lambda_=2.0, k=10)``."""
    always = {"lantern++": ("lambda_", "k"), "lantern": ("delta", "k")}.get(method.name, ())
    options = [
        f"{f.name}={getattr(method, f.name)!r}"
        for f in dataclasses.fields(method)
        if f.name in always or getattr(method, f.name) != f.default
    ]
    return f"{method.name}({', '.join(options)})" if options else method.name


def parse(text: str) -> methods.Method:
    """The method that ``label`` writes as ``text``; raises ``ValueError`` for anything else."""
    name, bracket, options = text.partition("(")
    if not bracket:
        return methods.resolve(name)
    try:
        call = ast.parse(f"f({options}", mode="eval").body
        assert isinstance(call, ast.Call)
        found = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, AssertionError, ValueError) as error:
        raise ValueError(f"method must read name(option=value, …), got {text!r}") from error
    return methods.resolve(name, **found)


def load_pipeline(
    model: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Any:
    """The pipeline of ``model``'s family, without a progress bar, in ``device``'s fastest dtype."""
    pipe = ImagePipeline.from_pretrained(model, torch_dtype=dtype, device=device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def dtype_name(pipe: Any) -> str:
    """``float32``, ``bfloat16``, …"""
    return hardware.dtype_name(next(pipe.transformer.parameters()).dtype)


def playable(pipe: LlamaGenPipeline, contenders: Iterable[methods.Method]) -> list[methods.Method]:
    """Those the model has what they need for; prints which are left out, and why."""
    codes = pipe.transformer.config.vocab_size
    kept = []
    for method in contenders:
        if not pipe.parts.serves(method):
            needs = method.choice.drafter
            print(f"left out {label(method)}: the model has no {needs!r} drafter", flush=True)
        elif getattr(method, "k", 0) > codes - 2:
            print(f"left out {label(method)}: the codebook has {codes} codes only", flush=True)
        else:
            kept.append(method)
    return kept


def generators(seeds: Iterable[int]) -> list[torch.Generator]:
    """One CPU generator a seed."""
    return [torch.Generator().manual_seed(int(s)) for s in seeds]


def balanced_labels(labels: np.ndarray, count: int) -> np.ndarray:
    """``count`` class ids of which every prefix has nearly the proportions of ``labels`` [N].

    Each place goes to the class that is furthest behind its share: the first n do not depend on
    ``count``.
    """
    share = np.bincount(labels) / len(labels)
    given = np.zeros(len(share))
    found = np.empty(count, dtype=np.int64)
    for i in range(count):
        found[i] = np.argmax(share * (i + 1) - given)
        given[found[i]] += 1
    return found


class Budget:
    """Minutes that a benchmark may take (None: no limit), counted from its creation."""

    def __init__(self, minutes: float | None = None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def spent(self) -> bool:
        """Whether the time is over."""
        return self.end is not None and time.monotonic() >= self.end


def environment(**facts: Any) -> dict[str, Any]:
    """Machine, versions, date and git SHA, and whatever else is to be recorded (``facts``)."""
    return {
        "machine": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": load(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "git": git_sha(),
        **facts,
    }


def load() -> float | None:
    """Processes that want to run, over the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in info.read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if info.exists() and names else platform.processor() or platform.machine()


def git_sha() -> str:
    """The commit measured, with ``+`` where library code differs from it.

    Where the code was copied without its repository, what the variable ``SPECMM_COMMIT`` says.
    """
    if given := os.environ.get(COMMIT):
        return given
    try:
        sha = _git("rev-parse", "--short=12", "HEAD")
        paths = (
            "specmm",
            "image_ar",
            "vlm",
            "diffusion_drafters",
            "metrics",
            "kernels",
            "benchmarks/*.py",
        )
        return sha + ("+" if _git("status", "--porcelain", "--", *paths) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    here = Path(__file__).parent.parent
    return subprocess.run(
        ["git", *arguments], cwd=here, check=True, capture_output=True, text=True
    ).stdout.strip()


def write_results(out: Path, name: str, rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
    """``name``.json ({environment, rows}) and ``name``.csv (the rows without lists) in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    whole = {"environment": dict(facts), "rows": list(rows)}
    (out / f"{name}.json").write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    with (out / f"{name}.csv").open("w", newline="") as file:
        for key, value in facts.items():
            file.write(f"# {key}: {value}\n")
        table = csv.DictWriter(file, columns_of(rows), extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)


def show(found: Any, out: Path | None) -> None:
    """Print what was ``found`` as JSON, and write it to ``out``."""
    text = json.dumps(found, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")


def columns_of(rows: Sequence[Row]) -> list[str]:
    """What a table of ``rows`` shows: all but lists and objects."""
    nested = {key for row in rows for key, value in row.items() if isinstance(value, list | dict)}
    return [key for key in dict.fromkeys(key for row in rows for key in row) if key not in nested]


def read_results(out: Path, name: str) -> dict[str, Any] | None:
    """What ``write_results`` wrote, or None."""
    file = out / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def merged(out: Path, name: str, rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """The results ``name`` in ``out``, with ``rows`` in place of those of the same ``keys``."""
    before = (read_results(out, name) or {"rows": []})["rows"]
    new = [[row[key] for key in keys] for row in rows]
    return [row for row in before if [row[key] for key in keys] not in new] + list(rows)
