"""The schedule between models: who does what, when memory is let go, and what may be claimed."""

import gc
import weakref

import pytest

from specmm.image_ar.scales.collaborative import Turn, alternate, certificate, split
from specmm.stats import Clock


class Worker:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def __call__(self, k):
        self.log.append((self.name, k))


def turns(sizes, log, alive=None):
    start, found = 0, []
    for name, size in sizes:
        steps = range(start, start + size)

        def begin(given, name=name, steps=steps):
            assert given == steps
            gc.collect()
            if alive is not None:
                assert all(worker() is None for worker in alive)
            made = Worker(name, log)
            if alive is not None:
                alive.append(weakref.ref(made))
            return made

        found.append(Turn(name, "draft" if name == "a" else "verify", steps, begin))
        start += size
    return found


@pytest.mark.parametrize("at", range(5))
def test_steps_in_order_each_by_its_model(at):
    log, clock = [], Clock()
    first, second = split(4, at)
    assert list(alternate(turns([("a", len(first)), ("b", len(second))], log), clock)) == [
        0,
        1,
        2,
        3,
    ]
    assert log == [("a" if k < at else "b", k) for k in range(4)]
    assert set(clock.seconds) == {
        part for part, used in (("draft", at > 0), ("verify", at < 4)) if used
    }


def test_a_worker_is_let_go_before_the_next_is_opened():
    alive = []
    list(alternate(turns([("a", 2), ("b", 2)], [], alive), Clock()))
    assert len(alive) == 2


def test_an_interrupted_run_does_no_more():
    log = []
    steps = alternate(turns([("a", 2), ("b", 2)], log), Clock())
    assert next(steps) == 0
    steps.close()
    assert log == [("a", 0)]


@pytest.mark.parametrize("at", [-1, 5])
def test_out_of_range(at):
    with pytest.raises(ValueError, match=rf"n must be a whole number from 0 .* to 4 .*, got {at}"):
        split(4, at)


def test_certificates():
    assert certificate(turns([("a", 4), ("b", 0)], []), "a").kind == "exact"
    mixed = certificate(turns([("a", 1), ("b", 3)], []), "a")
    assert mixed.kind == "heuristic" and mixed.reason == "nothing is verified: steps 1 by a, 3 by b"
    assert certificate(turns([("a", 0), ("b", 4)], []), "a").kind == "heuristic"
