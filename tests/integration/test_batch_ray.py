"""``--engine ray`` on this machine, on clusters of one node and of several: an item that kills its
worker is set aside, a node that cannot make items is left out, everything else is done once.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import specmm
from specmm.jobs.engines import run_job
from specmm.jobs.folder import Job, Limits, Spec
from specmm.jobs.items import Item
from specmm.jobs.journal import Ledger
from specmm.jobs.progress import Progress
from specmm.jobs.verify import verify
from tests.flat import drawing, some

LONG = 120.0  # seconds, of busy machines


class Nodes:
    """A cluster of this machine, whose nodes the test adds."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()

    def add(self, **options: Any) -> Any:
        """A node; the driver is connected to the first."""
        import ray

        try:
            node = self.cluster.add_node(include_dashboard=False, **{"num_gpus": 0, **options})
        except Exception as error:  # ray raises a bare one
            if "timed out during startup" not in str(error):
                raise
            pytest.skip("ray gives its processes half a minute to start; this machine is too busy")
        if not ray.is_initialized():
            ray.init(self.cluster.address, log_to_driver=False, logging_level="error")
        return node


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A cluster without nodes, gone after the test."""
    import ray

    monkeypatch.chdir(tmp_path)  # ray's workers import from the driver's folder first
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(specmm.__file__).parents[1]))
    found = Nodes()
    yield found
    ray.shutdown()
    found.cluster.shutdown()


@pytest.fixture
def one_core(nodes: Nodes) -> Nodes:
    nodes.add(num_cpus=1)
    return nodes


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not until():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)


def ids(folder: Path) -> list[str]:
    """The ids in a job's index, in order; one that is there twice is twice here."""
    lines = (folder / "index.jsonl").read_text().splitlines()
    return sorted(json.loads(line)["id"] for line in lines)


def make(folder: Path, items: Sequence[Item], opener: Any = None, **limits: Any) -> Progress:
    """What a job on the cluster comes to."""
    job = Job(folder, Spec("any"), Limits(**limits))
    return run_job(job, items, "ray", opener=opener or drawing())[1]


@pytest.mark.slow
def test_a_worker_that_dies_takes_nothing_with_it(one_core: Nodes, tmp_path: Path) -> None:
    items = some(6)
    counter = make(tmp_path, items, drawing(fatal="set/3"), batch=2, retries=0, actors=1)
    assert counter.done == len(items) - 1 and ids(tmp_path) == [f"set/{i}" for i in (0, 1, 2, 4, 5)]
    assert counter.failed == ["set/3"]
    assert "worker died" in json.loads((tmp_path / "failed.jsonl").read_text())["error"]
    found = verify(tmp_path, items)
    assert (found.done, found.failed, found.left, found.problems) == (5, 1, 0, [])
    assert make(tmp_path, items).done == 0


@pytest.mark.slow
def test_an_item_that_kills_is_tried_on_another_node(nodes: Nodes, tmp_path: Path) -> None:
    """And set aside only if it kills there, too; the nodes stay."""
    for _ in range(2):
        nodes.add(num_cpus=1)
    items = some(9)
    deaths = tmp_path / "deaths"
    opener = drawing(fatal="set/3", deaths=deaths)
    counter = make(tmp_path, items, opener, batch=3, retries=1)
    assert ids(tmp_path) == sorted(i.id for i in items if i.id != "set/3")
    assert counter.done == len(items) - 1
    assert counter.failed == ["set/3"]
    record = Ledger(tmp_path / "journal")["set/3"]
    assert record["tries"] == 2 and "worker died" in record["error"]
    assert len(set(deaths.read_text().split())) == 2


def without_specmm(folder: Path) -> dict[str, str]:
    """The environment of a node that cannot import it."""
    (folder / "specmm").mkdir(parents=True)
    (folder / "specmm" / "__init__.py").write_text("raise ImportError('not here')")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_a_node_of_other_code_is_left_out(nodes: Nodes, tmp_path: Path, caplog: Any) -> None:
    """It is named, and the others go on; here they wait until that is so."""
    nodes.add(num_cpus=1)
    ignored = shutil.ignore_patterns("pocket", "__pycache__")
    own = tmp_path / "other" / "specmm"
    shutil.copytree(Path(specmm.__file__).parent, own, ignore=ignored)
    with (own / "image_ar" / "records.py").open("a") as file:
        file.write("# another\n")
    nodes.add(num_cpus=1, env_vars={"PYTHONPATH": str(own.parent)})
    items, until = some(12), tmp_path / "until"
    with ThreadPoolExecutor() as aside:
        run = aside.submit(make, tmp_path / "out", items, drawing(until=until), batch=2)
        wait(lambda: "is left out: it has source" in caplog.text)
        until.touch()
        counter = run.result(LONG)
    assert counter.done == len(items) and not counter.failed
    assert ids(tmp_path / "out") == sorted(i.id for i in items)
    assert caplog.text.count("is left out") == 1


