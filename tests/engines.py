"""Requests to an engine, and rounds that no measurement would choose."""

import threading

import numpy as np
from PIL import Image

from specmm.serving.costs import Pieces
from specmm.serving.drafting import Drafts
from specmm.serving.requests import Asked, Ended, Piece


class Answers:
    """Requests to an ``engine`` and what it tells of each."""

    def __init__(self, engine):
        self.engine = engine
        self.told = []
        self.ends = []
        self.tickets = []

    def ask(self, **asked):
        told, end = [], threading.Event()

        def tell(one):
            told.append(one)
            if isinstance(one, Ended):
                end.set()

        self.told.append(told)
        self.ends.append(end)
        self.tickets.append(self.engine.submit(Asked(**asked), tell))

    def wait(self):
        for end in self.ends:
            assert end.wait(60)
        return self

    def text(self, i):
        return "".join(one.text for one in self.told[i] if isinstance(one, Piece))

    def tokens(self, i):
        return [token for one in self.told[i] if isinstance(one, Piece) for token in one.tokens]

    def end(self, i):
        assert [isinstance(one, Ended) for one in self.told[i]].count(True) == 1
        return self.told[i][-1]


def chats_about(sizes):
    """A chat for each of ``sizes``, of the picture that it shows, if any."""
    chats = []
    for number, size in enumerate(sizes):
        shown = [{"type": "text", "text": "what is it" * (number + 1)}]
        if size:
            image = Image.new("RGB", size, (90 * number, 40, 200))
            shown.insert(0, {"type": "image", "image": image})
        chats.append([{"role": "user", "content": shown}])
    return chats


def at_random(monkeypatch):
    """Let chance say how deep the rounds of each row are, and whether the network drafts; all that
    can be is read beside them.
    """
    numbers = np.random.default_rng(0)
    real = Drafts._best

    def best(self, likely, extra):
        real(self, likely, extra)
        rows, deepest = likely.shape
        if self.target.packs and numbers.integers(2):
            return 1.0, numbers.integers(deepest + 1, size=rows)
        return 1.0, np.full(rows, numbers.integers(deepest + 1))

    def choose(self, alone):
        self.drafting = self.network is not None and bool(numbers.integers(2))

    monkeypatch.setattr(Pieces, "ride", lambda *_: True)
    monkeypatch.setattr(Drafts, "_best", best)
    monkeypatch.setattr(Drafts, "_choose", choose)
