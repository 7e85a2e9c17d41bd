"""Draft trees by name, and how their nodes are drawn.

Trees of fixed shape do not depend on the tokens drawn, which the ratio rules need to be exact:
published lists (LANTERN++, EAGLE-1; Medusa's ``tree_choices``), branching factors (SpecInfer, RSD),
spines, chains, delayed trees. To add a shape, write a function that returns a
:class:`specmm.core.tree.TreeShape` and an entry in :data:`OURS`; third parties register theirs
(:func:`specmm.register`).

Siblings are k tokens per parent drawn from the draft distribution q, together with the distribution
each was drawn from, as the ratio rules need it (recursive rejection, traversal). Without
replacement, sibling j's distribution is q without its earlier siblings, renormalised (RSD, arXiv
2402.14160; Sequoia, 2402.12374); once q is exhausted it is uniform over the untried tokens.

Shape letters: B batch, P parents, k siblings, V vocabulary. Leading axes are free: [..., V] serves
as [B, P, V].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from specmm.core.randomness import UniformSource, categorical
from specmm.core.sorting import largest
from specmm.core.tree import TreeShape
from specmm.extending.kinds import shown
from specmm.extending.registry import Open, parse_spec, summary, unknown
from specmm.shape.eagle2 import Dynamic
from specmm.shape.sequoia import best_tree

Tree: TypeAlias = str | tuple[int, ...] | TreeShape | Dynamic
"""A name, parents (-1, 0, …), children by level of a spine, or a shape itself."""
Siblings: TypeAlias = Literal["distinct", "independent", "likeliest and one"]
Choices: TypeAlias = tuple[tuple[int, ...], ...]
Device: TypeAlias = torch.device | str


def _paths(text: str) -> Choices:
    """Rank paths of a list such as ``"0 1 00"``; every rank is one digit."""
    return tuple(tuple(int(digit) for digit in path) for path in text.split())


NAMED: Mapping[str, Choices] = {
    # 25 drafts, 4/8/8/3/2 by depth: EAGLE-1's default tree, also in LANTERN's release
    "mc_sim_7b_63": _paths(
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ),
    # 57 drafts, 5/13/16/14/9 by depth: the tree LANTERN++ uses for LlamaGen and Anole
    "naive_extend_57": _paths(
        "0 1 2 3 4 00 01 02 03 10 11 12 20 21 22 30 31 40 "
        "000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200 "
        "0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200 "
        "00000 00001 00002 00010 00011 00100 00101 00110 00200"
    ),
}


def branching(widths: Sequence[int], device: Device = "cpu") -> TreeShape:
    """Every node of depth d has ``widths[d]`` children: [4, 2, 1] drafts 4 + 8 + 8 nodes."""
    _check_widths(widths)
    parents = [-1]
    level = [0]
    for width in widths:
        first = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return TreeShape.from_parents(parents, device)


def spine(widths: Sequence[int], device: Device = "cpu") -> TreeShape:
    """A chain of rank-0 nodes whose node of depth d has ``widths[d]`` children.

    Other nodes have no children, so the drafter needs one row a level.
    """
    _check_widths(widths)
    parents = [-1]
    node = 0
    for width in widths:
        first = len(parents)
        parents += [node] * width
        node = first
    return TreeShape.from_parents(parents, device)


def _check_widths(widths: Sequence[int]) -> None:
    if not widths or min(widths) < 1:
        raise ValueError(
            f"widths must be a non-empty list of numbers of at least 1, got {list(widths)}"
        )


def delayed(trunk: int, branches: int, length: int, device: Device = "cpu") -> TreeShape:
    """A chain of ``trunk`` drafts whose end has ``branches`` chains of ``length`` drafts each.

    Near the root draft and target agree and one draft is enough; more drafts pay where they diverge
    (Thomas et al., arXiv 2602.16994). Draw the branches independently. ``trunk`` 0 gives
    independent rollouts from the root, ``branches`` 1 a plain chain.
    """
    least = {"trunk": (trunk, 0), "branches": (branches, 1), "length": (length, 1)}
    for name, (value, bound) in least.items():
        if value < bound:
            raise ValueError(f"{name} must be at least {bound}, got {value}")
    return branching([1] * trunk + [branches] + [1] * (length - 1), device)


@dataclass(frozen=True)
class TreeKind:
    """A family of shapes: the function that makes a shape, an example, and a description."""

    make: Callable[..., TreeShape | Dynamic]
    spelling: str  # the example, as users write it
    what: str

    @classmethod
    def of_others(cls, name: str, make: Any) -> TreeKind:
        """The tree kind of ``make``, a third-party function of numbers and a keyword ``device``.

        Raises ``ValueError`` for anything that is not such a function.
        """
        parameters = inspect.signature(make).parameters if callable(make) else {}
        if "device" not in parameters:
            raise ValueError(
                "a tree must be made by a function of numbers and device, as fan(width, *, "
                f"device='cpu'), got {name}"
            )
        spelling = f"{name}({', '.join(name_ for name_ in parameters if name_ != 'device')})"
        return cls(make, spelling, summary(make) or name)


def _chain(length: int, *, device: Device) -> TreeShape:
    return TreeShape.chain(length, device)


def _spine(*widths: int, device: Device) -> TreeShape:
    return spine(widths, device)


def _branching(*widths: int, device: Device) -> TreeShape:
    return branching(widths, device)


def _dynamic(total: int = 24, depth: int = 4, top_k: int = 6, *, device: Device) -> Dynamic:
    return Dynamic(top_k, depth, total)


OURS: Mapping[str, TreeKind] = {
    "chain": TreeKind(_chain, "chain(6)", "one draft after the other"),
    "spine": TreeKind(_spine, "spine(3, 2, 2, 1)", "a chain with siblings, or plainly 3,2,2,1"),
    "branching": TreeKind(
        _branching, "branching(4, 2, 1)", "a fixed number of children per node at each level"
    ),
    "delayed": TreeKind(
        delayed, "delayed(trunk=2, branches=3, length=2)", "a chain that branches at its end"
    ),
    "dynamic": TreeKind(
        _dynamic,
        "dynamic(total=24, depth=4, top_k=6)",
        "EAGLE-2's dynamic tree, rebuilt every round",
    ),
}
TREES = Open("tree", OURS, TreeKind.of_others)


def make_tree(
    tree: Tree, device: Device = "cpu", acceptance: Sequence[Sequence[float]] = ()
) -> TreeShape | Dynamic:
    """The shape of ``tree``: a name, a list of parents (starting with -1), or a spine's children.

    ``sequoia(n)`` is the best tree of n nodes for the drafter's ``acceptance`` by level and rank.
    Raises ``ValueError`` for a name or numbers that make no tree.
    """
    if isinstance(tree, TreeShape | Dynamic):
        return _sound(tree, device)
    if not isinstance(tree, str):
        if not isinstance(tree, tuple | list):
            raise ValueError(f"tree must be a name or numbers such as (3, 2, 1), got {shown(tree)}")
        is_parents = tree[:1] == (-1,)
        return TreeShape.from_parents(tree, device) if is_parents else spine(tree, device)
    if tree in NAMED:
        return TreeShape.from_choices(NAMED[tree], device)
    name, values, options = parse_spec(tree)
    if name == "sequoia":
        return _sequoia(device, acceptance, *values, **options)
    if name not in TREES:
        raise unknown("tree", name, [*TREES, "sequoia", *NAMED])
    try:
        shape = TREES[name].make(*values, **options, device=device)
    except TypeError as error:
        raise ValueError(f"a tree must read as {TREES[name].spelling}, got {tree!r}") from error
    if not isinstance(shape, TreeShape | Dynamic):
        raise ValueError(f"tree {name} must make a TreeShape, got a {type(shape).__name__}")
    return _sound(shape, device)


def _sound(tree: TreeShape | Dynamic, device: Device) -> TreeShape | Dynamic:
    """``tree`` with its depth and width corrected if it declares wrong ones."""
    if isinstance(tree, TreeShape) and not tree.fixed:
        return TreeShape.from_parents(tree.parents[0].tolist(), device)
    return tree.to(device) if isinstance(tree, TreeShape) else tree


def _sequoia(device: Device, acceptance: Sequence[Sequence[float]], total: int = 12) -> TreeShape:
    if not acceptance:
        raise ValueError("tree sequoia needs a drafter whose acceptance was measured, got none")
    return best_tree(acceptance, total, len(acceptance), device)[0]


def static_tree(
    tree: Tree, device: Device = "cpu", acceptance: Sequence[Sequence[float]] = ()
) -> TreeShape:
    """As :func:`make_tree`; raises ``ValueError`` for a tree without a fixed shape."""
    tree_shape = make_tree(tree, device, acceptance)
    if isinstance(tree_shape, Dynamic):
        raise ValueError(
            f"tree must be of fixed shape to be drawn, got {tree}; give spine(3, 2, 1)"
        )
    return tree_shape


def draw_siblings(
    probs: Tensor, k: int, uniforms: UniformSource, how: Siblings = "distinct"
) -> tuple[Tensor, Tensor]:
    """Tokens [B, P, k] drawn from ``probs`` [B, P, V] and their distributions [B, P, k, V].

    ``"distinct"`` as :func:`sample_siblings`, ``"independent"`` as :func:`sample_siblings_iid`,
    ``"likeliest and one"`` as :func:`likeliest_and_one`. A parent with one child takes one uniform.
    """
    parents = probs.shape[1]
    if k == 1:
        return categorical(probs, uniforms.draw(parents))[..., None], probs[:, :, None]
    if how == "independent":
        return sample_siblings_iid(probs, uniforms.draw(parents * k).view(-1, parents, k))
    if how == "likeliest and one":
        return likeliest_and_one(probs, k, uniforms.draw(parents))
    return sample_siblings(probs, k, uniforms.draw(probs[0].numel()).view(probs.shape))


def sample_siblings(probs: Tensor, k: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, P, k] drawn without replacement from ``probs`` [B, P, V], and their distributions.

    An exponential race (Efraimidis and Spirakis, 2006; Gumbel top-k is its logarithm): token x
    finishes at E_x / q(x), and the first k to finish are k draws without replacement, in order.
    ``uniforms`` [B, P, V] in [0, 1) give the E_x; pass float64 if float32's steps of 2**-24 are too
    coarse for the distribution. The distributions are [B, P, k, V].
    """
    if uniforms.shape != probs.shape:
        raise ValueError(
            f"uniforms must be {list(probs.shape)} like the distribution, "
            f"got {list(uniforms.shape)}"
        )
    _check_count(probs, k)
    # Half a step of the uniforms centres -log(u) on the values that u represents. It also keeps
    # the race positive at the largest u.
    half_step = torch.finfo(uniforms.dtype).eps / 4
    race = uniforms.log().neg_().sub_(half_step)
    # tokens of zero probability finish after all others, in the order of their own race
    keys = torch.where(probs > 0, probs / race, -race)
    tokens = largest(keys, k)[1]
    return tokens, sibling_probs(probs, tokens)


