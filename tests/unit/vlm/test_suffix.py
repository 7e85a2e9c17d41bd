"""Suffix decoding: what it finds against a naive search, and what it must not draft."""

import random

import pytest

from specmm.core.processors import Processor
from specmm.hf.drafters.suffix import ROOT, EarlierAnswers, SuffixDrafter, SuffixRow, SuffixTree
from specmm.hf.models.target import VLMTarget

NONE = frozenset()


def texts(seed):
    random.seed(seed)
    size = random.choice([1, 2, 3, 5])
    return [[random.randrange(size) for _ in range(random.randint(1, 40))] for _ in range(3)]


def occurrences(part, *texts):
    starts = [(text, i) for text in texts for i in range(len(text) - len(part) + 1)]
    return sum(text[i : i + len(part)] == part for text, i in starts)


@pytest.mark.parametrize("seed", range(60))
def test_states_count_occurrences(seed):
    tree, written = SuffixTree(), texts(seed)
    for text in written:
        state = ROOT
        for token in text:
            state = tree.add(state, token)
    for text in written:
        for start in range(len(text)):
            state = ROOT
            for end in range(start, min(len(text), start + 6)):
                state = tree.follow[state][text[end]]
                assert tree.count[state] == occurrences(text[start : end + 1], *written)


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_end_that_occurs_is_matched(seed):
    earlier, said = EarlierAnswers(), texts(seed)
    for answer in said:
        earlier.add(answer)
    [tree] = earlier.trees
    for text in texts(seed + 1000):
        ends = [text[n:] for n in range(len(text))]
        longest = max([len(end) for end in ends if occurrences(end, *said)], default=0)
        state, length = tree.match(text)
        assert length == longest
        found = ROOT
        for token in text[len(text) - length :]:
            found = tree.follow[found][token]
        assert found == state


def test_what_followed_the_longest_match_is_guessed_longer_after_longer_ones():
    row = SuffixRow([1, 2, 3, 9, 2, 3, 7, 1, 2, 3])
    assert row.guess(4, 0.0).tokens[:4] == [9, 2, 3, 7]  # after 1 2 3, not after the later 2 3
    long = SuffixRow([*range(30), 99, *range(9)])
    short = SuffixRow([*range(30), 99, 8])
    assert long.guess(40, 0.5).tokens == [*range(9, 18)]
    assert short.guess(40, 0.5).tokens == [9]
    probs = long.guess(40, 0.1).probs
    assert probs[:20] == pytest.approx([9 / (9 + n) for n in range(1, 21)])
    assert long.guess(3).tokens == [9, 10, 11] and SuffixRow([1, 2]).guess(3).tokens == []


def test_probabilities_are_shares_of_what_followed_and_the_new_one_is_taken():
    row = SuffixRow([1, 5, 1, 5, 1, 6, 1])
    tokens, probs = row.guess(1, 0.0)
    assert tokens == [6] and probs == [1 / (3 + 1)]  # one of three, after one token


def test_a_guess_may_run_into_what_was_just_written():
    assert SuffixRow([5, 5, 5]).guess(4, 0.0).tokens == [5] * 4
    assert SuffixRow([7, 1, 2, 3, 1, 2, 3]).guess(5, 0.0).tokens == [1, 2, 3, 1, 2]


def test_placeholders_neither_match_nor_are_drafted():
    banned = frozenset([99])
    assert SuffixRow([1, 99, 99, 2, 99], banned).guess(3, 0.0).tokens == []
    assert SuffixRow([1, 2, 99, 99, 3, 1, 2], banned).guess(3, 0.0).tokens == []
    assert SuffixRow([1, 2, 4, 99, 3, 1, 2], banned).guess(1, 0.0).tokens == [4]
    earlier = EarlierAnswers()
    earlier.add([1, 2, 99, 3], banned)
    assert SuffixRow([1, 2], banned, earlier).guess(3, 0.0).tokens == []


def test_earlier_answers_are_drafted_until_they_are_forgotten():
    earlier = EarlierAnswers(capacity=20)
    row = SuffixRow([3, 4], NONE, earlier)
    assert row.guess(3).tokens == []
    earlier.add([1, 2, 3, 4, 5, 6, 7])
    assert row.guess(3).tokens == [5, 6, 7]
    row.extend([5])
    assert row.guess(3).tokens == [6, 7]
    earlier.add([50, 51, 52, 53])  # the younger tree is full
    assert row.guess(3).tokens == [6, 7] and len(earlier.trees) == 2
    earlier.add(range(100, 111))
    assert row.guess(3).tokens == []
    with pytest.raises(ValueError, match="capacity must be at least 2 tokens, got 1"):
        EarlierAnswers(1)


def test_mistakes(zoo):
    target = VLMTarget(zoo.model("llava"), Processor(0))
    with pytest.raises(ValueError, match="must be at least 1 and least from 0 to 1, got 0"):
        SuffixDrafter(target, 0)
    with pytest.raises(ValueError, match=r"from 0 to 1, got 4 and 1\.5"):
        SuffixDrafter(target, 4, 1.5)
