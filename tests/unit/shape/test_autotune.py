import time

import pytest

from specmm.autotune import Costs, Plan, Rival, against, lookup, measure, plan, until_stable
from specmm.shape.trees import branching
from specmm.tree import TreeShape

CHEAP = Costs(
    draft={1: 0.0005, 5: 0.0025},
    verify={1: 0.004, 5: 0.0045, 26: 0.006, 60: 0.0086},
    step=0.004,
    host=0.0003,
)
CANDIDATES = [TreeShape.chain(4), branching([4, 2, 1, 1, 1]), branching([2, 1])]


def test_takes_the_candidate_with_the_largest_speedup():
    chosen = plan(CHEAP, [0.6, 0.2, 0.05, 0.02], CANDIDATES)
    speedups = {
        c.size: plan(CHEAP, [0.6, 0.2, 0.05, 0.02], [c], margin=0).expected_speedup
        for c in CANDIDATES
    }
    assert chosen.shape is not None
    assert chosen.expected_speedup == max(speedups.values())
    assert chosen.expected_tau > chosen.expected_speedup
    assert f"{chosen.shape.size} nodes" in chosen.reason


def test_speedup_by_hand():
    chosen = plan(
        Costs({1: 0.1, 2: 0.2}, {3: 1.0}, step=1.0, host=0.05), [0.8], [TreeShape.chain(2)]
    )
    assert chosen.expected_tau == pytest.approx(2.44)
    assert chosen.expected_speedup == pytest.approx(2.44 / 1.25)


def test_falls_back_when_speculation_would_lose():
    chosen = plan(CHEAP, [0.05], CANDIDATES)
    assert chosen.shape is None
    assert chosen.expected_tau == chosen.expected_speedup == 1.0
    assert "plain decoding" in chosen.reason


def test_falls_back_within_the_margin():
    costs = Costs(draft={1: 0.0}, verify={2: 1.0}, step=1.0)
    chain = [TreeShape.chain(1)]
    assert plan(costs, [0.04], chain).shape is None
    assert plan(costs, [0.06], chain).shape is chain[0]
    assert plan(costs, [0.04], chain, margin=0.0).shape is chain[0]
    assert plan(costs, [0.0], chain, margin=0.0).shape is None  # a tie is not a gain


def test_falls_back_without_candidates():
    assert plan(CHEAP, [0.9], []).shape is None


def test_expensive_host_turns_speculation_off():
    slow = Costs(CHEAP.draft, CHEAP.verify, CHEAP.step, host=0.05)
    assert plan(slow, [0.6, 0.2], CANDIDATES).shape is None


