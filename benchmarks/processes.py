"""Servers of OpenAI's protocol as processes of one thread each, and what they cost the machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

PATIENCE = 300.0  # seconds until a server is there


@dataclass
class Process:
    """The server ``name`` at ``url``, which writes to ``log``."""

    name: str
    url: str
    pid: int
    log: Path

    @property
    def processor_seconds(self) -> float:
        """What it has used of processors, by Linux' count."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident(self) -> float:
        """MiB of memory it holds."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def counts(self) -> dict[str, float]:
        """What its engine counts at /metrics, by name; nothing where there is no such page."""
        page = httpx.get(f"{self.url}/metrics")
        lines = page.text.splitlines() if page.status_code == 200 else []
        own = [line for line in lines if line.startswith("specmm_engine_")]
        pairs = (line.removeprefix("specmm_engine_").rsplit(" ", 1) for line in own)
        return {name.split("{")[0]: float(value) for name, value in pairs}


def ours(model: str, *options: str) -> list[str]:
    """The command of our server."""
    return [sys.executable, "-m", "specmm", "serve", model, "--dtype", "float32", *options]


def theirs(folder: Path, *options: str) -> list[str]:
    """That of transformers' server."""
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(folder)]
    return [*command, "--device", "cpu", "--dtype", "float32", *options]


@contextmanager
def running(name: str, command: Sequence[str], folder: Path) -> Iterator[Process]:
    """A server that was started by ``command``; its log is in ``folder``.

    Raises ``ValueError`` for one that ends, or does not answer in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / f"{name.replace(' ', '_').replace('/', '_')}.log"
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        started = subprocess.Popen(
            [*command, "--port", str(port)], env=one_thread, stdout=out, stderr=out
        )
        try:
            made = Process(name, f"http://127.0.0.1:{port}", started.pid, log)
            end = time.monotonic() + PATIENCE
            while not _answers(made.url):
                if started.poll() is not None or time.monotonic() > end:
                    raise ValueError(f"{name} did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield made
        finally:
            started.terminate()
            started.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models").status_code == 200
    except httpx.HTTPError:
        return False
