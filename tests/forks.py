"""Processes that need not import everything anew: forks of one that has done nothing else.

To import PyTorch and Transformers takes a process longer than most of what tests have it do. A fork
of pytest's own process would have what other tests left, and autograd's threads would keep it from
training.
"""

import multiprocessing
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
QWEN = "transformers.models.qwen2.modeling_qwen2"
IMPORTED = ["specmm.recipes.features", "specmm.image_ar.pipeline", QWEN]
BEGIN = """
import os, sys, torch
for name in [name for name in os.environ if name.startswith("TORCH")]:
    del os.environ[name]  # which PyTorch and we set for the process that it began in
os.environ.update(environment)
torch.set_num_threads(1)
for stream, file in enumerate(streams, start=1):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
"""
COMMAND = """
from specmm.cli import main
sys.argv = ["specmm", *words]
main()
"""
NOWHERE = ("/dev/null", "/dev/null")


def forked(
    code: str,
    streams: tuple[str, str] = NOWHERE,
    environment: Mapping[str, str] = {},
    **names: object,
) -> ForkServerProcess:
    """A process that runs ``code`` with ``names``; what it says goes into the files ``streams``."""
    FORKS.set_forkserver_preload(IMPORTED)  # if none is there
    given = dict(streams=streams, environment=dict(environment)) | names
    process = FORKS.Process(target=exec, args=(BEGIN + code, given))
    process.start()
    return process


def command(*words: object, **options: Any) -> ForkServerProcess:
    """``specmm`` with ``words``, forked with ``options``."""
    return forked(COMMAND, words=[str(word) for word in words], **options)


def ended(process: ForkServerProcess) -> int | None:
    """The exit status, waited for."""
    process.join()
    return process.exitcode


def said_by(code: str, environment: Mapping[str, str] = {}, **names: object) -> tuple[str, str]:
    """What a process that ends well says, and what it says of errors."""
    with tempfile.TemporaryDirectory() as folder:
        out, error = Path(folder) / "out", Path(folder) / "error"
        status = ended(forked(code, (str(out), str(error)), environment, **names))
        assert status == 0, error.read_text()
        return out.read_text(), error.read_text()
