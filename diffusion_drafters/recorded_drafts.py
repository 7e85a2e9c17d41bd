"""The distributions drafts are drawn from, recorded node by node, so that verification is exact at
any temperature.

These ways of drafting a chain from a block keep the target's distribution: tokens drawn from the
marginals independently, each with its marginal (DEER, arXiv 2512.15176); tokens drawn left to
right, each with the distribution after the one drawn before it (a drafter with a table of pairs or
a memory, or the lattice's renormalised scores without looking ahead); and any path chosen in
whatever way, as point masses (no distributions). A searched path with the marginals as its
distributions does not: nobody drew it.

Shape letters: B batch, K block, V vocabulary, v tokens a drafter knows, S what a block says of a
place (its logits, v, or what logits are made of), W beam width, R size of a memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.diffusion_drafters.diffuspec.lattice import Lattice
from specmm.diffusion_drafters.diffuspec.search import Objective, Path
from specmm.randomness import UniformSource, categorical
from specmm.shape import eagle2
from specmm.tree import DraftTree, TreeShape

ToProbs = Callable[[Tensor], Tensor]  # from logits [..., v] to probabilities
BEAM = 8  # paths that a tree goes on from at every level, at least


class NextLogits(Protocol):
    """Makes of what a block says of a place its logits after the token drafted before it."""

    def __call__(
        self, place: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [..., v] of ``place`` [..., S] after the target's tokens ``before`` [...], and the
        memory [..., R] to hand on, if the drafter has one; ``memory`` is what came of those tokens'
        own place (None: the block's first).
        """
        ...


@dataclass(frozen=True)
class DrafterVocabulary:
    """Which of a target's V = ``size`` tokens the v of a drafter are: ``ids`` [v], None where they
    are all of them.
    """

    size: int
    ids: Tensor | None = None

    @property
    def count(self) -> int:
        """v."""
        return self.size if self.ids is None else len(self.ids)

    def name(self, drafts: Tensor) -> Tensor:
        """The target's ids [...] of the drafter's."""
        return drafts if self.ids is None else self.ids[drafts]

    def spread(self, probs: Tensor) -> Tensor:
        """Distributions [..., V] over the target's tokens of ``probs`` [..., v]."""
        if self.ids is None:
            return probs
        return probs.new_zeros(*probs.shape[:-1], self.size).index_copy_(-1, self.ids, probs)


def marginal_chain(
    root: Tensor, probs: Tensor, uniforms: UniformSource, shape: TreeShape | None = None
) -> DraftTree:
    """A chain after ``root`` [B]: token i drawn from row i of ``probs`` [B, K, V], whatever the
    others are.

    ``probs`` must be what is drawn from: after temperature, filters and barred tokens.
    """
    drafts = categorical(probs, uniforms.draw(probs.shape[1]))
    tokens = torch.cat([root[:, None], drafts], dim=1)
    return DraftTree(
        tokens, shape or TreeShape.chain(probs.shape[1], root.device), with_root(probs)
    )


def followed_chain(
    root: Tensor,
    block: Tensor,
    dist: ToProbs,
    follow: NextLogits,
    known: DrafterVocabulary,
    uniforms: UniformSource | None,
    fixed: Tensor | None,
    shape: TreeShape,
) -> DraftTree:
    """A chain after ``root`` [B]: token i drawn from the ``probs`` of place i of ``block`` [B, K,
    S] and those before.

    Where ``fixed`` [B, ≥ K] holds a token (not -1) it is taken, as a point mass. Without
    ``uniforms`` every token is the likeliest one and no distributions are recorded.
    """
    tokens, probs, memory = [root], [], None
    numbers = None if uniforms is None else uniforms.draw(block.shape[1])
    settled = [None] * block.shape[1] if fixed is None else fixed[:, : block.shape[1]].unbind(1)
    for i, (place, point) in enumerate(zip(block.unbind(1), settled, strict=True)):
        scores, memory = follow(place, tokens[-1], memory)
        if numbers is None:
            draft = known.name(scores.argmax(-1))
        else:
            drawn = dist(scores)
            draft = known.name(categorical(drawn, numbers[:, i]))
            probs.append(with_points(known.spread(drawn), point))
        tokens.append(draft if point is None else torch.where(point >= 0, point, draft))
    drawn_probs = (
        with_root(torch.stack(probs, 1)) if probs else None
    )  # none of a chain without drafts
    return DraftTree(torch.stack(tokens, 1), shape, drawn_probs)


