"""What block drafters sample is the target's distribution; recording another than drafts are drawn
from is caught.
"""

import pytest
import torch

from specmm.core.processors import Processor
from specmm.core.tree import DraftTree
from specmm.diffusion_drafters.block_drafters import with_root
from tests.sampling import fits
from tests.unit.diffusion.conftest import DRAFTERS, FAST, samples, sequence_distribution


@pytest.mark.parametrize("name", FAST)
def test_samples_follow_the_targets_distribution(name):
    processor = Processor(1.3)
    tokens = samples(DRAFTERS[name], processor, 600 if "diffuspec" in name else 3000)
    assert fits(sequence_distribution(processor, [1, 3, 2], 3), tokens)


class LikeliestWithMarginals:
    """A broken twin: the likeliest tokens, recorded as if they had been drawn."""

    def __init__(self, whole):
        self.whole, self.max_nodes, self.max_depth = whole, whole.max_nodes, whole.max_depth
        self.begin = whole.begin

    def propose(self, feedback, uniforms):
        tree = self.whole.propose(feedback, uniforms)
        return DraftTree(
            tree.probs.argmax(-1).index_copy(1, torch.tensor([0]), tree.tokens[:, :1]),
            tree.shape,
            tree.probs,
        )


def test_a_chosen_path_with_marginals_is_caught():
    tokens = samples(
        lambda t: LikeliestWithMarginals(DRAFTERS["chain of dream"](t)), Processor(1.3), 3000
    )
    assert not fits(sequence_distribution(Processor(1.3), [1, 3, 2], 3), tokens)


class ForgetsPairs(LikeliestWithMarginals):
    """A broken twin: tokens drawn after one another, recorded with what the block says of them by
    themselves.
    """

    def propose(self, feedback, uniforms):
        tree = self.whole.propose(feedback, uniforms)
        after = self.whole.source.next_logits
        probs = self.whole.probs
        assert self.whole.target.processor == probs
        found = [probs(after(self.logits[:, 0], feedback.token, None)[0])]
        for place in self.logits[:, 1:].unbind(1):
            each = torch.arange(found[-1].shape[-1]).expand(len(place), -1)
            scores, _ = after(place[:, None].expand(-1, each.shape[1], -1), each, None)
            found.append((found[-1][..., None] * probs(scores)).sum(1))
        return DraftTree(tree.tokens, tree.shape, with_root(torch.stack(found, 1)))

    def __init__(self, whole):
        super().__init__(whole)
        logits = whole.source.logits

        def kept(*given):
            self.logits = logits(*given)
            return self.logits

        whole.source.logits = kept


class ForgetsMemory(ForgetsPairs):
    """A broken twin: tokens drawn after all before them, recorded with the distributions after the
    latest alone.
    """

    def propose(self, feedback, uniforms):
        tree = self.whole.propose(feedback, uniforms)
        scores, _ = self.whole.source.next_logits(self.logits, tree.tokens[:, :-1], None)
        return DraftTree(tree.tokens, tree.shape, with_root(self.whole.probs(scores)))


class Independent(LikeliestWithMarginals):
    """A broken twin: siblings drawn without replacement, recorded as if they had been drawn with
    it.
    """

    def propose(self, feedback, uniforms):
        tree = self.whole.propose(feedback, uniforms)
        eldest = [0, 1, 1, 3, 3, 5, 6, 6, 6]  # of each of BUSH's nodes and its siblings
        return DraftTree(tree.tokens, tree.shape, tree.probs[:, eldest])


TWINS = {  # with what many samples show of them: of chains, few rows keep two drafts
    "chain of pairs": (ForgetsPairs, 8_000),  # p < 1e-9
    "chain with a memory": (ForgetsMemory, 20_000),
    "drawn tree of pairs": (Independent, 3_000),  # p < 1e-30
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_what_is_recorded_wrongly_is_caught(name):
    probs, (twin, many) = sequence_distribution(Processor(1.3), [1, 3, 2], 3), TWINS[name]
    assert fits(probs, samples(DRAFTERS[name], Processor(1.3), many))
    broken = samples(lambda target: twin(DRAFTERS[name](target)), Processor(1.3), many)
    assert not fits(probs, broken)
