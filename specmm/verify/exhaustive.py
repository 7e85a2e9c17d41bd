"""Computes the exact output distribution of a rule by running it on every draw of a small tree,
weighted by the draw's probability.

Tests prove rules exact in this way (tests/unit/verify); test a new rule in the same way. Target and
drafter are *tables*: entry d, [V**d, V], holds the distribution of the next token after each prefix
of d tokens (prefixes read as numbers in base V), so that distributions depend on the whole path.
Meant for V <= 5, a handful of nodes, float64.

Shape letters: R rows, one per draw; N nodes, D deepest level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.core.tree import DraftTree, TreeShape
from specmm.verify.exact import one_hot
from specmm.verify.rule import Rule, endings

Tables: TypeAlias = Sequence[Tensor]
Scheme: TypeAlias = Literal["independent", "without replacement", "top", "top and sample"]


@dataclass
class Draws:
    """Every draw of a tree, one a row: its probability [R] and its nodes' prefixes [R, N]."""

    tree: DraftTree
    chance: Tensor
    prefix: Tensor


def draws(shape: TreeShape, drafter: Tables, scheme: Scheme) -> Draws:
    """All outcomes of drafting ``shape`` (shared) from ``drafter``.

    Siblings are drawn ``"independent"``-ly, ``"without replacement"`` (uniformly over the untried
    tokens once the distribution is exhausted), chosen as the ``"top"`` tokens in order (point
    masses, no distributions), or ``"top and sample"``: the first a sample of the distribution
    without its top k - 1, the others those k - 1.
    """
    vocab = drafter[0].shape[-1]
    parents = shape.parents[0].tolist()
    depths = shape.depths[0].tolist()
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    prefix = torch.zeros_like(tokens)
    chance = drafter[0].new_ones(1)
    probs = drafter[0].new_zeros(1, 1, vocab)
    for node, parent in enumerate(parents[1:], start=1):
        earlier_siblings = [n for n in range(1, node) if parents[n] == parent]
        dist = drafter[depths[parent]][prefix[:, parent]]  # [R, V]
        dist = _node_probs(dist, tokens[:, earlier_siblings], parents.count(parent), scheme)
        row, token = dist.nonzero(as_tuple=True)
        chance = chance[row] * dist[row, token]
        tokens = torch.cat([tokens[row], token[:, None]], dim=1)
        prefix = torch.cat([prefix[row], (prefix[row, parent] * vocab + token)[:, None]], dim=1)
        probs = torch.cat([probs[row], dist[row][:, None]], dim=1)
    return Draws(DraftTree(tokens, shape, None if scheme == "top" else probs), chance, prefix)


def _node_probs(probs: Tensor, earlier_siblings: Tensor, siblings: int, scheme: Scheme) -> Tensor:
    """The next sibling's distribution [R, V], after ``earlier_siblings`` [R, rank]."""
    rank = earlier_siblings.shape[1]
    if scheme == "independent":
        return probs
    if scheme == "without replacement":
        untried = torch.ones_like(probs).scatter(1, earlier_siblings, 0.0)
        residual = torch.where((probs * untried).sum(1, keepdim=True) > 0, probs * untried, untried)
        return residual / residual.sum(1, keepdim=True)
    best = probs.argsort(dim=1, descending=True, stable=True)
    if scheme == "top":
        return one_hot(best[:, rank], probs)
    if rank:
        return one_hot(best[:, rank - 1], probs)
    residual = probs.scatter(1, best[:, : siblings - 1], 0.0)
    return residual / residual.sum(1, keepdim=True)


def sequence_probs(target: Tables, length: int) -> Tensor:
    """The distribution [V**length] of the first ``length`` tokens."""
    probs = target[0].new_ones(1)
    for table in target[:length]:
        probs = (probs[:, None] * table).flatten()
    return probs


def emitted_probs(
    rule: Rule, drawn: Draws, target: Tables, after: Tables | None = None, lead: int = 0
) -> Tensor:
    """The distribution [V**(D + 1)] of the first D + 1 tokens by ``rule``.

    Tokens after the round's own are drawn from ``after`` (by default the target). With ``lead``,
    the tree comes after ``lead`` drafts to which target and drafter give probability 1.
    """
    tree = drawn.tree
    prefix = drawn.prefix
    vocab = target[0].shape[-1]
    full_tree, p = _with_lead(tree, node_probs(drawn, target), lead)
    decisions = rule.decisions(full_tree, p)
    ends = endings(full_tree.shape, decisions)[:, lead:] * drawn.chance[:, None]  # [R, N]
    next_probs = decisions.next_probs[:, lead:]
    next_probs = next_probs / next_probs.sum(-1, keepdim=True)
    depths = tree.shape.depths[0]
    carried = target[0].new_zeros(1)  # nothing has ended before depth 0
    for depth in range(tree.shape.depth + 1):
        carried = (carried[:, None] * (after or target)[depth]).flatten()
        level = depths == depth
        ended = ends[:, level, None] * next_probs[:, level]  # [R, nodes of the level, V]
        index = prefix[:, level, None] * vocab + torch.arange(vocab)
        carried = carried.index_add(0, index.flatten(), ended.flatten())
    return carried


def _with_lead(tree: DraftTree, p: Tensor, lead: int) -> tuple[DraftTree, Tensor]:
    """``tree`` and the target's ``p`` [R, N, V] with ``lead`` drafts of token 0 before them."""
    sure = one_hot(tree.tokens.new_zeros(len(p), lead + 1), p)
    parents = [*range(-1, lead), *(lead + node for node in tree.shape.parents[0].tolist()[1:])]
    probs = None if tree.probs is None else torch.cat([sure, tree.probs[:, 1:]], dim=1)
    tokens = F.pad(tree.tokens, (lead, 0))
    longer = DraftTree(tokens, TreeShape.from_parents(parents), probs)
    return longer, torch.cat([sure[:, :lead], p], dim=1)


def node_probs(drawn: Draws, target: Tables) -> Tensor:
    """The target's distribution at every node of every draw [R, N, V]."""
    depths = drawn.tree.shape.depths[0].tolist()
    probs = [target[depth][drawn.prefix[:, node]] for node, depth in enumerate(depths)]
    return torch.stack(probs, dim=1)


def total_variation(first: Tensor, second: Tensor) -> float:
    """Half the sum of absolute differences."""
    return float((first - second).abs().sum() / 2)
