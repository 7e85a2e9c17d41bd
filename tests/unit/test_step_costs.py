"""How much of a prompt is read beside a round, by what rounds and prompts have cost."""

import pytest

from specmm.serving.costs import LONGER, PART, PIECE, STEP, ForwardSeconds, Pieces

ROW, DRAFT, ATTENDED, TOKEN, PAIR = 0.002, 0.0005, 0.004, 0.0002, 0.0003
CONSTANT = 0.01


def seconds(rows=0, drafts=0, attended=0.0, read=0, pairs=0.0):
    """What a forward costs."""
    each = rows * ROW, drafts * DRAFT, attended * ATTENDED, read * TOKEN, pairs * PAIR
    return CONSTANT + sum(each)


@pytest.fixture
def pieces():
    costs = ForwardSeconds()
    for i in range(300):
        some = (i % 7, 3 * (i % 5), i % 3 / 2, 64 * (i % 4), 16.0 * (i % 2))
        costs.observe(seconds(*some), *some)
    return Pieces(costs)


def test_what_forwards_cost_is_learnt(pieces):
    costs = pieces.costs
    assert costs.of(4) == pytest.approx(seconds(4), rel=0.02)
    assert costs.of(4, 20, 2.0, 100, 9.0) == pytest.approx(seconds(4, 20, 2.0, 100, 9.0), rel=0.02)
    assert costs.read(100, 50.0) == pytest.approx(100 * TOKEN + 50 * PAIR, rel=0.02)


def test_a_step_takes_as_long_as_some_usual_rounds(pieces):
    """A piece and a round, but for the least piece; one far into a prompt is shorter."""
    assert pieces.size() == PIECE and pieces.left(1.0) > 1e9  # before the first round
    for _ in range(9):
        pieces.played(0.05)
    assert pieces.left(0.03) == pytest.approx(STEP * 0.05 - 0.03)
    for before, spent, plain in ((0, 0.02, 0.05), (500, 0.01, 0.05), (500, 0.03, 0.1)):
        size = pieces.size(before, spent, plain)
        free = STEP * 0.05 - spent - LONGER * plain
        wanted = min(max(free, PART[0] * 0.05), PART[1] * 0.05)
        each = TOKEN + PAIR * before / 1000
        assert size == pytest.approx(min(wanted / each, Pieces.MOST), rel=0.05, abs=1)
    assert pieces.size(10**6) == Pieces.LEAST


def test_a_prompt_that_is_read_in_pieces_keeps_no_token_back(pieces):
    """Only a prompt's single piece is read alone: its first token would wait for the round."""
    pieces.played(0.5)
    assert not pieces.ride(0, 64) and pieces.ride(64, 64)
    pieces.usual = 0.001
    assert pieces.ride(0, 64)
