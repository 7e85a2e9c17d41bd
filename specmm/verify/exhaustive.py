"""What a rule emits, exactly: every draw of a small draft tree, with its probability, through the real rule.

This is how a rule is shown to be exact (tests/unit/verify), and how a new one should be. Target and drafter are
*tables*: entry d, [V**d, V], holds the law of the next token after each prefix of d tokens (prefixes read as numbers
in base V), so that laws depend on the whole path. Meant for V <= 5, a handful of nodes, float64.

Shape letters: R rows, one per draw; N nodes, D deepest level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from specmm.tree import DraftTree, TreeShape
from specmm.verify.families import one_hot
from specmm.verify.outcomes import endings
from specmm.verify.rule import Rule

Tables: TypeAlias = Sequence[Tensor]
Scheme: TypeAlias = Literal["independent", "without replacement", "top", "top and sample"]


@dataclass
class Draws:
    """Every draw of a tree: the tree with one row a draw, the probability of each [R], and its prefixes [R, N]."""

    tree: DraftTree
    chance: Tensor
    prefix: Tensor


def draws(shape: TreeShape, drafter: Tables, scheme: Scheme) -> Draws:
    """All outcomes of drafting ``shape`` (shared) from ``drafter``.

    Siblings are drawn ``"independent"``-ly, ``"without replacement"`` (uniformly over the untried tokens once the
    law is exhausted), chosen as the ``"top"`` tokens in order (point masses, no laws), or ``"top and sample"``: the
    first a sample of the law without its top k - 1, the others those k - 1.
    """
    vocab, parents = drafter[0].shape[-1], shape.parents[0].tolist()
    depths = shape.depths[0].tolist()
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    prefix, chance = torch.zeros_like(tokens), drafter[0].new_ones(1)
    laws = drafter[0].new_zeros(1, 1, vocab)
    for node, parent in enumerate(parents[1:], start=1):
        elders = [n for n in range(1, node) if parents[n] == parent]
        law = drafter[depths[parent]][prefix[:, parent]]  # [R, V]
        law = _node_law(law, tokens[:, elders], parents.count(parent), scheme)
        row, token = law.nonzero(as_tuple=True)
        chance = chance[row] * law[row, token]
        tokens = torch.cat([tokens[row], token[:, None]], dim=1)
        prefix = torch.cat([prefix[row], (prefix[row, parent] * vocab + token)[:, None]], dim=1)
        laws = torch.cat([laws[row], law[row][:, None]], dim=1)
    return Draws(DraftTree(tokens, shape, None if scheme == "top" else laws), chance, prefix)


def _node_law(law: Tensor, elders: Tensor, siblings: int, scheme: Scheme) -> Tensor:
    """The law [R, V] of the next sibling, ``elders`` [R, rank] being drawn and ``law`` [R, V] the drafter's."""
    rank = elders.shape[1]
    if scheme == "independent":
        return law
    if scheme == "without replacement":
        untried = torch.ones_like(law).scatter(1, elders, 0.0)
        rest = torch.where((law * untried).sum(1, keepdim=True) > 0, law * untried, untried)
        return rest / rest.sum(1, keepdim=True)
    best = law.argsort(dim=1, descending=True, stable=True)
    if scheme == "top":
        return one_hot(best[:, rank], law)
    if rank:
        return one_hot(best[:, rank - 1], law)
    rest = law.scatter(1, best[:, : siblings - 1], 0.0)
    return rest / rest.sum(1, keepdim=True)


def sequence_law(target: Tables, length: int) -> Tensor:
    """The law [V**length] of the first ``length`` tokens."""
    law = target[0].new_ones(1)
    for table in target[:length]:
        law = (law[:, None] * table).flatten()
    return law


def emitted_law(rule: Rule, drawn: Draws, target: Tables, after: Tables | None = None) -> Tensor:
    """The law [V**(D + 1)] of the first D + 1 tokens of a round by ``rule``, completed from ``after`` (the target)."""
    tree, prefix, vocab = drawn.tree, drawn.prefix, target[0].shape[-1]
    decisions = rule.decisions(tree, node_laws(drawn, target))
    ends = endings(tree.shape, decisions) * drawn.chance[:, None]  # [R, N]
    next_law = decisions.next_law / decisions.next_law.sum(-1, keepdim=True)
    depths, carried = tree.shape.depths[0], target[0].new_zeros(1)
    for depth in range(tree.shape.depth + 1):
        carried = (carried[:, None] * (after or target)[depth]).flatten()  # zeros at depth 0: nothing has ended yet
        level = depths == depth
        ended = ends[:, level, None] * next_law[:, level]  # [R, nodes of the level, V]
        index = prefix[:, level, None] * vocab + torch.arange(vocab)
        carried = carried.index_add(0, index.flatten(), ended.flatten())
    return carried


def expected_excess(rule: Rule, drawn: Draws, target: Tables) -> float:
    """The mean of the excess a verdict reports: a bound on the total variation of ``emitted_law`` to the target."""
    decisions = rule.decisions(drawn.tree, node_laws(drawn, target), measure=True)
    assert decisions.excess is not None, "the rule measures no excess"
    ends = endings(drawn.tree.shape, decisions)
    reached = (ends[:, :, None] * drawn.tree.shape.ancestors).sum(1)  # [R, N]
    return float((reached * decisions.excess).sum(1) @ drawn.chance)


def node_laws(drawn: Draws, target: Tables) -> Tensor:
    """The target's law at every node of every draw [R, N, V]."""
    depths = drawn.tree.shape.depths[0].tolist()
    return torch.stack([target[depth][drawn.prefix[:, node]] for node, depth in enumerate(depths)], dim=1)


def total_variation(first: Tensor, second: Tensor) -> float:
    """Half the sum of absolute differences."""
    return float((first - second).abs().sum() / 2)
