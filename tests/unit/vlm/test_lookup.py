"""Prompt lookup: what it finds, and what it must not draft."""

import torch

from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.stats import Clock
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.prompt_lookup import LookupRow, PromptLookupDrafter
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.verify import VerifyResult

NONE = frozenset()


def test_the_longest_match_wins():
    row = LookupRow([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 3, NONE)
    assert row.guess(4) == [9, 2, 3, 7]  # after 1 2 3, not after the later 2 3
    row.extend([8])
    assert row.guess(4) == []
    row.extend([3])
    assert row.guess(2) == [8, 3]  # the last occurrence that has a follower


def test_a_guess_may_run_into_what_was_just_written():
    assert LookupRow([5, 5, 5], 2, NONE).guess(4) == [5] * 4
    assert LookupRow([7, 1, 2, 3, 1, 2, 3], 2, NONE).guess(5) == [1, 2, 3, 1, 2]


def test_short_matches_may_not_count():
    row = LookupRow([1, 2, 3, 9, 2, 3], 3, NONE)
    assert row.guess(2, least=2) == [9, 2] and row.guess(2, least=3) == []


def test_what_is_mostly_wrong_is_not_drafted_until_it_is_right_again():
    row = LookupRow([1, 2], 2, NONE)
    drafted = []
    for token in [1, 3, 1, 4, 1, 5, 1, 6, 1, 7, 1, 8, 1, 8, 1, 8, 1, 8]:
        row.extend([token])
        if token == 1:
            drafted.append(row.trusted_guess(1))
        else:
            row.guess(1)  # as every round does
    assert drafted == [[2], [3], [4], [5], [6], [], [], [8], [8]]


def test_placeholders_neither_match_nor_are_drafted():
    banned = frozenset([99])
    assert LookupRow([1, 99, 99, 2, 99], 2, banned).guess(3) == []
    assert LookupRow([1, 2, 99, 99, 3, 1, 2], 2, banned).guess(3) == []
    assert LookupRow([1, 2, 4, 99, 3, 1, 2], 2, banned).guess(3) == [4]


def test_only_what_was_committed_is_looked_up(zoo):
    target = VLMTarget(zoo.model("llava"), Processor(0))
    output = target.prefill(VLMPrompt(zoo.batch("llava", [[1, 5], [7]]), 8), 4)
    drafter, first = PromptLookupDrafter(target), torch.tensor([9, 9])
    drafter.begin(Feedback(output, first), Clock())
    tree = DraftTree(torch.tensor([[9, 4, 6], [9, 4, 6]]), TreeShape.chain(2))
    result = VerifyResult(
        torch.tensor([[0, 1, -1], [0, -1, -1]]), torch.tensor([2, 0]), torch.tensor([8, 9])
    )
    probs = torch.empty(0)
    feedback = Feedback(
        TargetOutput(probs, probs),
        result.next_token,
        tree,
        result,
        torch.tensor([[4, 8, 6], [9, 0, 0]]),
    )
    drafter.propose(feedback, None)
    assert [row.tokens for row in drafter.recall.rows] == [[1, 5, 9, 4, 8], [7, 9]]
