"""Jacobi decoding from beginning to end, exactly: every draft and every decision of all rounds with
its probability, through the real drafter and the real rules.

The target is a table (:mod:`specmm.verify.exhaustive`), a picture of two columns. Shape letters: R
ways in which it may have gone so far, W window, N = W + 1 nodes, L tokens of a picture, V
vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from specmm.core.drafter import Feedback, committed
from specmm.core.processors import Processor
from specmm.core.stats import Clock
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.verify.exact import normalised, one_hot
from specmm.verify.exhaustive import Tables
from specmm.verify.rule import Rule, VerifyResult, endings


@dataclass
class Ways:
    """The ways a picture may have gone: the chance of each [R], its tokens [R, L + N], how many
    there are [R], what the last round gave, and what the drafter remembers.
    """

    chance: Tensor
    tokens: Tensor
    count: Tensor
    feedback: Feedback
    seen: Tensor
    root: Tensor

    def taken(self, rows: Tensor) -> Ways:
        """Those of ``rows``, which may repeat."""
        return Ways(
            self.chance[rows],
            self.tokens[rows],
            self.count[rows],
            _taken(self.feedback, rows),
            self.seen[rows],
            self.root[rows],
        )


def _taken(feedback: Feedback, rows: Tensor) -> Feedback:
    probs, hidden = feedback.output.probs[rows], feedback.output.hidden[rows]
    output = replace(feedback.output, probs=probs, hidden=hidden)
    found = Feedback(output, feedback.token[rows])
    if feedback.result is None:
        return found
    tree, result = feedback.drafted
    assert tree.probs is not None and feedback.tokens is not None
    found.tree = DraftTree(tree.tokens[rows], tree.shape, tree.probs[rows])
    found.result = VerifyResult(result.path[rows], result.kept[rows], result.next_token[rows])
    found.tokens = feedback.tokens[rows]
    return found


def drawing(length: int) -> SimpleNamespace:
    """What the drafter asks of a target."""
    given = dict(length=length, columns=2, line=2, allowed=None)
    return SimpleNamespace(**given, device="cpu", processor=Processor())


def written(
    drafter: JacobiDrafter, rule: Rule, target: Tables, excess: list[float] | None = None
) -> Tensor:
    """The distribution [V**L] of pictures of L = ``len(target)`` tokens by ``rule``. The expected
    excess of a relaxed rule's rounds goes to ``excess``.
    """
    length = len(target)
    vocab = target[0].shape[-1]
    ways = _first(drafter, target)
    found = target[0].new_zeros(vocab**length)
    powers = vocab ** torch.arange(length).flip(0)
    while len(ways.chance):
        ways = _round(drafter, rule, target, ways, excess)
        done = ways.count >= length
        index = (ways.tokens[done, :length] * powers).sum(1)
        found.index_add_(0, index, ways.chance[done])
        ways = ways.taken((~done).nonzero()[:, 0])
    return found


def _first(drafter: JacobiDrafter, target: Tables) -> Ways:
    """After the prefill and the first token."""
    vocab = target[0].shape[-1]
    token = torch.arange(vocab)
    probs = target[0].expand(vocab, -1)
    feedback = Feedback(TargetOutput(probs[:, None], probs[:, None]), token)
    drafter.begin(feedback, Clock())
    tokens = token.new_zeros(vocab, len(target) + drafter.max_nodes)
    tokens[:, 0] = token
    one = torch.ones_like(token)
    return Ways(target[0][0], tokens, one, feedback, drafter.tokens, drafter.root)


def _round(
    drafter: JacobiDrafter, rule: Rule, target: Tables, ways: Ways, excess: list[float] | None
) -> Ways:
    ways, tree = _drafted(drafter, ways)
    p = _scores(target, ways, tree.tokens)
    decisions = rule.decisions(tree, p, measure=excess is not None)
    if excess is not None:
        assert decisions.excess is not None
        emits = ways.count[:, None] + tree.shape.depths < len(target)  # nodes whose token is kept
        reached = (endings(tree.shape, decisions)[..., None] * tree.shape.ancestors).sum(1)
        excess.append(float(ways.chance @ (reached * emits * decisions.excess).sum(1)))
    after = normalised(decisions.next_probs, p)
    chance = ways.chance[:, None, None] * endings(tree.shape, decisions)[..., None] * after
    row, last, token = (chance > 0).nonzero(as_tuple=True)
    depth = torch.arange(tree.shape.size)
    path = torch.where(depth <= last[:, None], depth, -1)
    result = VerifyResult(path, last + 1, token)
    tree = DraftTree(tree.tokens[row], tree.shape, tree.probs[row])
    tokens = committed(tree, result)
    found = ways.taken(row)
    found.chance = chance[row, last, token]
    found.tokens.scatter_(1, found.count[:, None] + depth, tokens)
    found.count = found.count + result.kept
    found.feedback = Feedback(TargetOutput(p[row], p[row]), token, tree, result, tokens)
    return found


def _drafted(drafter: JacobiDrafter, ways: Ways) -> tuple[Ways, DraftTree]:
    """The ways to draft after each way, and the trees."""
    drafter.tokens, drafter.root = ways.seen, ways.root
    earlier = drafter.earlier(ways.feedback) if drafter.coupled else None
    probs = drafter.newest(ways.feedback, earlier)
    drawn = probs[:, 1:]  # [R, W, V]
    if drafter.coupled:
        old, chance, rest = drafter.coupling(earlier, probs)
        stays = chance[..., None] * one_hot(old, rest)
        drawn = stays + (1 - chance[..., None]) * normalised(rest, rest)
    vocab, window = drawn.shape[-1], drafter.window
    every = torch.tensor(list(itertools.product(range(vocab), repeat=window)))  # [V**W, W]
    index = every.expand(len(drawn), -1, -1)[..., None]
    several = drawn[:, None].expand(-1, len(every), -1, -1).gather(3, index)[..., 0].prod(2)
    chance = ways.chance[:, None] * several
    row, which = (chance > 0).nonzero(as_tuple=True)
    found = ways.taken(row)
    found.chance = chance[row, which]
    drafter.tokens, drafter.root = ways.seen[row], drafter.root[row]
    tree = drafter.begun(found.feedback, probs[row], every[which])
    found.seen, found.root = drafter.tokens, drafter.root
    return found, tree


def _scores(target: Tables, ways: Ways, nodes: Tensor) -> Tensor:
    """The target's distributions after ``nodes`` [R, N], as [R, N, V]: any past the end."""
    vocab = target[0].shape[-1]
    length = len(target)
    steps = torch.arange(nodes.shape[1])
    tokens = ways.tokens.scatter(1, ways.count[:, None] - 1 + steps, nodes)
    p = target[0].new_full((*nodes.shape, vocab), 1 / vocab)
    for place in range(1, length):
        powers = vocab ** torch.arange(place).flip(0)
        probs = target[place][(tokens[:, :place] * powers).sum(1)]
        row, node = (ways.count[:, None] + steps == place).nonzero(as_tuple=True)
        p[row, node] = probs[row]
    return p