@pytest.mark.slow
def test_without_a_node_that_can_the_job_ends(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add(num_cpus=0)
    nodes.add(num_cpus=2, env_vars=without_specmm(tmp_path / "without"))
    with pytest.raises(
        ValueError, match=r"no node of the Ray cluster can make the items: .* not here"
    ):
        make(tmp_path / "out", some(4))


@pytest.mark.slow
def test_a_node_that_joins_late(nodes: Nodes, tmp_path: Path, caplog: Any) -> None:
    """A head without CPUs waits, and says so."""
    nodes.add(num_cpus=0)
    items = some(4)
    with ThreadPoolExecutor() as aside:  # nodes are added by the main thread
        run = aside.submit(make, tmp_path, items)
        wait(lambda: "waiting until one joins" in caplog.text)
        nodes.add(num_cpus=1)
        counter = run.result(LONG)
    assert counter.done == len(items) and ids(tmp_path) == [item.id for item in items]


@pytest.mark.slow
def test_without_its_own_node_a_job_ends(nodes: Nodes, tmp_path: Path) -> None:
    """Ray starts nothing for a driver whose node died, whatever nodes join."""
    own = nodes.add(num_cpus=1)
    items = some(40)
    with ThreadPoolExecutor() as aside:
        run = aside.submit(make, tmp_path, items, drawing(seconds=0.5))
        wait(lambda: bool(list((tmp_path / "journal").glob("ray-*"))))
        own.kill_raylet(check_alive=True)
        with pytest.raises(ValueError, match="node on this machine died"):
            run.result(LONG)


@pytest.mark.slow
def test_where_memory_runs_out(nodes: Nodes, tmp_path: Path, caplog: Any) -> None:
    """Ray's monitor kills actors: there are fewer, and if one alone is too many, it is said."""
    little = {"memory_usage_threshold": 0.01, "memory_monitor_refresh_ms": 100}
    nodes.add(num_cpus=2, _system_config=little)
    with pytest.raises(ValueError, match=r"no node of the Ray .* workers died .* memory"):
        make(tmp_path, some(8), drawing(seconds=5.0), batch=2, retries=0)
    assert "memory ran out on" in caplog.text and ": 1 workers are there now" in caplog.text


@pytest.mark.slow
def test_a_lost_node_and_batches_that_grow(nodes: Nodes, tmp_path: Path) -> None:
    """Its items are made elsewhere within seconds, by actors whose batches grow as they live."""
    nodes.add(num_cpus=1)
    lost = nodes.add(num_cpus=1)
    items = some(200)
    with ThreadPoolExecutor() as aside:
        run = aside.submit(make, tmp_path, items, drawing(seconds=0.5))
        wait(lambda: len(list((tmp_path / "journal").glob("ray-*"))) == 2)
        nodes.cluster.remove_node(lost, allow_graceful=False)
        counter = run.result(LONG)
    assert counter.done == len(items) and not counter.failed
    assert ids(tmp_path) == sorted(item.id for item in items)
    assert verify(tmp_path, items).problems == []
    records = map(json.loads, (tmp_path / "index.jsonl").read_text().splitlines())
    assert max(record["stats"]["batch"] for record in records) >= 16


@pytest.mark.slow
def test_as_many_workers_as_fit(one_core: Nodes, tmp_path: Path, caplog: Any) -> None:
    """Four where there is one core: the others would never start, nor their items end."""
    counter = make(tmp_path, items := some(4), batch=2, actors=4)
    assert counter.done == len(items) and not counter.failed
    assert ids(tmp_path) == [item.id for item in items]
    assert "1 workers fit into the cluster, not 4" in caplog.text


@pytest.mark.slow
def test_one_actor_a_gpu_or_shares_of_it(nodes: Nodes, tmp_path: Path) -> None:
    """By Ray's count of GPUs, of which there is none here."""
    nodes.add(num_cpus=4, num_gpus=2)
    items = some(12)
    for asked, actors in ((0, 2), (4, 4)):
        place = tmp_path / str(asked)
        place.mkdir()
        with ThreadPoolExecutor() as aside:
            opener = drawing(until=place / "until")
            run = aside.submit(make, place, items, opener, batch=1, actors=asked)
            wait(lambda: len(list(place.glob("waits-*"))) == actors)  # noqa: B023
            time.sleep(1.0)
            assert len(list(place.glob("waits-*"))) == actors
            (place / "until").touch()
            assert run.result(LONG).done == len(items)


def test_a_cluster_that_does_not_answer_is_one_sentence(monkeypatch, tmp_path):
    """Where Ray would warn for a minute and a half."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=rf"got 127.0.0.1:{port}, where nothing answers"):
        make(tmp_path, some(1))
    assert time.perf_counter() - begin < 20  # with the import of ray
