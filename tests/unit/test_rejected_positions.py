"""rejected positions: which older distribution serves which place of the next tree, and what a
mixture is.

Shape letters: B batch, N nodes, D depth, V vocabulary.
"""

import pytest
import torch

from specmm.core.drafter import Feedback
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.image_ar.tokens.drafters.block import RejectedPositions, first_below
from specmm.methods import LanternPP, Speculative
from specmm.verify import VerifyResult

SHAPE = TreeShape.from_parents([-1, 0, 0, 1, 3, 2])  # 0 - 1 - 3 - 4, and 0 - 2 - 5


def feedback(path, kept):
    probs = torch.randn(2, SHAPE.size, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    result = VerifyResult(torch.tensor(path), torch.tensor(kept), torch.tensor([0, 0]))
    tree = DraftTree(torch.zeros(2, SHAPE.size, dtype=torch.int64), SHAPE)
    return Feedback(TargetOutput(probs, torch.empty(0)), result.next_token, tree, result)


def test_first_children_all_the_way_down():
    wanted = [[1, 3, 4], [3, 4, -1], [5, -1, -1], [4, -1, -1], [-1] * 3, [-1] * 3]
    assert first_below(SHAPE).tolist() == wanted


def test_a_place_gets_the_distribution_after_the_rejected_first_child():
    # the root only; the root and node 2
    found = feedback([[0, -1, -1, -1], [0, 2, -1, -1]], [1, 2])
    rejected_weight, older = RejectedPositions(SHAPE, 0.25), found.output.probs
    rejected_weight.read(found)
    # three parents
    own = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).softmax(-1)
    for depth, source in ((1, 1), (2, 3), (3, 4)):
        wanted = own[0] ** 0.75 * older[0, source] ** 0.25
        torch.testing.assert_close(
            rejected_weight.mix(own.log(), depth)[0], wanted / wanted.sum(-1, keepdim=True)
        )
    wanted = own[1] ** 0.75 * older[1, 5] ** 0.25
    torch.testing.assert_close(
        rejected_weight.mix(own.log(), 1)[1], wanted / wanted.sum(-1, keepdim=True)
    )
    # nothing was scored that deep: its own distribution
    torch.testing.assert_close(rejected_weight.mix(own.log(), 2)[1], own[1])


def test_nothing_is_known_after_the_prefill_and_zeros_stay_zero():
    rejected_weight = RejectedPositions(SHAPE, 0.5)
    own = torch.tensor([[[0.5, 0.5, 0, 0, 0]]]).expand(2, 1, 5)
    rejected_weight.read(
        Feedback(TargetOutput(torch.rand(2, 1, 5), torch.empty(0)), torch.tensor([0, 0]))
    )
    assert torch.equal(rejected_weight.mix(own.log(), 1), own)
    found = feedback([[0, -1, -1, -1]] * 2, [1, 1])
    found.output.probs[:, 1] = torch.tensor([0.0, 0, 0, 0.5, 0.5])  # no token in common
    rejected_weight.read(found)
    torch.testing.assert_close(rejected_weight.mix(own.log(), 1), own)


@pytest.mark.parametrize("weight", [1.0, -0.1])
def test_the_weight_is_a_share(weight):
    with pytest.raises(ValueError, match=r"rejected_weight must be in \[0, 1\)"):
        RejectedPositions(SHAPE, weight)
    for method in (
        Speculative,
        LanternPP,
    ):  # at any temperature: greedy rounds, too, which have no use for it
        with pytest.raises(ValueError, match=r"rejected_weight must be in \[0, 1\)"):
            method(rejected_weight=weight)
