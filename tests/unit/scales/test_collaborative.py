"""The schedule between models: who does what, when memory is freed, and what may be claimed."""

import weakref

import pytest

from specmm.core.stats import Clock
from specmm.image_ar.scales import collaborative
from specmm.image_ar.scales.collaborative import Turn, alternate, certificate, split

SCALES = 4


class Noting:
    """A feature map of ``SCALES`` scales, and a sampler that hands the logits on."""

    schedule = range(SCALES)

    def __init__(self):
        self.log = []

    def add(self, drawn):
        self.log.append(drawn)

    def draw(self, logits, k):
        assert logits[1] == k
        return logits


@pytest.fixture
def alive(monkeypatch):
    """Weak references to the sessions opened; no other may be alive when one is opened."""
    opened = []

    class Session:
        def __init__(self, model, labels, sampling, last, blocks):
            assert all(session() is None for session in opened)
            opened.append(weakref.ref(self))
            self.model, self.last = model, last

        def advance(self, feature_map, k):
            assert k <= self.last
            return self.model, k

    monkeypatch.setattr(collaborative, "Session", Session)
    return opened


def turns(*sizes):
    start, found = 0, []
    for name, size in sizes:
        found.append(Turn(name, name, range(start, start + size)))
        start += size
    return found


def run(made, clock=None):
    """A run of ``made`` turns, and what it will have drawn."""
    noting, given = Noting(), []

    def sampler(scales):
        given.append(scales)
        assert scales in [turn.scales for turn in made]
        return noting

    return alternate(made, noting, None, None, sampler, clock or Clock()), noting.log


@pytest.mark.parametrize("at", [0, 2, 4])
def test_steps_in_order_each_by_its_model(at, alive):
    clock = Clock()
    first, second = split(SCALES, at)
    steps, log = run(turns(("a", len(first)), ("b", len(second))), clock)
    assert list(steps) == [0, 1, 2, 3]
    assert log == [("a" if k < at else "b", k) for k in range(4)]
    parts = (("draft", 0 < at < 4), ("verify", True))
    assert set(clock.seconds) == {part for part, used in parts if used}


def test_a_model_is_let_go_before_the_next_is_opened(alive):
    list(run(turns(("a", 2), ("b", 2)))[0])
    assert len(alive) == 2


def test_an_interrupted_run_does_no_more(alive):
    steps, log = run(turns(("a", 2), ("b", 2)))
    assert next(steps) == 0
    steps.close()
    assert log == [("a", 0)]


def test_certificates():
    assert certificate(turns(("a", 4), ("b", 0)), "a").kind == "exact"
    mixed = certificate(turns(("a", 1), ("b", 3)), "a")
    assert mixed.kind == "heuristic" and mixed.reason == "nothing is verified: steps 1 by a, 3 by b"
    assert certificate(turns(("a", 0), ("b", 4)), "a").kind == "heuristic"