def likeliest_and_one(dist: Tensor, k: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, P, k]: one drawn without the k - 1 likeliest of ``dist`` [B, P, V], then these.

    The distributions [B, P, k, V] have at rank 0 ``dist`` without the likeliest tokens,
    renormalised (uniform over the others if they have no mass). Do not read other ranks: their
    tokens are chosen, not drawn (greedy multi-draft, Hu et al. 2025). ``uniforms`` [B, P] in [0,
    1).
    """
    _check_count(dist, k)
    likeliest = largest(dist, k - 1)[1]
    remaining = dist.scatter(-1, likeliest, 0.0)
    others = torch.ones_like(dist).scatter_(-1, likeliest, 0.0)
    remaining = torch.where(remaining.sum(-1, keepdim=True) > 0, remaining, others)
    remaining = remaining / remaining.sum(-1, keepdim=True)
    drawn = categorical(remaining, uniforms)
    probs = remaining.unsqueeze(-2).expand(*dist.shape[:-1], k, dist.shape[-1])
    return torch.cat([drawn.unsqueeze(-1), likeliest], dim=-1), probs


def sample_siblings_iid(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, P, k] drawn with replacement from ``probs`` [B, P, V], and their distributions.

    ``uniforms`` [B, P, k] in [0, 1), one a sibling (SpecInfer, SpecTr). The distributions are an
    expanded view [B, P, k, V].
    """
    if uniforms.shape[:-1] != probs.shape[:-1]:
        raise ValueError(
            f"uniforms must be {list(probs.shape[:-1])} + [k], got {list(uniforms.shape)}"
        )
    normal = probs / probs.sum(-1, keepdim=True)
    cumulative = normal.cumsum(-1, dtype=torch.promote_types(probs.dtype, uniforms.dtype))
    thresholds = uniforms * cumulative[..., -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=probs.shape[-1] - 1)
    return tokens, normal.unsqueeze(-2).expand(*uniforms.shape, probs.shape[-1])


def sibling_probs(dist: Tensor, tokens: Tensor) -> Tensor:
    """Distributions [B, P, k, V] from which ``tokens`` [B, P, k] were drawn, one after the other,
    without replacement from ``dist``.

    Tokens of positive probability must come before those of zero, as in any such draw.
    """
    k = tokens.shape[-1]
    # a token of zero probability shows that q was used up
    exhausted = (dist.gather(-1, tokens) <= 0).to(dist.dtype)
    probs = dist.unsqueeze(-2) + exhausted.unsqueeze(-1)  # [B, P, k, V]
    for earlier in range(k - 1):
        later = tokens[..., earlier, None, None].expand(*tokens.shape[:-1], k - 1 - earlier, 1)
        probs[..., earlier + 1 :, :].scatter_(-1, later, 0)
    return probs.div_(probs.sum(-1, keepdim=True))


def _check_count(probs: Tensor, k: int) -> None:
    if not 1 <= k <= probs.shape[-1]:
        raise ValueError(f"k must be in [1, {probs.shape[-1]}] (the vocabulary), got {k}")
