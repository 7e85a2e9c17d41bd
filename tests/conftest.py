"""What must be said before torch is imported: the interpreter of kernels where there is no GPU, and
the threads.

Tests run in two processes (``make test``): with one thread each they do not wait for one another.
"""

import ctypes
import functools
import gc
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# programs of tests are not those of whoever runs them
os.environ.setdefault("SPECMM_PROGRAMS", f"{tempfile.gettempdir()}/specmm-programs-{os.getuid()}")

import pytest
import torch

from specmm.choose import contest, threads
from specmm.programs import program_cache
from tests.tape import record_on_tape

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parent
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
if platform.libc_ver()[0] == "glibc":
    # memory of a tensor is used again: asking the system for new pages each time costs a tenth
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**30)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**25)

# Tests whose results depend on how a processor rounds, which `make test-portable` runs as on others
NUMERIC = re.compile(
    r"golden/|_parity|unit/(continuous|kernels|shape|verify)/|test_batch_equal|test_continuous_batching"
    r"|unit/(diffusion|scales)/test_(cached|collaborative|draft|models|pairs|release|sampl|scale|session)"
    r"|unit/test_(batch_inv|block_dra|cache|decode|dtypes|hardware|prepacked|processors|rando|row|tree)"
    r"|unit/vlm/test_(drafters|eagle3|generate|msd|states|target)"
    r"|integration/test_(compiled|draft|eagle3|hybrids|jacobi|mar_[cps]|mtp|pocket|restricted|vlm_)"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if NUMERIC.search(item.path.relative_to(ROOT).as_posix()):
            item.add_marker("numeric")


gc.disable()  # what is imported and collected is not garbage


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def on_the_cpu() -> Iterator[None]:
    """Models are opened on the CPU, whose numbers tests compare; those of a GPU name it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specmm.loading.hardware.choose_device", lambda: torch.device("cpu"))
        yield


@pytest.fixture(autouse=True, scope="session")
def temporary_folders_with_pytests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """They go with pytest's old ones: what would remove them as a process ends does not run, for
    xdist ends its workers at once.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
        yield


@pytest.fixture(autouse=True, scope="module")
def forks_end_and_are_counted() -> Iterator[None]:
    """What they took of the processor, too (``.ci/run``); others may import something else."""
    yield
    forkserver._forkserver._stop()


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """A test that takes more threads (a benchmark does), or names a number, gives them back."""
    taken = torch.get_num_threads()
    yield
    threads._Named.choice = None
    if torch.get_num_threads() != taken:
        torch.set_num_threads(taken)


@pytest.fixture(autouse=True)
def measured_anew(monkeypatch):
    """Method ``auto`` knows nothing of other tests' calls."""
    monkeypatch.setattr(contest, "RECENT", 0.0)


@pytest.fixture
def traced(monkeypatch):
    """Programs are traced as for a compiler, and not built: seconds instead of half a minute. A
    round that would end its program midway is an error.
    """
    compiler = functools.partial(torch.compile, backend="aot_eager")

    def whole(function, *, fullgraph=True, **options):
        return compiler(function, fullgraph=True, **options)  # also what is no file of its own

    yield from _traced(monkeypatch, whole)


@pytest.fixture
def traced_in_parts(monkeypatch):
    """The same of functions that may end a program, by an error for example."""
    yield from _traced(monkeypatch, functools.partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """Programs cannot be built, as on a disk that is full."""

    def fail(*args, **options):
        raise torch._dynamo.exc.BackendCompilerFailed(fail, RuntimeError("no room"), None)

    monkeypatch.setattr(torch, "compile", lambda *args, **options: fail)
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path))  # set back afterwards


def _traced(monkeypatch, compiler):
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(program_cache, "used", lambda: None)  # these are no programs to keep
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def taped(monkeypatch):
    """Programs are graphs as on a GPU, recorded by what stands in for one there; gives their
    recorder, which counts.
    """
    families = ("continuous.programs", "continuous.pipeline", "scales.pipeline", "tokens.running")
    for module in (
        "programs.graphs",
        "hf.answers.running",
        *(f"image_ar.{name}" for name in families),
    ):
        monkeypatch.setattr(f"specmm.{module}.captures", lambda device: True)
    monkeypatch.setattr("specmm.programs.graphs.record_on_gpu", record_on_tape)
    monkeypatch.setattr("specmm.core.sorting.by_numpy", lambda x: False)
    record_on_tape.records = record_on_tape.replays = 0
    return record_on_tape
