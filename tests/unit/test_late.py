"""What is read a round later: checks, and whether rows lack tokens."""

import pytest
import torch

from specmm.core.decode import begun
from specmm.core.late import Late

NAN = torch.tensor([0.0, 0.0, float("nan")])
FINE = torch.zeros(3)


def test_values_are_those_of_when_they_were_sent():
    values = torch.tensor([3, 5])
    sent = Late(values)
    values.zero_()
    assert sent.read() == [3, 5]


def checked(ahead, *rounds):
    """A run of rounds whose checks were these."""
    progress = begun(torch.tensor([7]), 9, 3)
    progress.name, progress.ahead = "a target", ahead
    for checks in rounds:
        progress.end_round(checks)
    return progress


def test_checks_raise_at_the_end_of_the_round_after():
    progress = checked(True, FINE, NAN)
    with pytest.raises(ValueError, match="NaN or infinity from the drafter in round 2"):
        progress.end_round(FINE)


def test_checks_of_the_last_round_raise_at_the_end():
    for rounds in ([NAN.flip(0)], [FINE, NAN.flip(0)]):
        progress = checked(True, *rounds)
        with pytest.raises(ValueError, match=f"a target in round {len(rounds)}"):
            progress.end()


def test_checks_outlive_a_sample_that_begins():
    progress = checked(True, FINE, NAN)
    progress.restart(0, torch.tensor([5]))
    with pytest.raises(ValueError, match="the drafter in round 2"):
        progress.end_round(FINE)


def test_other_checks_raise_at_once():
    with pytest.raises(ValueError, match="the drafter in round 2"):
        checked(False, FINE, NAN)


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
        progress.end_round(FINE)
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
        progress.end_round(FINE)
    assert not progress.unfinished(most=3) and progress.may_have_ended
    progress.restart(0, torch.tensor([5]))
    assert progress.unfinished(most=3)
