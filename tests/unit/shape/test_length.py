import math

import pytest
import torch

from specmm.shape.blocks import acceptance_bound, adaedl_stop, entropy

PROBS = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])


def test_entropy_in_nats():
    torch.testing.assert_close(entropy(PROBS), torch.tensor([0.0, math.log(2), math.log(4)]))


def test_adaedl_by_hand():
    bound = acceptance_bound(PROBS, gamma=0.2)
    torch.testing.assert_close(
        bound,
        torch.tensor([1.0, 1 - math.sqrt(0.2 * math.log(2)), 1 - math.sqrt(0.2 * math.log(4))]),
    )
    assert adaedl_stop(PROBS, 0.55, gamma=0.2).tolist() == [False, False, True]
    # the bound is never below 0
    assert adaedl_stop(PROBS, 0.0, gamma=5.0).tolist() == [False, False, False]


def test_a_certain_draft_never_stops():
    assert not adaedl_stop(PROBS[:1], 1.0).any()


def test_errors():
    with pytest.raises(ValueError, match=r"threshold must be in \[0, 1\], got 1.5"):
        adaedl_stop(PROBS, 1.5)
    with pytest.raises(ValueError, match="gamma must be positive, got 0"):
        adaedl_stop(PROBS, 0.5, gamma=0)
