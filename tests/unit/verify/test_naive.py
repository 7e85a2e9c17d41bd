"""The vectorised rules decide as the plain-Python ones, on random trees, shared and per-row, and
row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from specmm.core.tree import DraftTree, TreeShape
from specmm.verify import (
    Block,
    GreedyMatch,
    GreedyMultiDraft,
    Grouped,
    Lantern,
    LanternPP,
    PointMass,
    Recursive,
    Traversal,
    Typical,
    naive,
    neighbour_table,
)
from specmm.verify.exact import one_hot

VOCAB, TABLE = 7, neighbour_table(torch.randn(7, 3, generator=torch.Generator().manual_seed(1)), 6)
SHAPES = [[-1, 0, 0, 0, 1, 1, 2, 4, 4], [-1, 0, 1, 2, 2, 0, 0, 6, 3], [-1, 0, 0, 1, 0, 1, 1, 1, 5]]


def lantern(
    k: int, bound: float, factor: bool, residual: str
) -> tuple[object, Callable[..., naive.Result]]:
    make = LanternPP if factor else Lantern
    plain = partial(
        naive.lantern, table=TABLE.tolist(), k=k, bound=bound, factor=factor, residual=residual
    )
    return make(TABLE, k, bound, residual), plain


PAIRS = {
    "greedy match": (GreedyMatch(), naive.greedy_match),
    "recursive": (Recursive(), naive.recursive),
    "traversal": (Traversal(), naive.traversal),
    "greedy multi-draft": (GreedyMultiDraft(), naive.greedy_multi_draft),
    "typical": (Typical(), partial(naive.typical, epsilon=0.09, delta=0.3)),
    "grouped": (Grouped(span=2, gap=0.2), partial(naive.grouped, span=2, gap=0.2)),
    "grouped, codes": (
        Grouped(TABLE, 3, 0.3, k=4),
        partial(naive.grouped, span=3, gap=0.3, table=TABLE.tolist(), k=4),
    ),
    **{f"lantern {r}": lantern(4, 0.2, False, r) for r in ("corrected", "release", "lumina")},
    **{f"lantern++ {r}": lantern(3, 2.5, True, r) for r in ("corrected", "release", "lumina")},
    "lantern, no neighbour": lantern(0, 0.1, False, "corrected"),
}
EVERY_PAIR = pytest.mark.parametrize(
    ("name", "drawn"),
    [(name, way) for name in PAIRS for way in (True, False) if way or name != "greedy multi-draft"],
)


def random_probs(generator: torch.Generator, *size: int) -> Tensor:
    return (torch.randn(*size, VOCAB, generator=generator, dtype=torch.float64) * 1.5).softmax(-1)


def random_round(
    shape: TreeShape, rows: int, *, drawn: bool, seed: int = 0
) -> tuple[DraftTree, Tensor]:
    """Random tokens and distributions, siblings distinct; a second sibling's distribution leaves
    the first's token out.
    """
    generator = torch.Generator().manual_seed(seed)
    p, q = (random_probs(generator, rows, shape.size) for _ in range(2))
    tokens = torch.zeros(rows, shape.size, dtype=torch.int64)
    for node in range(1, shape.size):
        earlier_siblings = (
            shape.earlier_siblings[:, node].expand(rows, -1)[..., None] * one_hot(tokens, q)
        ).sum(1)
        q[:, node] *= 1 - earlier_siblings
        q[:, node] /= q[:, node].sum(-1, keepdim=True)
        tokens[:, node] = torch.multinomial(q[:, node], 1, generator=generator)[:, 0]
    return DraftTree(tokens, shape, q if drawn else None), p


def check(decisions, row: int, plain: naive.Result) -> None:
    accept, next_probs, order = plain
    torch.testing.assert_close(
        decisions.accept[row, 1:], torch.tensor(accept, dtype=torch.float64)[1:]
    )
    probs = decisions.next_probs[row] / decisions.next_probs[row].sum(-1, keepdim=True)
    torch.testing.assert_close(
        probs, torch.tensor(next_probs, dtype=torch.float64), atol=1e-12, rtol=1e-9
    )
    if order is not None:
        assert decisions.order.expand(len(decisions.accept), -1)[row].tolist() == order


def plainly(
    rule: Callable[..., naive.Result], tree: DraftTree, p: Tensor, row: int
) -> naive.Result:
    parents = tree.shape.parents.expand(len(p), -1)[row].tolist()
    probs = None if tree.probs is None else tree.probs[row].tolist()
    return rule(tree.tokens[row].tolist(), parents, p[row].tolist(), probs)


@EVERY_PAIR
def test_vectorised_is_naive(name, drawn):
    rule, plain = PAIRS[name]
    for seed, parents in enumerate(SHAPES):
        tree, p = random_round(TreeShape.from_parents(parents), 5, drawn=drawn, seed=seed)
        decisions = rule.decisions(tree, p)
        for row in range(5):
            check(decisions, row, plainly(plain, tree, p, row))


@EVERY_PAIR
def test_per_row_shapes_and_no_row_minds_the_others(name, drawn):
    rule, plain = PAIRS[name]
    ragged = TreeShape(torch.tensor(SHAPES), depth=5, width=4)
    tree, p = random_round(ragged, 3, drawn=drawn)
    decisions = rule.decisions(tree, p)
    for row in range(3):
        check(decisions, row, plainly(plain, tree, p, row))
        alone = TreeShape(ragged.parents[row : row + 1], depth=5, width=4)
        probs = None if tree.probs is None else tree.probs[row : row + 1]
        single = rule.decisions(
            DraftTree(tree.tokens[row : row + 1], alone, probs), p[row : row + 1]
        )
        torch.testing.assert_close(single.accept[0], decisions.accept[row])


def plain_excess(loose: naive.Result, strict: naive.Result, parents: list[int]) -> list[float]:
    """The chance that the two part after each node: at a child, or once both have rejected all of
    them.
    """
    found = [0.0] * len(parents)
    for node in range(len(parents)):
        both = 1.0  # the chance that no child was kept by either
        for child in (n for n, parent in enumerate(parents) if parent == node):
            a, s = loose[0][child], strict[0][child]
            found[node] += both * abs(a - s)
            both *= 1 - max(a, s)
        pairs = zip(loose[1][node], strict[1][node], strict=True)
        found[node] += both * sum(abs(x - y) for x, y in pairs) / 2
    return found


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("name", [n for n in PAIRS if n[:4] in ("typi", "grou", "lant")])
def test_the_excess_is_that_of_plain_python(name, drawn):
    rule, plain = PAIRS[name]
    shapes = [
        *map(TreeShape.from_parents, SHAPES),
        TreeShape(torch.tensor(SHAPES), depth=5, width=4),
    ]
    for seed, shape in enumerate(shapes):
        tree, p = random_round(shape, 3, drawn=drawn, seed=seed)
        excess = rule.decisions(tree, p, measure=True).excess
        for row, parents in enumerate(shape.parents.expand(3, -1).tolist()):
            results = [plainly(one, tree, p, row) for one in (plain, naive.recursive)]
            assert excess[row].tolist() == pytest.approx(plain_excess(*results, parents))


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
def test_block_on_chains(drawn):
    tree, p = random_round(TreeShape.chain(6), 8, drawn=drawn)
    decisions = Block().decisions(tree, p)
    for row in range(8):
        check(decisions, row, plainly(naive.block, tree, p, row))
    ragged = DraftTree(tree.tokens, TreeShape(tree.shape.parents.expand(8, -1), 6, 1), tree.probs)
    torch.testing.assert_close(Block().decisions(ragged, p).accept, decisions.accept)


def test_point_masses_ignore_distributions_and_repeated_siblings():
    tree, p = random_round(TreeShape.from_parents(SHAPES[0]), 4, drawn=True)
    tree.tokens[:, 2] = tree.tokens[:, 1]
    accept = PointMass().decisions(tree, p).accept
    assert (accept[:, 2] == 0).all()
    for row in range(4):
        plain = naive.recursive(tree.tokens[row].tolist(), SHAPES[0], p[row].tolist())
        torch.testing.assert_close(accept[row, 1:], torch.tensor(plain[0], dtype=torch.float64)[1:])


def test_a_root_alone_is_drawn_from_the_target():
    shape = TreeShape.from_parents([-1])
    tree = DraftTree(torch.zeros(2, 1, dtype=torch.int64), shape)
    p = random_probs(torch.Generator(), 2, 1)
    drawn = DraftTree(tree.tokens, shape, p)
    for rule in (Recursive(), Block(), Traversal(), Lantern(TABLE, 3)):
        torch.testing.assert_close(rule.decisions(drawn, p, measure=True).next_probs, p)
    torch.testing.assert_close(PointMass().decisions(tree, p).next_probs, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_single_precision_is_close_and_stays_inside_the_support(dtype):
    tree, p = random_round(TreeShape.from_parents(SHAPES[0]), 16, drawn=True)
    p = (p * (p > 0.05)) / (p * (p > 0.05)).sum(-1, keepdim=True)
    cast = DraftTree(tree.tokens, tree.shape, tree.probs.to(dtype))
    rules = [
        rule for rule, _ in PAIRS.values() if getattr(rule, "residual", "corrected") == "corrected"
    ]
    for rule in rules:
        decisions = rule.decisions(cast, p.to(dtype))
        assert decisions.next_probs.isfinite().all() and (decisions.next_probs.sum(-1) > 0).all()
        assert (decisions.next_probs[p == 0] == 0).all(), rule.name
