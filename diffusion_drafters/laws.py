"""The laws drafts are drawn from, recorded node by node, so that verification is exact at any temperature.

These ways of drafting a chain from a block keep the target's law: tokens drawn from the marginals independently, each
with its marginal (DEER, arXiv 2512.15176); tokens drawn left to right, each with the law behind the one drawn before
it (a drafter with a table of pairs or a memory, or the lattice's renormalised scores without looking ahead); and any
path chosen in whatever way, as point masses (no laws). A searched path with the marginals as its laws does not: nobody
drew it.

Shape letters: B batch, K block, V vocabulary, v tokens a drafter knows, S what a block says of a place (its logits, v,
or what logits are made of), W beam width, R size of a memory.
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
from specmm.randomness import Dice, categorical
from specmm.shape import eagle2
from specmm.tree import DraftTree, TreeShape

Law = Callable[[Tensor], Tensor]  # from logits [..., v] to probabilities
BEAM = 8  # paths that a tree goes on from at every level, at least


class Follow(Protocol):
    """Makes of what a block says of a place its logits behind the token drafted before it."""

    def __call__(self, place: Tensor, before: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits [..., v] of ``place`` [..., S] behind the target's tokens ``before`` [...], and the memory [..., R] to
        hand on, if the drafter has one; ``memory`` is what came of those tokens' own place (None: the block's first).
        """
        ...


@dataclass(frozen=True)
class Known:
    """Which of a target's V = ``size`` tokens the v of a drafter are: ``ids`` [v], None where they are all of them."""

    size: int
    ids: Tensor | None = None

    @property
    def count(self) -> int:
        """v."""
        return self.size if self.ids is None else len(self.ids)

    def name(self, drafts: Tensor) -> Tensor:
        """The target's ids [...] of the drafter's."""
        return drafts if self.ids is None else self.ids[drafts]

    def spread(self, laws: Tensor) -> Tensor:
        """Laws [..., V] over the target's tokens of ``laws`` [..., v]."""
        if self.ids is None:
            return laws
        return laws.new_zeros(*laws.shape[:-1], self.size).index_copy_(-1, self.ids, laws)


def marginal_chain(root: Tensor, laws: Tensor, uniforms: Dice, shape: TreeShape | None = None) -> DraftTree:
    """A chain behind ``root`` [B]: token i drawn from row i of ``laws`` [B, K, V], whatever the others are.

    ``laws`` must be what is drawn from: after temperature, filters and barred tokens.
    """
    drafts = categorical(laws, uniforms.draw(laws.shape[1]))
    tokens = torch.cat([root[:, None], drafts], dim=1)
    return DraftTree(tokens, shape or TreeShape.chain(laws.shape[1], root.device), with_root(laws))


def followed_chain(
    root: Tensor,
    block: Tensor,
    law: Law,
    follow: Follow,
    known: Known,
    uniforms: Dice | None,
    fixed: Tensor | None,
    shape: TreeShape,
) -> DraftTree:
    """A chain behind ``root`` [B]: token i drawn from the ``law`` of place i of ``block`` [B, K, S] and those before.

    Where ``fixed`` [B, ≥ K] holds a token (not -1) it is taken, as a point mass. Without ``uniforms`` every token is
    the likeliest one and no laws are recorded.
    """
    tokens, laws, memory = [root], [], None
    dice = None if uniforms is None else uniforms.draw(block.shape[1])
    settled = [None] * block.shape[1] if fixed is None else fixed[:, : block.shape[1]].unbind(1)
    for i, (place, point) in enumerate(zip(block.unbind(1), settled, strict=True)):
        scores, memory = follow(place, tokens[-1], memory)
        if dice is None:
            draft = known.name(scores.argmax(-1))
        else:
            drawn = law(scores)
            draft = known.name(categorical(drawn, dice[:, i]))
            laws.append(with_points(known.spread(drawn), point))
        tokens.append(draft if point is None else torch.where(point >= 0, point, draft))
    drawn_laws = with_root(torch.stack(laws, 1)) if laws else None  # none of a chain without drafts
    return DraftTree(torch.stack(tokens, 1), shape, drawn_laws)


