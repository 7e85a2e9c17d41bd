"""Many users of the app at once: ``python -m benchmarks.soak.load --users 20 --seconds 180``.

The app runs in another process, as ``specmm demo --app`` starts it; every user sends a request,
waits for the end of the answer, and sends the next, in the browser's protocol (join the queue,
follow its events). Raises when a request fails, when a user gets less than half of what others of
the same tab get, or when memory grows after the first minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import environment
from specmm.app.fields import MOST_PARAMETERS

# MB that the server may grow by after the first third: frames of pictures, the allocator's own
ROOM = 60.0
TEXT_EVERY = 4  # every fourth user completes text, the others draw


@dataclass
class User:
    """One user: how long each of the answers took, and what went wrong."""

    number: int
    function: int
    data: list[Any]
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def stay(self, address: str, until: float) -> None:
        """Send requests until the clock says ``until``."""
        with httpx.Client(base_url=address, timeout=300) as client:
            while time.monotonic() < until:
                begin = time.monotonic()
                try:
                    self._ask(client)
                except Exception as error:  # whatever it is, it is what the measurement is about
                    self.errors.append(f"{type(error).__name__}: {error}")
                    time.sleep(1)
                self.seconds.append(time.monotonic() - begin)

    def _ask(self, client: httpx.Client) -> None:
        session = uuid.uuid4().hex
        asked = {"data": self.data, "fn_index": self.function, "session_hash": session}
        client.post("/gradio_api/queue/join", json=asked).raise_for_status()
        with client.stream(
            "GET", "/gradio_api/queue/data", params={"session_hash": session}
        ) as events:
            for line in events.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: ") else {}
                if event.get("msg") == "process_completed":
                    if not event["success"]:
                        raise RuntimeError(str(event.get("output")))
                    return
        raise RuntimeError("the stream ended without an answer")


@contextmanager
def server(port: int) -> Iterator[tuple[str, int]]:
    """The app at its address, and its process."""
    command = [str(Path(sys.executable).parent / "specmm"), "demo", "--app", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            time.sleep(0.5)
            try:
                httpx.get(f"{address}/config", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the app did not start"
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(30)


def resident(pid: int) -> float:
    """Memory of a process in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def people(address: str, count: int) -> list[User]:
    """Users of the tabs: most draw, each another class and seed, some complete text."""
    config = httpx.get(f"{address}/config").json()
    by_name = {d.get("api_name"): d["id"] for d in config["dependencies"]}
    drawing = by_name["pictures"]
    writing = by_name.get("text")
    own = [""] * MOST_PARAMETERS  # the models' values
    found = []
    for n in range(count):
        if n % TEXT_EVERY == TEXT_EVERY - 1 and writing is not None:
            asked = ["pocket/coder", f"def f{n}(x):", "ar", "deer", 32, n]
            found.append(User(n, writing, [*asked, *own]))
        else:
            asked = ["pocket/llamagen", "heart", "", "ar", "lantern++", n]
            found.append(User(n, drawing, [*asked, *own]))
    return found


def load(count: int, seconds: float, port: int) -> dict[str, Any]:
    """Run it and print what happened."""
    with server(port) as (address, pid):
        users = people(address, count)
        marks = []
        begin = time.monotonic()
        threads = [threading.Thread(target=u.stay, args=(address, begin + seconds)) for u in users]
        for thread in threads:
            thread.start()
        while any(t.is_alive() for t in threads):
            time.sleep(5)
            marks.append(
                {"second": round(time.monotonic() - begin), "megabytes": round(resident(pid), 1)}
            )
    answers = [len(u.seconds) - len(u.errors) for u in users]
    return {
        "users": count,
        "seconds": seconds,
        "answers": answers,
        "median_wait": statistics.median(s for u in users for s in u.seconds),
        "longest_wait": max(s for u in users for s in u.seconds),
        "errors": [e for u in users for e in u.errors],
        "grown_megabytes": round(marks[-1]["megabytes"] - marks[len(marks) // 3]["megabytes"], 1),
        "memory": marks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--port", type=int, default=7999)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = load(given.users, given.seconds, given.port)
    text = json.dumps(found | {"environment": environment()}, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    fair = min(found["answers"]) * 2 >= max(found["answers"])
    if found["errors"] or not fair or found["grown_megabytes"] > ROOM:
        raise SystemExit("errors, an unfair queue, or memory that grows: see above")


if __name__ == "__main__":
    main()
