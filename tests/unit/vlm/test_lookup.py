"""Prompt lookup: what it finds, and what it must not draft."""

from specmm.vlm.drafters.lookup import Row

NONE = frozenset()


def test_the_longest_match_wins():
    row = Row([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 3, NONE)
    assert row.guess(4) == [9, 2, 3, 7]  # behind 1 2 3, not behind the later 2 3
    row.extend([8])
    assert row.guess(4) == []
    row.extend([3])
    assert row.guess(2) == [8, 3]  # the last occurrence that has a follower


def test_a_guess_may_run_into_what_was_just_written():
    assert Row([5, 5, 5], 2, NONE).guess(4) == [5] * 4
    assert Row([7, 1, 2, 3, 1, 2, 3], 2, NONE).guess(5) == [1, 2, 3, 1, 2]


def test_short_matches_may_not_count():
    row = Row([1, 2, 3, 9, 2, 3], 3, NONE)
    assert row.guess(2, least=2) == [9, 2] and row.guess(2, least=3) == []


def test_placeholders_neither_match_nor_are_drafted():
    banned = frozenset([99])
    assert Row([1, 99, 99, 2, 99], 2, banned).guess(3) == []
    assert Row([1, 2, 99, 99, 3, 1, 2], 2, banned).guess(3) == []
    assert Row([1, 2, 4, 99, 3, 1, 2], 2, banned).guess(3) == [4]
