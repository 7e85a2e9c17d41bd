"""What method ``mtp`` draws at temperature 1: the recorded distributions are the layers' own, and
texts follow the target's distribution; broken twins are found out.

Shape letters: V vocabulary.
"""

import itertools

import pytest
import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache

from specmm import methods
from specmm.decode import decode
from specmm.drafter import Feedback
from specmm.hf.drafters.mtp import MtpDrafter
from specmm.hf.drafters.mtp_layers import layers_of
from specmm.hf.drafting import assemble
from specmm.hf.pretrained import load_model
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.shape.trees import branching
from specmm.stats import Clock
from specmm.tree import DraftTree
from specmm.verify import Recursive
from specmm.verify.exhaustive import draws, emitted_probs, sequence_probs, total_variation
from tests.integration.mtp_models import save

V = 6
PROMPT = [4, 1, 5, 3]
ROOT = 2
T = 1.5
PROCESSOR = Processor(T)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers in turn; experts come in float32 at most."""
    folder = save("deepseek", tmp_path_factory.mktemp("mtp"), 2, vocab_size=V)
    return load_model(AutoModelForCausalLM, folder)


@torch.inference_mode()
def target_tables(model, prompt, depths):
    """The distribution of the next token after every prefix, by the model's own forward."""
    tables = []
    for depth in range(depths):
        paths = torch.tensor(list(itertools.product(range(V), repeat=depth)), dtype=torch.int64)
        paths = paths.view(V**depth, depth)
        ids = torch.cat([torch.tensor(prompt).expand(len(paths), -1), paths], 1)
        tables.append(PROCESSOR(model(ids).logits[:, -1].double()))
    return tables


@torch.inference_mode()
def drafter_tables(model):
    """What the layers say after the root [1, V] and after each draft [V, V], by transformers."""
    mtp = layers_of(model).model
    first, second = [], []
    for draft in range(V):
        ids = torch.tensor([[*PROMPT, ROOT, draft]])
        states = model.model(ids[:, :-2]).last_hidden_state
        places = torch.arange(len(PROMPT))[None]
        cache = MtpCache(config=mtp.config)
        found = []
        for k in range(2):
            given = ids[:, k + 1 : len(PROMPT) + k + 1]
            states = mtp.forward_layer(k, states, places + k + 1, cache, input_ids=given)
            found.append(PROCESSOR(model.lm_head(states[0, -1]).double()))
        first.append(found[0])
        second.append(found[1])
    return torch.stack(first[:1]), torch.stack(second)


def recorded_tables(model):
    """The same as the drafter records it: one tree with every first draft."""
    target = VLMTarget(model, PROCESSOR)
    drafter = MtpDrafter(layers_of(model), target, branching([V, 1]))
    output = target.prefill(VLMPrompt(padded([PROMPT]), 8), drafter.max_nodes)
    drafter.begin(Feedback(output, torch.tensor([ROOT])), Clock())
    tree = drafter.propose(Feedback(output, torch.tensor([ROOT])), Uniforms.from_seeds([0]))
    firsts = (tree.shape.depths[0] == 1).nonzero()[:, 0]
    second = torch.empty(V, V)
    for node in firsts.tolist():
        below = int((tree.shape.parents[0] == node).nonzero()[0])
        second[tree.tokens[0, node]] = tree.probs[0, below]
    return tree.probs[0, firsts[0]][None], second


def test_recorded_distributions_are_the_layers_own(model):
    for found, wanted in zip(recorded_tables(model), drafter_tables(model), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2)])
def test_every_draw_together_is_the_targets_distribution(model, shape):
    """Enumerated; a twin that records the first layer's for the second's drafts is found out."""
    q = [x.double() / x.double().sum(-1, keepdim=True) for x in recorded_tables(model)]
    p = target_tables(model, [*PROMPT, ROOT], 3)
    wanted = sequence_probs(p, 3)
    drawn = draws(branching(list(shape)), q, "without replacement")
    assert total_variation(emitted_probs(Recursive(), drawn, p), wanted) < 1e-12
    wrong = draws(branching(list(shape)), [q[0], q[0].expand(V, -1)], "without replacement")
    tokens = dict(zip(map(tuple, wrong.tree.tokens.tolist()), wrong.tree.probs, strict=True))
    probs = torch.stack([tokens[tuple(row)] for row in drawn.tree.tokens.tolist()])
    drawn.tree = DraftTree(drawn.tree.tokens, drawn.tree.shape, probs)
    assert total_variation(emitted_probs(Recursive(), drawn, p), wanted) > 1e-3


ROWS = 3000
LENGTH = 3


class Stream(Uniforms):
    """One generator for thousands of rows."""

    def __init__(self, rows):
        self.rows, self.generator = rows, torch.Generator().manual_seed(1)

    @property
    def device(self):
        return self.generator.device

    def draw(self, count):
        return torch.rand(self.rows, count, generator=self.generator)


def colder(drafter):
    """Drafts come from a colder distribution than the one recorded."""
    grow = drafter.growth._draw

    def draw(head, logits, width, uniforms):
        tokens, _ = grow(head, logits * T * 2, width, uniforms)
        return tokens, grow(head, logits, width, Stream(len(logits)))[1]

    drafter.growth._draw = draw


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("tree", ["chain(3)", (2, 1)])
def test_samples_follow_the_targets_distribution(model, tree, broken):
    target = VLMTarget(model, PROCESSOR)
    late, rule = assemble(methods.MTP(tree=tree), target)
    drafter = late.inner  # begun at once: texts are short
    if broken:
        colder(drafter)
    prompt = VLMPrompt(padded([PROMPT] * ROWS), LENGTH)
    *_, end = decode(target, drafter, rule, prompt, LENGTH, Stream(ROWS))
    tokens = end.tokens[:, :LENGTH]
    probs = sequence_probs(target_tables(model, PROMPT, LENGTH), LENGTH)
    assert fits(probs, tokens) == (not broken)


def fits(probs, tokens):
    """Whether ``tokens`` pass a chi-square test at one in a thousand; rare cells are joined."""
    index = sum(tokens[:, t] * V ** (LENGTH - 1 - t) for t in range(LENGTH))
    seen = torch.bincount(index, minlength=V**LENGTH).double()
    wanted, order = (probs * len(tokens)).sort(descending=True)
    common = int((wanted >= 5).sum())
    cells = [torch.cat([x[:common], x[common:].sum()[None]]) for x in (wanted, seen[order])]
    statistic = ((cells[1] - cells[0]) ** 2 / cells[0])[cells[0] > 1e-9].sum()
    return bool(statistic < chi2.ppf(0.999, int((cells[0] > 1e-9).sum()) - 1))
