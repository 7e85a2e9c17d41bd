"""Do the tests fail when the code is wrong? What ``make mutants`` runs.

The ``.toml`` files beside this one list the mutations: a piece of text that occurs once in a file,
what to put in its place, and the tests that must then fail. Nothing on the disk is changed. One
process imports everything and collects all the tests named, once; they first run on the unchanged
code, where all must pass. Then a process is forked from it for each mutation, exchanges the code of
the functions that are mutated, and runs the tests (``swapping.py``). A mutation of what a module
does when it is imported, and one that its tests did not notice so, is tried once more in a process
that imports the mutated source anew.

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
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from lists import Mutation, misfits, mutated, read
from swapping import Functions, exchange, import_instead
from tqdm import tqdm

HERE = Path(__file__).parent
OPTIONS: dict[str, dict[str, Any]] = {
    "--only": dict(default="", metavar="TEXT", help="mutations whose file or description has TEXT"),
    "--jobs": dict(type=int, default=os.cpu_count(), help="mutations tried at a time"),
    "--least": dict(type=float, default=30.0, help="seconds that any mutation's tests may take"),
    "--root": dict(type=Path, default=HERE.parents[1], help="the tree"),
    "lists": dict(nargs="*", type=Path, default=sorted(HERE.glob("*.toml")), help="of mutations"),
}
QUIET = ("-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib")
TOGETHER = 6  # files of tests that run unmutated in one process
PATIENCE = 10  # times what its tests take unmutated a mutation may take, beside --least


@dataclass
class Found:
    """What tests did: seconds of those that passed, the first that failed and why.

    ``broken`` is what kept others from running.
    """

    passed: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    broken: str = ""


@dataclass
class Task:
    """``tests`` to run, with a ``mutation`` or as it is.

    ``changes`` are the functions that it changes, if it changes nothing else.
    """

    tests: Sequence[str]
    mutation: Mutation | None = None
    number: int = 0
    limit: float | None = None
    changes: list[tuple[FunctionType, CodeType]] = field(default_factory=list)


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


def quietly(root: Path, arguments: Sequence[str]) -> Found:
    """Run pytest in the tree at ``root`` without a word."""
    os.chdir(root)
    sys.path[:] = [str(root), *(p for p in sys.path if Path(p).resolve() not in (root, HERE))]
    os.environ["PYTHONPATH"] = str(root)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    watch = Watch()
    code = pytest.main([*QUIET, *arguments], plugins=[watch])
    found = watch.found
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not found.broken:
        ending = pytest.ExitCode(code).name
        found.broken = f"pytest ended with {ending}: do all the tests named exist?"
    own = [m for name, m in sys.modules.items() if name.split(".")[0] == "specmm"]
    strays = {f for m in own if (f := getattr(m, "__file__", None)) and not f.startswith(str(root))}
    if strays:
        found.broken = f"imported from outside the tree: {sorted(strays)[0]}"
    return found


def work(root: Path, task: Task, answer: Connection) -> None:
    """What a forked process does: run the task's tests and send what it found."""
    os.setsid()
    if task.changes:
        exchange(task.changes)
    elif task.mutation:
        import_instead(root / task.mutation.file, mutated(root, task.mutation))
    answer.send(quietly(root, ["-x", *task.tests] if task.mutation else task.tests))


@dataclass
class Running:
    """A process at work on ``task``."""

    task: Task
    process: BaseProcess
    answer: Connection
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


class Pool:
    """Runs tasks in processes forked from this one, ``jobs`` at a time."""

    def __init__(self, root: Path, jobs: int) -> None:
        self.root, self.jobs = root, jobs
        self.fork = multiprocessing.get_context("fork")

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Found | None, float]]:
        """Each of ``tasks`` as it is done, what was found (None: it ran too long), its seconds."""
        left, running = list(reversed(tasks)), list[Running]()
        try:
            while left or running:
                while left and len(running) < self.jobs:
                    running.append(self._start(left.pop()))
                # a process that dies closes its end
                wait([one.answer for one in running], timeout=1)
                for one in [r for r in running if r.answer.poll() or r.late()]:
                    running.remove(one)
                    yield one.task, self._end(one), time.monotonic() - one.start
        finally:
            for one in running:
                one.stop()

    def _start(self, task: Task) -> Running:
        here, there = self.fork.Pipe(duplex=False)
        process = self.fork.Process(target=work, args=(self.root, task, there))
        process.start()
        there.close()
        return Running(task, process, here, time.monotonic())

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


@dataclass
class Ready:
    """What the process that imports everything says before it tries mutations: seconds of every
    test, what is wrong with them, the modules imported, and how many mutations it will try.
    """

    seconds: dict[str, float]
    wrong: list[str]
    modules: list[str]
    tried: int