def followed_tree(root: Tensor, block: Tensor, law: Law, follow: Follow, known: Known, total: int) -> DraftTree:
    """The tree of the ``total`` likeliest paths (root included) of what :func:`followed_chain` draws, as point masses.

    They are found by EAGLE-2's beams over ``block`` [B, K, S], each node's children by the law behind its own path:
    the likeliest indeed up to BEAM + 1 nodes, nearly so beyond (5% less is expected of 32 nodes of flat laws).
    """
    levels, tokens = block.shape[1], known.count
    enough = math.ceil(math.sqrt((total - 1) / (levels - 1))) if levels > 1 else total - 1
    width = min(max(min(BEAM, total - 1), enough), tokens)
    shift = None if known.ids is None else known.ids - torch.arange(tokens, device=block.device)
    scores, memory = follow(block[:, 0], root, None)
    beam = eagle2.start(law(scores).log(), width, shift)
    memory = None if memory is None else memory[:, None]
    for place in block[:, 1:].unbind(1):
        above = None if memory is None else memory.gather(1, beam.origin[..., None].expand(-1, -1, memory.shape[-1]))
        behind, memory = follow(place[:, None].expand(-1, width, -1), beam.tokens, above)  # [B, W, v]
        beam = eagle2.step(beam, law(behind).log(), shift)
    return eagle2.finish(beam, root, total)


def followed_marginals(root: Tensor, block: Tensor, law: Law, follow: Follow, known: Known, width: int = 4) -> Tensor:
    """Marginals [B, K, v] of what :func:`followed_chain` draws, over the ``width`` likeliest tokens before each.

    Nearly so with a memory: the mean of those behind the tokens is what goes on from a place.
    """
    scores, memory = follow(block[:, 0], root, None)
    found = [law(scores)]
    for place in block[:, 1:].unbind(1):
        before = found[-1].topk(min(width, known.count))  # [B, W]
        share = (before.values / before.values.sum(1, keepdim=True))[..., None]
        above = None if memory is None else memory[:, None].expand(-1, before.indices.shape[1], -1)
        behind, memory = follow(place[:, None].expand(-1, share.shape[1], -1), known.name(before.indices), above)
        found.append((law(behind) * share).sum(1))
        memory = None if memory is None else (memory * share).sum(1)
    return torch.stack(found, dim=1)


def with_points(laws: Tensor, fixed: Tensor | None) -> Tensor:
    """``laws`` [..., V] with point masses in place of those whose token in ``fixed`` [...] is settled (not -1)."""
    if fixed is None:
        return laws
    points = F.one_hot(fixed.clamp(min=0), laws.shape[-1]).to(laws.dtype)
    return torch.where((fixed >= 0)[..., None], points, laws)


def with_root(laws: Tensor) -> Tensor:
    """``laws`` [B, K, V] as those of a chain's nodes [B, K + 1, V]; the root's is never read."""
    return F.pad(laws, (0, 0, 1, 0))


def point_chain(root: Tensor, paths: Sequence[Sequence[int]], length: int) -> DraftTree:
    """Chains of chosen ``paths`` [B], as point masses, behind ``root`` [B], filled up with the root's token."""
    rows = [list(path)[:length] for path in paths]
    filled = [row + [first] * (length - len(row)) for row, first in zip(rows, root.tolist(), strict=True)]
    drafts = torch.tensor(filled, dtype=root.dtype, device=root.device).view(len(root), length)
    tokens, drafted = torch.cat([root[:, None], drafts], dim=1), max(map(len, rows))
    return DraftTree(tokens, TreeShape.chain(length, root.device), drafted=drafted)


def next_law(lattice: Lattice, objective: Objective, path: Path, temperature: float = 1.0) -> tuple[list[Path], Tensor]:
    """The continuations of ``path`` by one token and their probabilities, proportional to exp(gain / temperature).

    Raises ``ValueError`` for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; search a path at temperature 0")
    grown = objective.extend(lattice, path)
    gains = torch.tensor([longer.score - path.score for longer in grown], dtype=torch.float64)
    return grown, (gains / temperature).softmax(0)


def lattice_chain(
    root: Tensor,
    lattices: Sequence[Lattice],
    objectives: Sequence[Objective],
    vocabulary: int,
    uniforms: Dice,
    length: int,
    temperature: float = 1.0,
) -> DraftTree:
    """Chains of ``length`` = K drawn left to right from each row's lattice, with the law of every draw.

    Behind the end of a row's lattice or path comes the root's token, with certainty. K uniforms a row.
    """
    dice = uniforms.draw(length)
    tokens = root[:, None].repeat(1, length + 1)
    laws = dice.new_zeros(len(root), length + 1, vocabulary)
    laws.scatter_(2, tokens[..., None], 1.0)
    drafted = 0
    for row, (lattice, objective) in enumerate(zip(lattices, objectives, strict=True)):
        path = Path(finished=not len(lattice))
        for place in range(length):
            if path.finished:
                break
            grown, chances = next_law(lattice, objective, path, temperature)
            law = laws[row, place + 1].zero_()
            law[[longer.tokens[-1] for longer in grown]] = chances.to(law)
            path = grown[int(categorical(chances.to(law), dice[row, place]))]
            tokens[row, place + 1] = path.tokens[-1]
        drafted = max(drafted, len(path.tokens))
    return DraftTree(tokens, TreeShape.chain(length, root.device), laws, drafted)
