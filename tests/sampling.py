"""Samples of many rows at once, whether they follow a distribution, and a twin whose do not."""

import torch
from scipy.stats import chi2

from specmm.randomness import Uniforms


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


def fits(probs, tokens):
    """Whether sequences ``tokens`` [n, T] have the probabilities ``probs`` [V**T], at 0.001."""
    length = tokens.shape[1]
    size = round(len(probs) ** (1 / length))
    return p_value(probs, (tokens * size ** torch.arange(length).flip(0)).sum(1)) > 1e-3


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