def unmutated(pool: Pool, mutations: Sequence[Mutation]) -> tuple[dict[str, float], list[str]]:
    """Seconds of every test of ``mutations`` on the tree as it is, and what does not pass there."""
    seconds: dict[str, float] = {}
    wrong = []
    for _task, found, _seconds in pool.run(by_file(mutations)):
        assert found is not None, "no limit was set"
        wrong += [text for text in (found.failed, found.broken) if text]
        seconds |= found.passed
    tests = {test for mutation in mutations for test in mutation.tests}
    idle = [test for test in sorted(tests) if not taken(seconds, [test])[1]]
    return seconds, wrong + [f"{test}: nothing of it ran" for test in idle]


def in_memory(
    root: Path, jobs: int, tasks: Sequence[Task], least: float, answer: Connection
) -> None:
    """What the process does that imports everything: collect the tests, run them unmutated, and try
    those of ``tasks`` that exchange functions alone. Sends a :class:`Ready`, then a task's number,
    what was found and its seconds, for each.
    """
    mutations = [task.mutation for task in tasks if task.mutation]
    files = {test.partition("::")[0] for mutation in mutations for test in mutation.tests}
    found = quietly(root, ["--collect-only", *sorted(files)])
    pool = Pool(root, jobs)
    seconds, wrong = unmutated(pool, mutations) if not found.broken else ({}, [found.broken])
    functions = Functions()
    for task in tasks:
        assert task.mutation is not None, "these are mutations"
        text = mutated(root, task.mutation)
        task.changes = functions.changes(root / task.mutation.file, text)
        task.limit = limit(task.mutation, seconds, least)
    tried = [task for task in tasks if task.changes and not wrong]
    answer.send(Ready(seconds, wrong, list(sys.modules), len(tried)))
    for task, found_so, took in pool.run(tried):
        answer.send((task.number, found_so, took))


def limit(mutation: Mutation, seconds: dict[str, float], least: float) -> float:
    """Seconds that the tests of ``mutation`` may take."""
    return least + PATIENCE * taken(seconds, mutation.tests)[0]


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


def found_by(
    root: Path, jobs: int, mutations: Sequence[Mutation], least: float
) -> Iterator[tuple[Mutation, Found | None, float]]:
    """What the tests of each mutation did (None: they ran too long), and their seconds.

    Raises ``ValueError`` unless all of them pass on the tree as it is.
    """
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    tasks = {number: Task(m.tests, m, number) for number, m in enumerate(mutations)}
    everything = (root, jobs, list(tasks.values()), least, there)
    process = fork.Process(target=in_memory, args=everything)
    process.start()
    there.close()
    try:
        ready: Ready = here.recv()
        if ready.wrong:
            raise ValueError(
                "the tests must pass on the unmutated tree:\n" + "\n".join(ready.wrong)
            )
        for _ in range(ready.tried):
            number, found, took = here.recv()
            if found is None or (found.failed and not found.broken):
                yield mutations[number], found, took
                del tasks[number]
    finally:
        process.terminate()
        process.join()
    if tasks:
        preload(ready.modules)
    for task in tasks.values():
        task.limit = limit(mutations[task.number], ready.seconds, least)
    for task, found, took in Pool(root, jobs).run(list(tasks.values())):
        yield mutations[task.number], found, took


def judged(
    root: Path, jobs: int, mutations: Sequence[Mutation], least: float
) -> dict[str, list[str]]:
    """Try every one of ``mutations``, and say what became of it: lines by status."""
    lines: dict[str, list[str]] = {}
    with tqdm(total=len(mutations), desc="mutations") as bar:
        for mutation, found, took in found_by(root, jobs, mutations, least):
            status, why = verdict(mutation, found)
            line = f"{status:10} {mutation}\n{'':10} {why}, {took:.1f} s"
            lines.setdefault(status, []).append(line)
            bar.write(line, file=sys.stdout)
            bar.update()
    return lines


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
    tqdm.monitor_interval = 0  # its thread would not survive a fork
    try:
        lines = judged(root, options.jobs, mutations, options.least)
    except ValueError as error:
        tqdm.write(str(error), file=sys.stderr)
        return 2
    wrong = lines.get("survived", []) + lines.get("error", [])
    told = ", ".join(f"{len(of)} {status}" for status, of in sorted(lines.items()))
    seconds = time.monotonic() - start
    # Once more at the end, which is all that a log of continuous integration shows.
    tqdm.write("\n".join(wrong), file=sys.stdout)
    tqdm.write(f"{len(mutations)} mutations in {seconds:.0f} s: {told}", file=sys.stdout)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