def followed_tree(
    root: Tensor,
    block: Tensor,
    probs: ToProbs,
    follow: NextLogits,
    known: DrafterVocabulary,
    total: int,
) -> DraftTree:
    """The tree of the ``total`` likeliest paths (root included) of what :func:`followed_chain`
    draws, as point masses.

    They are found by EAGLE-2's beams over ``block`` [B, K, S], each node's children by the
    distribution after its own path: the likeliest indeed up to BEAM + 1 nodes, nearly so beyond (5%
    less is expected of 32 nodes of flat distributions).
    """
    levels, tokens = block.shape[1], known.count
    enough = math.ceil(math.sqrt((total - 1) / (levels - 1))) if levels > 1 else total - 1
    width = min(max(min(BEAM, total - 1), enough), tokens)
    shift = None if known.ids is None else known.ids - torch.arange(tokens, device=block.device)
    scores, memory = follow(block[:, 0], root, None)
    beam = eagle2.start(probs(scores).log(), width, shift)
    memory = None if memory is None else memory[:, None]
    for place in block[:, 1:].unbind(1):
        above = (
            None
            if memory is None
            else memory.gather(1, beam.origin[..., None].expand(-1, -1, memory.shape[-1]))
        )
        behind, memory = follow(
            place[:, None].expand(-1, width, -1), beam.tokens, above
        )  # [B, W, v]
        beam = eagle2.step(beam, probs(behind).log(), shift)
    return eagle2.finish(beam, root, total)


def followed_marginals(
    root: Tensor,
    block: Tensor,
    probs: ToProbs,
    follow: NextLogits,
    known: DrafterVocabulary,
    width: int = 4,
) -> Tensor:
    """Marginals [B, K, v] of what :func:`followed_chain` draws, over the ``width`` likeliest tokens
    before each.

    Nearly so with a memory: the mean of those after the tokens is what goes on from a place.
    """
    scores, memory = follow(block[:, 0], root, None)
    found = [probs(scores)]
    for place in block[:, 1:].unbind(1):
        before = found[-1].topk(min(width, known.count))  # [B, W]
        share = (before.values / before.values.sum(1, keepdim=True))[..., None]
        above = None if memory is None else memory[:, None].expand(-1, before.indices.shape[1], -1)
        behind, memory = follow(
            place[:, None].expand(-1, share.shape[1], -1), known.name(before.indices), above
        )
        found.append((probs(behind) * share).sum(1))
        memory = None if memory is None else (memory * share).sum(1)
    return torch.stack(found, dim=1)


def with_points(probs: Tensor, fixed: Tensor | None) -> Tensor:
    """``probs`` [..., V] with point masses in place of those whose token in ``fixed`` [...] is
    settled (not -1).
    """
    if fixed is None:
        return probs
    points = F.one_hot(fixed.clamp(min=0), probs.shape[-1]).to(probs.dtype)
    return torch.where((fixed >= 0)[..., None], points, probs)


def with_root(probs: Tensor) -> Tensor:
    """``probs`` [B, K, V] as those of a chain's nodes [B, K + 1, V]; the root's is never read."""
    return F.pad(probs, (0, 0, 1, 0))


def point_chain(root: Tensor, paths: Sequence[Sequence[int]], length: int) -> DraftTree:
    """Chains of chosen ``paths`` [B], as point masses, after ``root`` [B], filled up with the
    root's token.
    """
    rows = [list(path)[:length] for path in paths]
    filled = [
        row + [first] * (length - len(row)) for row, first in zip(rows, root.tolist(), strict=True)
    ]
    drafts = torch.tensor(filled, dtype=root.dtype, device=root.device).view(len(root), length)
    tokens, drafted = torch.cat([root[:, None], drafts], dim=1), max(map(len, rows))
    return DraftTree(tokens, TreeShape.chain(length, root.device), drafted=drafted)


def next_probs(
    lattice: Lattice, objective: Objective, path: Path, temperature: float = 1.0
) -> tuple[list[Path], Tensor]:
    """The continuations of ``path`` by one token and their probabilities, proportional to exp(gain
    / temperature).

    Raises ``ValueError`` for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature must be positive, got {temperature}; search a path at temperature 0"
        )
    grown = objective.extend(lattice, path)
    gains = torch.tensor([longer.score - path.score for longer in grown], dtype=torch.float64)
    return grown, (gains / temperature).softmax(0)


def lattice_chain(
    root: Tensor,
    lattices: Sequence[Lattice],
    objectives: Sequence[Objective],
    vocabulary: int,
    uniforms: UniformSource,
    length: int,
    temperature: float = 1.0,
) -> DraftTree:
    """Chains of ``length`` = K drawn left to right from each row's lattice, with the distribution
    of every draw.

    After the end of a row's lattice or path comes the root's token, with certainty. K uniforms a
    row.
    """
    numbers = uniforms.draw(length)
    tokens = root[:, None].repeat(1, length + 1)
    probs = numbers.new_zeros(len(root), length + 1, vocabulary)
    probs.scatter_(2, tokens[..., None], 1.0)
    drafted = 0
    for row, (lattice, objective) in enumerate(zip(lattices, objectives, strict=True)):
        path = Path(finished=not len(lattice))
        for place in range(length):
            if path.finished:
                break
            grown, chances = next_probs(lattice, objective, path, temperature)
            dist = probs[row, place + 1].zero_()
            dist[[longer.tokens[-1] for longer in grown]] = chances.to(dist)
            path = grown[int(categorical(chances.to(dist), numbers[row, place]))]
            tokens[row, place + 1] = path.tokens[-1]
        drafted = max(drafted, len(path.tokens))
    return DraftTree(tokens, TreeShape.chain(length, root.device), probs, drafted)