def test_lookup_between_and_beyond_the_measured_sizes():
    table = {10: 1.0, 20: 2.0, 40: 3.0}
    wanted = [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert [lookup(table, n) for n in (1, 10, 15, 20, 30, 40, 60)] == wanted
    assert lookup({8: 0.5}, 99) == 0.5
    assert lookup({10: 2.0, 20: 1.0}, 100) == 1.0  # noise must not promise that larger is free
    assert lookup(lambda n: 2.0 * n, 3) == 6.0


def test_measure_is_a_median_after_warmup():
    calls = []

    def work():
        calls.append(None)
        # the first call and one outlier are slow
        time.sleep(0.05 if len(calls) in (1, 4) else 0.001)

    assert 0.001 <= measure(work, repeats=5, warmup=1) < 0.03
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs({1: 1.0}, {1: 1.0}, step=0.0), "step must be positive"),
        (lambda: Costs({1: 1.0}, {1: 1.0}, step=1.0, host=-1.0), "host must be at least 0"),
        (lambda: lookup({}, 3), "cost table must hold"),
        (lambda: plan(CHEAP, [0.5], CANDIDATES, margin=-0.1), "margin must be"),
        (lambda: measure(lambda: None, repeats=0), "repeats must be"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_of_equals_within_the_noise_the_smaller_tree_is_taken():
    acceptance, small, large = [0.5, 0.1], branching([2]), branching([3])
    costs = Costs(draft={1: 0.0}, verify={3: 1.0, 4: 0.99}, step=1.0)  # the larger is 1% faster
    assert plan(costs, acceptance, [large, small]).shape is small
    costs = Costs(draft={1: 0.0}, verify={3: 1.0, 4: 0.8}, step=1.0)
    assert plan(costs, acceptance, [large, small]).shape is large
    assert plan(costs, acceptance, [large, small]).costs is costs


CHAIN, TREE = TreeShape.chain(2), branching([3, 2])


def settled(passes, acceptance=(0.6, 0.15, 0.05)):
    """What is planned when the passes find these seconds of (plain step, round of CHAIN, round of
    TREE).
    """
    left = iter(passes)

    def one_pass(measured):
        step, *rounds = next(left)
        shapes = zip((CHAIN, TREE), rounds, strict=True)
        measured.add(step, [(shape, (0.2 * s, 0.7 * s, 0.1 * s)) for shape, s in shapes])

    made = until_stable(one_pass, lambda costs: plan(costs, acceptance, [CHAIN, TREE]))
    return made, len(passes) - len(list(left))


def test_a_steady_machine_needs_three_passes():
    made, passes = settled([(1.0, 1.1, 1.5)] * 9)
    assert made.shape is CHAIN and passes == 3
    assert made.costs.step == 1.0


def test_a_machine_that_slows_down_changes_no_forecast():
    steady, _ = settled([(1.0, 1.1, 1.5)] * 9)
    slower, _ = settled([(k, 1.1 * k, 1.5 * k) for k in (1.0, 2.0, 5.0)])
    assert slower.shape is CHAIN
    assert slower.expected_speedup == pytest.approx(steady.expected_speedup)


def test_one_pass_that_something_else_disturbed_decides_nothing():
    steady, _ = settled([(1.0, 1.1, 1.5)] * 9)
    made, passes = settled([(9.0, 1.1, 1.5), *[(1.0, 1.1, 1.5)] * 8])
    assert made.expected_speedup == pytest.approx(steady.expected_speedup, rel=0.1) and passes >= 3


class Named:
    """A method, as far as plans read one."""

    name = "free"


FREE = Named()


def settled_with(rounds, tau, passes=9):
    """What is planned when a round of CHAIN takes 1.1 plain steps, and FREE's as many as these."""
    left = iter(rounds * passes)

    def one_pass(measured):
        measured.add(1.0, [(CHAIN, (0.2, 0.8, 0.1))], {FREE: next(left)})

    def choose(costs):
        return against(plan(costs, (0.6, 0.15, 0.05), [CHAIN]), [Rival(FREE, None, tau)])

    return until_stable(one_pass, choose)


def test_a_method_without_a_tree_is_taken_where_it_should_be_faster_by_more_than_noise():
    alone = plan(Costs({2: 0.2}, {3: 0.8}, 1.0, 0.1), (0.6, 0.15, 0.05), [CHAIN]).expected_speedup
    made = settled_with([1.5], 3.0)
    assert made.draft_free is FREE and made.shape is None and made.expected_tau == 3.0
    assert made.expected_speedup == pytest.approx(2.0) and made.reason.startswith("free: tau 3.00")
    assert [one.choice for one in made.candidates] == [CHAIN, FREE]
    equal = settled_with([1.5], 1.5 * alone * 1.02)
    assert equal.shape is CHAIN and equal.draft_free is None
    assert [one.speedup for one in equal.candidates] == pytest.approx([alone, alone * 1.02])


def test_a_choice_between_methods_that_never_settles_is_the_last_unless_plain():
    """CHAIN and FREE in turn: either is faster than plain decoding."""
    turns = iter([(CHAIN, None), (None, FREE)] * 9)

    def choose(costs):
        shape, free = next(turns)
        return Plan(shape, 2.0, 2.0, "so it seems", costs, free)

    made = until_stable(lambda measured: measured.add(1.0, []), choose)
    assert made.shape is CHAIN and made.expected_speedup == 2.0


def test_a_choice_that_never_settles_is_plain_decoding():
    passes = iter([CHAIN, None] * 9)
    made = until_stable(
        lambda measured: measured.add(1.0, []),
        lambda costs: Plan(next(passes), 2.0, 2.0, "so it seems", costs),
    )
    assert made.shape is None and made.expected_speedup == 1.0 and "pass to pass" in made.reason
