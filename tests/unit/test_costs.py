import pytest

from specmm import methods
from specmm.choose.contest import PLAIN, Candidate, Record, Sample
from specmm.choose.costs import Costs, lookup, measured, plan
from specmm.core.stats import Stats
from specmm.core.tree import TreeShape
from specmm.shape.trees import branching

CHEAP = Costs(
    draft={1: 0.0005, 5: 0.0025},
    verify={1: 0.004, 5: 0.0045, 26: 0.006, 60: 0.0086},
    step=0.004,
    host=0.0003,
)
CANDIDATES = [TreeShape.chain(4), branching([4, 2, 1, 1, 1]), branching([2, 1])]


def best(costs, acceptance, shapes=CANDIDATES, **options):
    """The shape that is planned."""
    found = plan(costs, acceptance, shapes, **options).best
    return None if found is None else found.shape


def test_takes_the_candidate_with_the_largest_speedup():
    acceptance = [0.6, 0.2, 0.05, 0.02]
    chosen = plan(CHEAP, acceptance, CANDIDATES)
    assert chosen.best.speedup == max(one.speedup for one in chosen.candidates) > 1.05
    assert chosen.best.tau > chosen.best.speedup and len(chosen.candidates) == 3


def test_speedup_by_hand():
    costs = Costs({1: 0.1, 2: 0.2}, {3: 1.0}, step=1.0, host=0.05)
    chosen = plan(costs, [0.8], [TreeShape.chain(2)]).best
    assert chosen.tau == pytest.approx(2.44)
    assert chosen.speedup == pytest.approx(2.44 / 1.25)


def test_falls_back_where_speculation_would_lose_or_gain_too_little():
    assert best(CHEAP, [0.05]) is None and best(CHEAP, [0.9], []) is None
    costs = Costs(draft={1: 0.0}, verify={2: 1.0}, step=1.0)
    chain = [TreeShape.chain(1)]
    assert best(costs, [0.04], chain) is None
    assert best(costs, [0.06], chain) is chain[0]
    assert best(costs, [0.04], chain, margin=0.0) is chain[0]
    assert best(costs, [0.0], chain, margin=0.0) is None  # a tie is not a gain
    slow = Costs(CHEAP.draft, CHEAP.verify, CHEAP.step, host=0.05)
    assert best(slow, [0.6, 0.2]) is None


def test_lookup_between_and_beyond_the_measured_sizes():
    table = {10: 1.0, 20: 2.0, 40: 3.0}
    wanted = [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert [lookup(table, n) for n in (1, 10, 15, 20, 30, 40, 60)] == wanted
    assert lookup({8: 0.5}, 99) == 0.5
    assert lookup({10: 2.0, 20: 1.0}, 100) == 1.0  # noise must not promise that larger is free
    assert lookup(lambda n: 2.0 * n, 3) == 6.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs({1: 1.0}, {1: 1.0}, step=0.0), "step must be positive"),
        (lambda: Costs({1: 1.0}, {1: 1.0}, step=1.0, host=-1.0), "host must be at least 0"),
        (lambda: lookup({}, 3), "cost table must hold"),
        (lambda: plan(CHEAP, [0.5], CANDIDATES, margin=-0.1), "margin must be"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_of_equals_within_the_noise_the_smaller_tree_is_taken():
    acceptance, small, large = [0.5, 0.1], branching([2]), branching([3])
    costs = Costs(draft={1: 0.0}, verify={3: 1.0, 4: 0.99}, step=1.0)  # the larger is 1% faster
    assert best(costs, acceptance, [large, small]) is small
    costs = Costs(draft={1: 0.0}, verify={3: 1.0, 4: 0.8}, step=1.0)
    assert best(costs, acceptance, [large, small]) is large


def test_costs_are_those_of_whole_runs():
    tree, free = methods.MSD(), methods.PromptLookup()
    stats = Stats(100, 40, 40, 8.0, draft_seconds=2.0, verify_seconds=4.0)
    record = Record([Candidate(tree, 2.5, nodes=8, levels=3), Candidate(free)])
    record.samples[tree] = [Sample(1.0, [0.2] * 39, 98.0, stats=stats)]
    assert measured(record) is None, "nothing was decoded plainly"
    record.samples[PLAIN.method] = [Sample(1.0, [0.2] * 100, 100.0)]
    assert measured(record) == Costs({3: 0.05}, {8: 0.1}, 0.2, 0.05)
    del record.samples[tree][0]
    assert measured(record) is None
