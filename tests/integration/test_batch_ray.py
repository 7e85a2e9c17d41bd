"""``--engine ray`` on this machine: an item that kills its worker is set aside, everything else is
done once.
"""

from __future__ import (
    annotations,  # what is defined in a test travels to the actor without the names in its hints
)

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from specmm.jobs.engines import run_ray
from specmm.jobs.finish import finish
from specmm.jobs.folder import Job, Limits, Spec, prepare
from specmm.jobs.items import Item, seed_of
from specmm.jobs.run import pending
from specmm.jobs.verify import verify


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cluster of one core, gone after the test."""
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    except Exception as error:  # ray raises a bare one
        if "timed out during startup" not in str(error):
            raise
        pytest.skip("ray gives its processes half a minute to start, and this machine is too busy")
    yield
    ray.shutdown()


def drawing(fatal: str = "") -> Any:
    """An opener of a worker that draws flat pictures, and dies at the item ``fatal``. It is made
    here, so that it travels to the actor.
    """

    def opener() -> Any:
        from PIL import Image

        from specmm.jobs.results import Result

        class Flat:
            network = None

            def check(self, item: Item) -> None:
                pass

            def key(self, item: Item) -> int:
                return 0

            def turns(self, item: Item) -> int:
                return 1

            def run(self, items: list[Item], rows: int = 0) -> list[Result]:
                if any(i.id == fatal for i in items):
                    os._exit(1)
                stats = {"tokens": 1, "tau": 1.0, "seconds": 0.1, "batch": len(items)}
                claim = {"kind": "exact", "reason": "", "tv": 0.0}
                facts = {"method": "ar", "certificate": claim, "stats": stats}
                return [
                    Result(i, facts, image=Image.new("RGB", (4, 4), i.seed % 2**24)) for i in items
                ]

        return Flat()

    return opener


@pytest.mark.slow
def test_a_worker_that_dies_takes_nothing_with_it(one_core: Any, tmp_path: Path) -> None:
    items = [Item(f"set/{i}", "class", "heart", seed_of(str(i), 0)) for i in range(6)]
    prepare(tmp_path, spec := Spec("any"))
    counter = run_ray(
        Job(tmp_path, spec, Limits(batch=2, retries=0, actors=1)),
        pending(tmp_path, items),
        opener=drawing(fatal="set/3"),
    )
    finish(tmp_path, spec, items, 1000)
    assert sorted(counter.done) == [f"set/{i}" for i in (0, 1, 2, 4, 5)]
    assert counter.failed == ["set/3"]
    assert "worker died" in json.loads((tmp_path / "failed.jsonl").read_text())["error"]
    found = verify(tmp_path, items)
    assert (found.done, found.failed, found.left, found.problems) == (5, 1, 0, [])
    assert pending(tmp_path, items) == []


def test_a_cluster_that_does_not_answer_is_one_sentence(monkeypatch, tmp_path):
    """Where Ray would warn for a minute and a half."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    prepare(tmp_path, spec := Spec("any"))
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=rf"got 127.0.0.1:{port}, where nothing answers"):
        run_ray(Job(tmp_path, spec), [Item("a", "class", "heart", 1)])
    assert time.perf_counter() - begin < 20  # with the import of ray


@pytest.mark.slow
def test_as_many_workers_as_fit(one_core: Any, tmp_path: Path, caplog: Any) -> None:
    """Four where there is one core: the others would never start, nor their items end."""

    items = [Item(f"set/{i}", "class", "heart", seed_of(str(i), 0)) for i in range(4)]
    prepare(tmp_path, spec := Spec("any"))
    job = Job(tmp_path, spec, Limits(batch=2, actors=4))
    counter = run_ray(job, items, opener=drawing())
    assert sorted(counter.done) == [item.id for item in items] and not counter.failed
    assert "1 workers fit into the cluster, not 4" in caplog.text
