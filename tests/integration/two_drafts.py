"""What tests of drafters that grow trees share: drafts and their logits by place, and two drafts
after a prompt, enumerated and drawn, of a target of six tokens.

Shape letters: V vocabulary.
"""

import itertools

import torch

from specmm.core.decode import decode
from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.shape.trees import branching
from specmm.verify import Recursive
from specmm.verify.exhaustive import draws, emitted_probs, sequence_probs, total_variation
from tests.sampling import Stream, fits

V = 6
PROMPT = [4, 1, 5, 3]
ROOT = 2
PROCESSOR = Processor(1.5)
EVERY = branching([V, 1])  # every first draft, and one after it
ROWS = 3000
LENGTH = 3


class Watching:
    """Before a drafter's class: keeps what it drafts, by the number of tokens before."""

    def begin(self, feedback, clock):
        self.found = {}
        super().begin(feedback, clock)

    def propose(self, feedback, uniforms):
        self.logged = []
        before = int(self.target.cache.lengths[0]) + 1
        tree = super().propose(feedback, uniforms)
        self.found[before] = (tree.tokens[0, 1:], torch.cat(self.logged))
        return tree

    def logits(self, states, depth):
        logits = super().logits(states, depth)
        self.logged.append(logits[0])
        return logits


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


@torch.no_grad()
def recorded_tables(drafter):
    """What a ``drafter`` of the tree ``EVERY`` records after the root [1, V] and after each first
    draft [V, V].
    """
    output = drafter.target.prefill(VLMPrompt(padded([PROMPT]), 8), drafter.max_nodes)
    feedback = Feedback(output, torch.tensor([ROOT]))
    drafter.begin(feedback, Clock())
    tree = drafter.propose(feedback, Uniforms.from_seeds([0]))
    firsts = (tree.shape.depths[0] == 1).nonzero()[:, 0]
    second = torch.empty(V, V)
    for node in firsts.tolist():
        below = int((tree.shape.parents[0] == node).nonzero()[0])
        second[tree.tokens[0, node]] = tree.probs[0, below]
    return tree.probs[0, firsts[0]][None], second


def check_every_draw(model, drafter, shape):
    """All draws of the tree ``shape`` together are the distribution of ``model``; a twin that
    records the first draft's distributions for the second's is found out.
    """
    q = [x.double() / x.double().sum(-1, keepdim=True) for x in recorded_tables(drafter)]
    check_draws(q, target_tables(model, [*PROMPT, ROOT], 3), shape)


def check_draws(q, p, shape):
    """The same, of the distributions ``q`` of two drafts and ``p`` of three tokens."""
    wanted = sequence_probs(p, 3)
    drawn = draws(branching(list(shape)), q, "without replacement")
    assert total_variation(emitted_probs(Recursive(), drawn, p), wanted) < 1e-12
    wrong = draws(branching(list(shape)), [q[0], q[0].expand(len(q[1]), -1)], "without replacement")
    recorded = dict(zip(map(tuple, wrong.tree.tokens.tolist()), wrong.tree.probs, strict=True))
    probs = torch.stack([recorded[tuple(row)] for row in drawn.tree.tokens.tolist()])
    drawn.tree = DraftTree(drawn.tree.tokens, drawn.tree.shape, probs)
    assert total_variation(emitted_probs(Recursive(), drawn, p), wanted) > 1e-3


def colder(drafter):
    """Drafts come from a colder distribution than the one recorded."""
    grow = drafter.growth._draw

    def draw(head, logits, width, uniforms):
        tokens, _ = grow(head, logits * 3, width, uniforms)
        return tokens, grow(head, logits, width, Stream(len(logits), 1))[1]

    drafter.growth._draw = draw


def follows(model, drafter, rule):
    """Whether texts that are drawn with ``drafter`` and ``rule`` follow the distribution of
    ``model``.
    """
    prompt = VLMPrompt(padded([PROMPT] * ROWS), LENGTH)
    *_, end = decode(drafter.target, drafter, rule, prompt, LENGTH, Stream(ROWS, 1))
    probs = sequence_probs(target_tables(model, PROMPT, LENGTH), LENGTH)
    return fits(probs, end.tokens[:, :LENGTH])
