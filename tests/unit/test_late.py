"""What is read a round later: checks, and whether rows lack tokens."""

import pytest
import torch

from specmm.decode import begun
from specmm.late import Late, LateChecks
from specmm.processors import check_finite

NAN = torch.tensor([0.0, float("nan")])
FINE = torch.zeros(2)


def test_values_are_those_of_when_they_were_sent():
    values = torch.tensor([3, 5])
    sent = Late(values)
    values.zero_()
    assert sent.read() == [3, 5]


def test_checks_raise_at_the_end_of_the_round_after():
    checks = LateChecks(late=True)
    for values in (FINE, NAN):
        with checks.of_a_round():
            check_finite(values, 4, "the drafter")
        checks.end_round()
    with checks.of_a_round():
        check_finite(FINE, 5, "the drafter")
    with pytest.raises(ValueError, match="NaN or infinity from the drafter in round 4"):
        checks.end_round()


def test_checks_of_the_last_rounds_raise_when_they_are_settled():
    for rounds in (1, 2):
        checks = LateChecks(late=True)
        for _ in range(rounds):
            with checks.of_a_round():
                check_finite(NAN, 1, "a target")
        with pytest.raises(ValueError, match="a target"):
            checks.settle()


def test_other_checks_raise_at_once():
    checks = LateChecks(late=False)
    with pytest.raises(ValueError, match="a target"), checks.of_a_round():
        check_finite(NAN, 1, "a target")
    late = LateChecks(late=True)
    with late.of_a_round():
        pass
    with pytest.raises(ValueError, match="a target"):
        check_finite(NAN, 1, "a target")


class Ends:
    """A stop that ends all rows after so many calls."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, tokens, before, after):
        self.calls -= 1
        return after, torch.full_like(after, self.calls < 0, dtype=torch.bool)


def rounds_of(kept, length, ahead, stop=None, most=3):
    """How many rounds are played where each keeps ``kept`` tokens of two rows, the second one less;
    and whether a row may have ended, by round.
    """
    progress = begun(torch.tensor([7, 7]), length, most, stop)
    progress.ahead = ahead
    ended = []
    while progress.unfinished(most=most):
        progress.take(torch.ones(2, most, dtype=torch.int64), torch.tensor([kept, kept - 1]))
        progress.end_round()
        ended.append(progress.may_have_ended)
        assert len(ended) < 50
    return len(ended), ended


@pytest.mark.parametrize("length", [2, 6, 12, 13, 14])
@pytest.mark.parametrize("kept", [2, 3])
def test_rounds_ahead_are_as_many(kept, length):
    now, late = (rounds_of(kept, length, ahead) for ahead in (False, True))
    assert late[0] == now[0] == -(-(length - 1) // (kept - 1))
    # said a round later, but of the first round, and nothing is said of one that had not ended
    first = -(-(length - 1) // kept)
    assert late[1] == [True] + [i > first for i in range(2, now[0] + 1)]


def test_where_a_stop_may_end_rows_one_round_is_too_many():
    for calls in (0, 1, 4):
        now, late = (rounds_of(2, 40, ahead, Ends(calls))[0] for ahead in (False, True))
        assert now == calls and late == calls + (calls > 1)  # after the first it is waited for


def test_a_sample_that_begins_makes_what_was_known_old():
    progress = begun(torch.tensor([7]), 4, 3)
    progress.ahead = True
    for _ in range(3):
        progress.take(torch.ones(1, 3, dtype=torch.int64), torch.tensor([3]))
        progress.end_round()
    assert not progress.unfinished(most=3) and progress.may_have_ended
    progress.restart(0, torch.tensor([5]))
    assert progress.unfinished(most=3)
