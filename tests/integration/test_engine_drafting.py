"""How much is drafted for each row: what has the largest goodput, by enumeration."""

from itertools import product

import numpy as np
import pytest

from specmm.serving import costs, drafting
from specmm.serving.engine import BatchEngine
from specmm.serving.opening import open_engine
from specmm.serving.preparation import Limits
from tests.engines import Answers


@pytest.fixture
def drafts(coder_pipe):
    engine = BatchEngine(coder_pipe, Limits(rows=2))
    yield engine.drafts
    engine.close()


def test_nothing_is_drafted_where_that_would_not_pay(drafts):
    likely = np.full((1, drafting.LONGEST), 0.9)
    for rows, more, seconds in [(1, 0, 1.0), (1, 8, 1.1), (4, 0, 1.0), (4, 32, 1.4)] * 9:
        drafts.costs.observe(seconds, rows, more)
    rate, depths = drafts._best(likely, 0.0)  # many drafts, for tokens cost next to nothing
    assert depths.tolist() == [drafting.LONGEST] and rate > 10
    for rows, more, seconds in [(1, 0, 1.0), (1, 8, 9.0), (4, 0, 4.0), (4, 32, 36.0)] * 200:
        drafts.costs.observe(seconds, rows, more)
    assert drafts._best(likely, 0.0)[1].tolist() == [0]


@pytest.mark.parametrize("apart", [True, False], ids=["own-depths", "one-depth"])
@pytest.mark.parametrize("seed", range(12))
def test_no_other_drafts_have_more_goodput(drafts, seed, apart, monkeypatch):
    monkeypatch.setattr(type(drafts.target), "packs", apart)
    numbers = np.random.default_rng(seed)
    rows, deepest = 4, 3
    likely = numbers.beta(1, 0.5, size=(rows, deepest)).cumprod(1)
    likely[0, 1:] = 0  # nothing is guessed there
    drafts.costs.known = np.array([1.0, 0.1, *numbers.uniform(0, 0.4, 2), 0.0, 0.0])
    drafts.attended = numbers.uniform()
    extra = numbers.uniform()

    def seconds(depths):
        return drafts.costs.of(rows, sum(depths), drafts.attended) + extra

    def goodput(depths):
        gained = rows + sum(likely[r, :n].sum() for r, n in enumerate(depths))
        return gained / seconds(depths)

    choices = list(product(range(deepest + 1), repeat=rows))
    if not apart:
        choices = [depths for depths in choices if len({*depths}) == 1]
    rate, depths = drafts._best(likely, extra)
    assert rate == pytest.approx(goodput(depths.tolist()))
    assert rate == pytest.approx(max(map(goodput, choices)))
    drafts.most_seconds = seconds([1] * rows)
    most = max(drafts.most_seconds, costs.LONGER * seconds([0] * rows))
    short = [depths for depths in choices if seconds(depths) < most + 1e-9]
    assert drafts._best(likely, extra)[0] == pytest.approx(max(map(goodput, short)))


def test_what_a_networks_chances_hold_is_learnt():
    """Drafts that the network is sure of are kept more often, and this is known."""
    engine = open_engine("pocket/coder", Limits(rows=4), method="block")
    engine.drafts._choose = lambda alone: setattr(engine.drafts, "drafting", True)
    engine.drafts.costs.known[0] = 1.0  # and nothing for drafts
    model, empty = engine.drafts.network.source.model, []

    def observe(*_):  # after each round: once all rows have left there is no front
        empty.append(model.cache.size.capacity - model.cache.front)

    engine.drafts.costs.observe = observe
    said = Answers(engine)
    for i in range(12):
        said.ask(prompt=f"def f{i}(a, b):\n    return", options=dict(max_new_tokens=60))
    said.wait()
    assert model.cache.near and max(empty) > 900  # slots that it does not attend
    low, high = engine.drafts.kept_by[[0, -1]]
    assert low < drafting.HOPED < high
    engine.close()
