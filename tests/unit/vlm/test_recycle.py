"""Token recycling: what is kept of a round, against a naive loop, and what must not be drafted."""

import pytest
import torch

from specmm import methods
from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.stats import Clock
from specmm.core.target import TargetOutput
from specmm.hf.drafters.drafting import assemble
from specmm.hf.drafters.recycle import UNKNOWN, RecycleDrafter
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.shape.trees import branching
from specmm.verify import VerifyResult

ROWS = [[1, 5, 6, 5, 7], ["1", 7]]


@pytest.fixture
def begun(zoo):
    target = VLMTarget(zoo.model("llava"), Processor(0))
    drafter = RecycleDrafter(target, branching([2, 2]))
    output = target.prefill(VLMPrompt(zoo.batch("llava", ROWS), 8), drafter.max_nodes)
    feedback = Feedback(output, torch.tensor([5, 9]))
    drafter.begin(feedback, Clock())
    return target, drafter, feedback


def test_the_first_drafts_are_what_followed_in_the_prompt(begun):
    target, drafter, feedback = begun
    assert feedback.output.likeliest.shape == (2, 1, 2)
    tree = drafter.propose(feedback, None)
    assert tree.probs is None and tree.tokens[0].tolist() == [5, 7, 5, 5, 5, 7, 5]
    assert tree.tokens[1].tolist() == [9] * 7
    pictures = torch.isin(drafter.after, torch.tensor(target.image_tokens, dtype=torch.int32))
    assert not pictures.any()


def learnt(after, tree, likeliest, path, banned):
    """One row's tokens after a round: rejected nodes in their order, then those kept in theirs."""
    found = {token: after[token].tolist() for token in range(len(after))}
    nodes = [n for n in range(len(tree)) if n not in path] + path
    for node in nodes:
        best = [UNKNOWN if token in banned else token for token in likeliest[node].tolist()]
        found[int(tree[node])] = best
    return torch.tensor([found[token] for token in range(len(after))])


def test_a_round_is_learnt_as_by_a_naive_loop(begun):
    target, drafter, feedback = begun
    torch.manual_seed(3)
    path = torch.tensor([[0, 2, 5], [0, 1, -1]])
    for _ in range(5):
        tree = drafter.propose(feedback, None)
        tree.tokens[:, 1:] = torch.randint(0, 8, (2, 6))
        before = drafter.after.clone()
        likeliest = torch.randint(0, 40, (2, 7, 2))
        result = VerifyResult(path, torch.tensor([3, 2]), torch.tensor([4, 6]))
        probs = torch.empty(0)
        feedback = Feedback(
            TargetOutput(probs, probs, None, likeliest), result.next_token, tree, result
        )
        feedback.fresh = torch.tensor([False, True])
        drafter.propose(feedback, None)
        kept = [n for n in path[0].tolist() if n >= 0]
        row = learnt(before[0], tree.tokens[0], likeliest[0], kept, target.image_tokens)
        assert torch.equal(drafter.after[0].long(), row.long())
        assert torch.equal(drafter.after[1], before[1])  # of a row that has just begun: nothing


def test_trees_fit_the_target(zoo):
    usual = assemble(methods.Recycle(), VLMTarget(zoo.model("llava"), Processor(0))).drafter.shape
    assert usual.size == 12 and usual.width > 1
    target = VLMTarget(zoo.model("qwen3.5"), Processor(0))
    assert assemble(methods.Recycle(), target).drafter.shape.is_chain
    with pytest.raises(ValueError, match="must be chains"):
        assemble(methods.Recycle(tree=(2, 1)), target)
