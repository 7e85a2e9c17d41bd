"""Samples of many rows at once, whether they follow a distribution, and a twin whose do not."""

import itertools

import torch
from scipy.stats import chi2

from specmm.core.randomness import Uniforms
from specmm.verify import endings
from specmm.verify.exhaustive import node_probs


class Stream(Uniforms):
    """One generator for thousands of rows."""

    def __init__(self, rows, seed=0):
        self.rows, self.generator = rows, torch.Generator().manual_seed(seed)

    @property
    def device(self):
        return self.generator.device

    def draw(self, count):
        return torch.rand(self.rows, count, generator=self.generator)


def last(steps):
    *_, end = steps
    return end


def expected_tokens(shape, decisions):
    """The expected number of tokens committed [B], the next token included, given the drafts."""
    return (endings(shape, decisions) * (shape.depths + 1)).sum(1)


def expected_excess(rule, drawn, target):
    """The mean excess of a result: it bounds the total variation of what is emitted."""
    decisions = rule.decisions(drawn.tree, node_probs(drawn, target), measure=True)
    ends = endings(drawn.tree.shape, decisions)
    reached = (ends[:, :, None] * drawn.tree.shape.ancestors).sum(1)  # [R, N]
    return float((reached * decisions.excess).sum(1) @ drawn.chance)


def p_value(probs, cells):
    """Of a chi-square test of ``cells`` [n], numbers of what was drawn; rare ones count as one, and
    what has no probability must not be drawn.
    """
    seen, wanted = torch.bincount(cells, minlength=len(probs)).double(), probs.double() * len(cells)
    if seen[wanted == 0].sum():
        return 0.0
    often = wanted >= 5
    seen, wanted = (torch.cat([x[often], x[~often].sum()[None]]) for x in (seen, wanted))
    kept = wanted > 1e-9
    return chi2.sf(float(((seen - wanted) ** 2 / wanted)[kept].sum()), int(kept.sum()) - 1)


def p_of(probs, tokens):
    """The same of sequences ``tokens`` [n, T] of the probabilities ``probs`` [V**T]."""
    length = tokens.shape[1]
    size = round(len(probs) ** (1 / length))
    return p_value(probs, (tokens * size ** torch.arange(length).flip(0)).sum(1))


def fits(probs, tokens):
    """Whether such sequences have these probabilities, at 0.001."""
    return p_of(probs, tokens) > 1e-3


@torch.inference_mode()
def sequence_distribution(after, size, length):
    """The probability [V**T] of every sequence of ``length`` of ``size`` tokens, of which ``after``
    tells the next one's [n, V] after the tokens of ``paths`` [n, d].
    """
    probs = torch.ones(1, dtype=torch.float64)
    for depth in range(length):
        paths = torch.tensor(list(itertools.product(range(size), repeat=depth)), dtype=torch.int64)
        probs = (probs[:, None] * after(paths.view(size**depth, depth)).double()).flatten()
    return probs


def check_recorded(tree):
    """Of siblings drawn without replacement: all mass is kept, none of it on earlier ones, and the
    token was drawn among it.
    """
    probs = tree.probs[:, 1:]
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[..., 0]))
    assert bool((probs.gather(-1, tree.tokens[:, 1:, None]) > 0).all())
    earlier = tree.shape.earlier_siblings.expand(len(probs), -1, -1)
    for row, node in earlier.any(-1).nonzero().tolist():
        assert float(tree.probs[row, node, tree.tokens[row, earlier[row, node]]].sum()) == 0
