"""Several replicas behind one address by Ray Serve: one that is killed is missed by nobody but whom
it was answering.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

pytest.importorskip("ray.serve")
BODY = {"model": "pocket/coder", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
LONG = {**BODY, "max_tokens": 300, "n": 4, "temperature": 1, "ignore_eos": True}


def children(pid, name):
    """Processes that the process ``pid`` started, by a part of their names."""
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", name], capture_output=True)
    return [int(pid) for pid in found.stdout.split()]


def replicas(raylet):
    return children(raylet, "ray::ServeReplica:specmm")


@contextmanager
def serving(count, output):
    """The process that serves so many replicas, and the address of completions; what it says goes
    to the file ``output``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specmm", "serve", "pocket/coder", "--threads", "1"]
    command += ["--port", str(port), "--replicas", str(count), "--drain", "5"]
    place = {**os.environ, "RAY_ADDRESS": "local"}
    # a file: a process of Ray that is left would keep a pipe open
    with (
        output.open("wb") as said,
        subprocess.Popen(command, env=place, stdout=said, stderr=subprocess.STDOUT) as served,
    ):
        try:
            while b"serving pocket/coder at" not in output.read_bytes():
                assert served.poll() is None, output.read_text(errors="replace")
                time.sleep(0.1)
            yield served, f"http://127.0.0.1:{port}/v1/completions"
        finally:
            served.send_signal(signal.SIGTERM)
            served.wait(60)


@pytest.mark.slow
def test_a_replica_that_is_killed(tmp_path):
    with serving(2, tmp_path / "output") as (served, url):

        def ask(body=BODY):
            return httpx.post(url, json=body, timeout=300)

        wanted = ask().json()["choices"][0]["text"]
        [raylet] = children(served.pid, "/raylet ")
        assert len(replicas(raylet)) == 2
        waiting = []

        def wait():
            try:
                waiting.append(ask(LONG).status_code)
            except httpx.TransportError:  # cut off
                waiting.append(502)

        threads = [threading.Thread(target=wait) for _ in range(6)]
        for thread in threads:
            thread.start()
            time.sleep(0.3)  # so that the next one sees whose queue is shorter
        os.kill(replicas(raylet)[0], signal.SIGKILL)
        for _ in range(10):
            assert ask().json()["choices"][0]["text"] == wanted
        for thread in threads:
            thread.join(120)
        assert len(waiting) == 6 and min(waiting) == 200 and max(waiting) >= 500
        last = replicas(raylet)
    assert served.returncode == 0
    assert last and not any(os.path.exists(f"/proc/{pid}") for pid in last)


@pytest.mark.slow
def test_without_its_own_node_a_server_ends(tmp_path):
    """Nothing would be served any more; whoever started it may start it again."""
    output = tmp_path / "output"
    with serving(1, output) as (served, _):
        [raylet] = children(served.pid, "/raylet ")
        os.kill(raylet, signal.SIGKILL)
        assert served.wait(120) == 2
    assert "error: Ray's node on this machine died" in output.read_text(errors="replace")
