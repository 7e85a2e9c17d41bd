"""Do the tests fail when the code is wrong? What ``make mutants`` runs.

The ``.toml`` files beside this one list the mutations: a piece of text that occurs once in a file,
what to put in its place, and the tests that must then fail. The tests first run on the unchanged
tree, where all must pass; then each mutation is made in a copy of the tree and its tests run there,
in a process forked from this one, which has imported PyTorch and transformers once for all of them
(and never ``specmm``).

A mutation is killed by a test that fails, or that runs on and on (``timeout``), ten times as long
as unmutated: so name the quickest test that fails, and no whole file. Tests that cannot even be
collected or set up kill nothing: such a mutation is an error. One that is called ``equivalent``,
with its reason, must survive. The exit status is 1 unless all others are killed, and 2 for a list
that does not fit the tree or tests that fail on it as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

HERE = Path(__file__).parent
OPTIONS: dict[str, dict[str, Any]] = {
    "--only": dict(default="", metavar="TEXT", help="mutations whose file or description has TEXT"),
    "--jobs": dict(type=int, default=os.cpu_count(), help="mutations tried at a time"),
    "--least": dict(type=float, default=30.0, help="seconds that any mutation's tests may take"),
    "--root": dict(type=Path, default=HERE.parents[1], help="the tree to mutate a copy of"),
    "lists": dict(nargs="*", type=Path, default=sorted(HERE.glob("*.toml")), help="of mutations"),
}
NEEDED = (
    *(
        "specmm",
        "vlm",
        "image_ar",
        "diffusion_drafters",
        "kernels",
        "metrics",
        "benchmarks",
        "recipes",
        "demos",
    ),
    *("tests", "pyproject.toml"),
)
QUIET = ("-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib")
TOGETHER = 6  # files of tests that run unmutated in one process
PATIENCE = 10  # times what its tests take unmutated a mutation may take, beside --least


@dataclass(frozen=True)
class Mutation:
    """``before``, which occurs once in ``file``, becomes ``after``.

    ``what`` is then wrong, and ``tests`` must fail.
    """

    file: str
    what: str
    before: str
    after: str
    tests: tuple[str, ...]
    equivalent: str = ""  # the reason why no test can notice

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass
class Found:
    """What tests did: seconds of those that passed, the first that failed and why.

    ``broken`` is what kept others from running.
    """

    passed: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    broken: str = ""
    modules: list[str] = field(default_factory=list)


@dataclass
class Task:
    """``tests`` to run in a copy of the tree, with a ``mutation`` or as it is."""

    tests: Sequence[str]
    mutation: Mutation | None = None
    number: int = 0
    limit: float | None = None


def read(lists: Iterable[Path]) -> list[Mutation]:
    """The mutations of ``lists``.

    Raises ``ValueError`` for an entry with other fields than :class:`Mutation` has.
    """
    found = []
    names = {f.name for f in fields(Mutation)}
    for file in lists:
        for number, entry in enumerate(tomllib.loads(file.read_text())["mutation"], start=1):
            if not names - {"equivalent"} <= entry.keys() <= names:
                wanted, got = sorted(names), sorted(entry)
                raise ValueError(f"{file.name}: mutation {number} must have {wanted}, got {got}")
            found.append(Mutation(**(entry | {"tests": tuple(entry["tests"])})))
    return found


def pattern(text: str) -> re.Pattern[str]:
    """What finds ``text`` however a formatter has broken it into lines."""
    words = re.findall(r"\w+|[^\w\s]", text.strip())
    joined = re.escape(words[0])
    for before, word in pairwise(words):
        gap = r"\s+" if before[-1].isalnum() and word[0].isalnum() else r"\s*"
        comma = r",?\s*" if word in ")]}" and before not in ",([{" else ""  # a formatter adds it
        joined += gap + comma + re.escape(word)
    lead = text[: len(text) - len(text.lstrip())]
    tail = text[len(text.rstrip()) :]
    return re.compile(re.escape(lead) + joined + re.escape(tail))


def mutated(root: Path, mutation: Mutation) -> str:
    """The text of the mutated file.

    Raises ``ValueError`` where the mutation does not fit or leaves no Python.
    """
    text = (root / mutation.file).read_text()
    places = list(pattern(mutation.before).finditer(text))
    if len(places) != 1:
        found = f"found {len(places)} times: {mutation.before!r}"
        raise ValueError(f"{mutation}: the text before must occur once, {found}")
    if mutation.before == mutation.after:
        raise ValueError(f"{mutation}: the text after is the text before")
    changed = text[: places[0].start()] + mutation.after + text[places[0].end() :]
    try:
        compile(changed, mutation.file, "exec")
    except SyntaxError as error:
        raise ValueError(f"{mutation}: the text after makes no Python ({error})") from error
    return changed


def misfits(root: Path, mutations: Sequence[Mutation]) -> list[str]:
    """What is wrong with ``mutations`` of the tree at ``root``, one line each."""
    found = []
    for mutation in mutations:
        try:
            mutated(root, mutation)
        except (ValueError, OSError) as error:
            found.append(str(error))
        files = sorted({test.partition("::")[0] for test in mutation.tests})
        missing = [file for file in files if not (root / file).is_file()]
        found += [f"{mutation}: there is no {file}" for file in missing]
        if not mutation.tests:
            found.append(f"{mutation}: names no tests")
    return found


def copy_tree(root: Path, to: Path) -> None:
    """A copy of what the tests need, links as links."""
    to.mkdir()
    caches = shutil.ignore_patterns("__pycache__", ".*_cache")
    for name in NEEDED:
        if (root / name).is_dir():
            shutil.copytree(root / name, to / name, symlinks=True, ignore=caches)
        elif (root / name).exists():
            shutil.copy2(root / name, to / name)


@contextlib.contextmanager
def applied(copy: Path, task: Task) -> Iterator[None]:
    """The task's mutation in ``copy`` while the block runs.

    No two have the same time, by which Python tells whether a file was compiled before.
    """
    if task.mutation is None:
        yield
        return
    file = copy / task.mutation.file
    whole, at = file.read_text(), file.stat().st_mtime
    file.write_text(mutated(copy, task.mutation))
    os.utime(file, (at + task.number, at + task.number))
    try:
        yield
    finally:
        file.write_text(whole)
        os.utime(file, (at, at))


class Watch:
    """A pytest plugin that keeps what happened."""

    def __init__(self) -> None:
        self.found = Found()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "call":
            self.found.failed = self.found.failed or _why(report)
        elif report.failed:
            self.found.broken = self.found.broken or _why(report)
        elif report.when == "call" and report.passed:
            self.found.passed[report.nodeid] = report.duration

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.found.broken = self.found.broken or _why(report)


def _why(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(report.longrepr if crash is None else crash.message).strip().splitlines()
    kind = message[0 if crash else -1] if message else "?"
    return f"{report.nodeid} ({kind[:100]})"


def work(root: Path, copy: Path, tests: Sequence[str], answer: Connection) -> None:
    """What a forked process does: run ``tests`` in ``copy`` and send what it found."""
    os.setsid()
    os.chdir(copy)
    sys.path[:] = [str(copy), *(p for p in sys.path if Path(p).resolve() not in (root, HERE))]
    os.environ["PYTHONPATH"] = str(copy)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    watch = Watch()
    code = pytest.main([*QUIET, *tests], plugins=[watch])
    found = watch.found
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not found.broken:
        ending = pytest.ExitCode(code).name
        found.broken = f"pytest ended with {ending}: do all the tests named exist?"
    own = [m for name, m in sys.modules.items() if name.split(".")[0] == "specmm"]
    strays = {f for m in own if (f := getattr(m, "__file__", None)) and not f.startswith(str(copy))}
    if strays:
        found.broken = f"imported from outside the copy: {sorted(strays)[0]}"
    found.modules = list(sys.modules)
    answer.send(found)


@dataclass
class Running:
    """A process at work on ``task`` in ``copy``."""

    task: Task
    copy: Path
    process: BaseProcess
    answer: Connection
    cleanup: contextlib.ExitStack
    start: float

    def late(self) -> bool:
        """Whether it takes longer than its tests may."""
        return self.task.limit is not None and time.monotonic() - self.start > self.task.limit

    def stop(self) -> None:
        """End it, and what its tests have started."""
        assert self.process.pid is not None, "it was started"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.cleanup.close()


class Pool:
    """Runs tasks in forked processes, one in each of ``copies`` at a time."""

    def __init__(self, root: Path, copies: Sequence[Path]) -> None:
        self.root, self.free = root, list(copies)
        self.fork = multiprocessing.get_context("fork")

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Found | None, float]]:
        """Each of ``tasks`` as it is done, what was found (None: it ran too long), its seconds."""
        left, running = list(reversed(tasks)), list[Running]()
        try:
            while left or running:
                while left and self.free:
                    running.append(self._start(left.pop(), self.free.pop()))
                # a process that dies closes its end
                wait([one.answer for one in running], timeout=1)
                for one in [r for r in running if r.answer.poll() or r.late()]:
                    running.remove(one)
                    found = self._end(one)
                    self.free.append(one.copy)
                    yield one.task, found, time.monotonic() - one.start
        finally:
            for one in running:
                one.stop()

    def _start(self, task: Task, copy: Path) -> Running:
        cleanup = contextlib.ExitStack()
        cleanup.enter_context(applied(copy, task))
        here, there = self.fork.Pipe(duplex=False)
        tests = ["-x", *task.tests] if task.mutation else task.tests
        process = self.fork.Process(target=work, args=(self.root, copy, tests, there))
        process.start()
        there.close()
        return Running(task, copy, process, here, cleanup, time.monotonic())

    def _end(self, one: Running) -> Found | None:
        try:
            return one.answer.recv() if one.answer.poll() else None
        except EOFError:
            return Found(broken="the process died")
        finally:
            one.stop()


def by_file(mutations: Iterable[Mutation]) -> list[Task]:
    """All tests named, those of a few files together: to start a process takes as long as they."""
    files: dict[str, dict[str, None]] = {}
    for test in (test for mutation in mutations for test in mutation.tests):
        files.setdefault(test.partition("::")[0], {})[test] = None
    named = [[file] if file in tests else list(tests) for file, tests in files.items()]
    groups = (named[i : i + TOGETHER] for i in range(0, len(named), TOGETHER))
    return [Task(list(chain.from_iterable(group))) for group in groups]


def unmutated(pool: Pool, mutations: Sequence[Mutation]) -> dict[str, float]:
    """Seconds of every test of ``mutations`` on the tree as it is.

    What they import this process imports, too, so that the processes forked later need not.
    Raises ``ValueError`` unless all of them pass.
    """
    seconds: dict[str, float] = {}
    wrong = []
    tasks = by_file(mutations)
    for _task, found, _seconds in tqdm(pool.run(tasks), "unmutated", len(tasks)):
        assert found is not None, "no limit was set"
        wrong += [text for text in (found.failed, found.broken) if text]
        seconds |= found.passed
        preload(found.modules)
    tests = {test for mutation in mutations for test in mutation.tests}
    idle = [test for test in sorted(tests) if not taken(seconds, [test])[1]]
    wrong += [f"{test}: nothing of it ran" for test in idle]
    if wrong:
        raise ValueError("the tests must pass on the unmutated tree:\n" + "\n".join(wrong))
    return seconds


def preload(modules: Iterable[str]) -> None:
    """Import those of ``modules`` that are not ours and start no processes when imported."""
    ours = ("specmm", "tests", "benchmarks", "recipes", "conftest", "__main__", "__mp_main__")
    left = (*ours, "torch._inductor")  # which would start a pool
    for name in modules:
        if name not in sys.modules and not name.startswith(left) and "test_" not in name:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def taken(seconds: dict[str, float], tests: Sequence[str]) -> tuple[float, int]:
    """Of ``tests``, whose names may stand for several: unmutated seconds, and how many they are."""
    meant = [s for name, s in seconds.items() if any(_stands_for(test, name) for test in tests)]
    return sum(meant), len(meant)


def _stands_for(test: str, name: str) -> bool:
    """Whether ``test`` is the test called ``name``, or has it among its cases, or is its file."""
    return name == test or name.startswith((f"{test}[", f"{test}::"))


def verdict(mutation: Mutation, found: Found | None) -> tuple[str, str]:
    """killed, timeout, survived, equivalent or error, and what to say of it."""
    if found is not None and found.broken:
        return "error", found.broken
    if mutation.equivalent:
        if found is None or found.failed:
            return "error", f"called equivalent, but caught: {found.failed if found else 'timeout'}"
        return "equivalent", mutation.equivalent
    if found is None:
        return "timeout", "its tests run on and on"
    if found.failed:
        return "killed", found.failed
    return "survived", "by " + ", ".join(mutation.tests)


def judged(
    pool: Pool, mutations: Sequence[Mutation], seconds: dict[str, float], least: float
) -> dict[str, int]:
    """Try every one of ``mutations``, say what became of it, and count."""
    tasks = []
    for number, mutation in enumerate(mutations, start=1):
        limit = least + PATIENCE * taken(seconds, mutation.tests)[0]
        tasks.append(Task(mutation.tests, mutation, number, limit))
    counts: dict[str, int] = {}
    with tqdm(total=len(tasks), desc="mutations") as bar:
        for task, found, took in pool.run(tasks):
            assert task.mutation is not None
            status, why = verdict(task.mutation, found)
            counts[status] = counts.get(status, 0) + 1
            bar.write(f"{status:10} {task.mutation}", file=sys.stdout)
            bar.write(f"{'':10} {why}, {took:.1f} s", file=sys.stdout)
            bar.update()
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, about in OPTIONS.items():
        parser.add_argument(name, **about)
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    mutations = [m for m in read(options.lists) if options.only in str(m)]
    wrong = misfits(root, mutations) if mutations else [f"no mutation has {options.only!r}"]
    if wrong:
        tqdm.write("\n".join(wrong), file=sys.stderr)
        return 2
    start = time.monotonic()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    sys.dont_write_bytecode = False  # a copy is compiled once, not by each process
    tqdm.monitor_interval = 0  # its thread would not survive a fork
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        count = max(1, min(options.jobs, len(mutations)))
        copies = [Path(folder).resolve() / str(i) for i in range(count)]
        for copy in copies:
            copy_tree(root, copy)
        pool = Pool(root, copies)
        try:
            counts = judged(pool, mutations, unmutated(pool, mutations), options.least)
        except ValueError as error:
            tqdm.write(str(error), file=sys.stderr)
            return 2
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    seconds = time.monotonic() - start
    tqdm.write(f"{len(mutations)} mutations in {seconds:.0f} s: {told}", file=sys.stdout)
    return int(bool(counts.keys() & {"survived", "error"}))


if __name__ == "__main__":
    sys.exit(main())
