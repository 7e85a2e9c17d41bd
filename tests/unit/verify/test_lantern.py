"""LANTERN: parity with the release on 141 recorded cases, and the corrected rule emits the
distribution it states.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specmm.core.processors import Processor
from specmm.core.tree import DraftTree, TreeShape
from specmm.verify import Lantern, LanternPP, Recursive, neighbour_table
from specmm.verify.exhaustive import draws, emitted_probs, sequence_probs, total_variation
from specmm.verify.lantern import Neighbourhood
from specmm.verify.naive import borrowed
from tests.sampling import expected_excess

PARITY = Path(__file__).parents[2] / "parity" / "lantern_accept"
RECORD = json.loads(PARITY.with_suffix(".json").read_text())
TENSORS = load_file(PARITY.with_suffix(".safetensors"))
TABLE = TENSORS["out.neighbor_table"].long()
CASES = [SimpleNamespace(**case) for case in RECORD["cases"]]


def cases(kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", [c for c in CASES if c.kind in kinds], ids=lambda c: c.name
    )


def rule_of(case, **options):
    """The case's rule: delta <= 1 is LANTERN's bound, larger is LANTERN++'s lambda."""
    if not case.lantern:
        return Lantern(TABLE, 0, 0.0, **options)
    return (Lantern if case.delta <= 1 else LanternPP)(TABLE, case.k, case.delta, **options)


def test_every_kind_is_recorded():
    assert {c.kind for c in CASES} == set("DSLGP") and len(CASES) == 141


def test_neighbours_are_the_releases():
    assert torch.equal(neighbour_table(TENSORS["in.codebook"], 47), TABLE)
    assert torch.equal(neighbour_table(TENSORS["in.codebook"], 5), TABLE[:, :5])
    with pytest.raises(ValueError, match=r"columns must be in \[0, 48\)"):
        neighbour_table(TENSORS["in.codebook"], 48)


@cases("DSL")
def test_one_family_as_released(case):
    target, dist = TENSORS[f"{case.name}.target_p"], TENSORS.get(f"{case.name}.draft_p")
    shape = TreeShape.from_parents([-1] + [0] * len(case.siblings))
    probs = None if dist is None else conditional(dist, case.siblings)
    tree = DraftTree(torch.tensor([[0, *case.siblings]]), shape, probs)
    rule = rule_of(
        case,
        residual="lumina" if case.kind == "L" else "release",
        offset=getattr(case, "image_token_offset", 0),
    )
    decisions = rule.decisions(tree, target.expand(1, shape.size, -1))
    hits = (torch.tensor(case.uniforms) < decisions.accept[0, 1:]).tolist()
    ratios = torch.tensor(case.ratios).clamp(max=1)
    torch.testing.assert_close(decisions.accept[0, 1 : len(ratios) + 1], ratios, atol=1e-5, rtol=0)
    assert any(hits) == bool(case.accept_length)
    if case.accept_length:
        assert hits.index(True) == case.best_candidate
    else:
        dist = decisions.next_probs[0, 0] / decisions.next_probs[0, 0].sum()
        torch.testing.assert_close(dist, TENSORS[f"{case.name}.sample_p"], atol=1e-5, rtol=0)


def conditional(probs: Tensor, siblings: list[int]) -> Tensor:
    """Distributions [1, 1 + siblings, V] of a draw without replacement."""
    rows = [probs]
    for token in siblings:
        rows.append(probs)
        probs = probs.clone()
        probs[token] = 0
        probs = probs / probs.sum()
    return torch.stack(rows)[None]


def trie(candidates: Tensor) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens, parents and each row's nodes of the tree whose paths are the ``candidates`` (padded
    with -1).
    """
    tokens, parents, nodes, rows = [int(candidates[0, 0])], [-1], {(int(candidates[0, 0]),): 0}, []
    for path in candidates.tolist():
        row = [0]
        for depth in range(1, len(path)):
            if path[depth] < 0:
                break
            prefix = tuple(path[: depth + 1])
            if prefix not in nodes:
                nodes[prefix] = len(tokens)
                tokens.append(path[depth])
                parents.append(row[-1])
            row.append(nodes[prefix])
        rows.append(row)
    return tokens, parents, rows


def at_nodes(logits: Tensor, rows: list[list[int]], size: int) -> Tensor:
    """Logits [1, N, V] from logits [rows, L, V]."""
    table = torch.zeros(1, size, logits.shape[-1])
    for r, row in reversed(
        list(enumerate(rows))
    ):  # where rows that share a node disagree, the first counts
        for depth, node in enumerate(row):
            table[0, node] = logits[r, depth]
    return table


@cases("G")
def test_greedy_as_released(case):
    logits, candidates = TENSORS[f"{case.name}.logits"], TENSORS[f"{case.name}.candidates"]
    tokens, parents, rows = trie(candidates)
    tree = DraftTree(torch.tensor([tokens]), TreeShape.from_parents(parents))
    table = at_nodes(logits, rows, len(tokens))
    decisions = rule_of(case, greedy=True).decisions(tree, table.softmax(-1))
    kept = next((n for n in decisions.order.tolist() if decisions.accept[0, n] == 1), 0)
    assert kept == rows[case.best_candidate][case.accept_length]
    assert torch.equal(table[0, kept], TENSORS[f"{case.name}.sample_p"])
    assert int(decisions.next_probs[0, kept].argmax()) == int(table[0, kept].argmax())


@cases("P")
def test_whole_trees_as_released(case):
    logits, candidates = TENSORS[f"{case.name}.logits"], TENSORS[f"{case.name}.candidates"]
    tokens, parents, rows = trie(candidates)
    processor = Processor(case.temperature, case.top_k, case.top_p or 1.0, top_p_first=True)
    tree = DraftTree(torch.tensor([tokens]), TreeShape.from_parents(parents))
    p = processor(at_nodes(logits, rows, len(tokens)))
    decisions = rule_of(case, residual="release").decisions(tree, p)
    node, tested, uniforms = 0, [], iter(case.uniforms)
    while True:
        for child in [n for n, parent in enumerate(parents) if parent == node]:
            tested.append(float(decisions.accept[0, child]))
            if next(uniforms) < tested[-1]:
                node = child
                break
        else:
            break
    assert tested == pytest.approx([min(1.0, r) for r in case.ratios], abs=1e-5)
    assert node == rows[case.best_candidate][case.accept_length]
    probs = decisions.next_probs[0, node] / decisions.next_probs[0, node].sum()
    torch.testing.assert_close(probs, TENSORS[f"{case.name}.sample_p"], atol=1e-5, rtol=0)


CODES = neighbour_table(torch.randn(4, 2, generator=torch.Generator().manual_seed(3)), 3)
RULES = [Lantern(CODES, 3, 0.15), Lantern(CODES, 2, 0.4)]
RULES += [LanternPP(CODES, 2, 2.0), LanternPP(CODES, 3, 5.0)]


def stated(rule, p: Tensor, q: Tensor) -> Tensor:
    """The distribution the corrected rule promises for one draft of distribution q: a + (1 - sum a)
    norm((p - a)+), in plain terms.
    """
    bound, factor = (rule.delta, False) if isinstance(rule, Lantern) else (rule.lambda_, True)
    probs = p.tolist()
    lent = [
        borrowed(probs, x, rule.table.tolist(), rule.k, bound, factor) or 0.0
        for x in range(len(probs))
    ]
    a = torch.minimum(q, p + torch.tensor(lent, dtype=p.dtype))
    rest = (p - a).clamp(min=0)
    return a + (1 - a.sum()) * rest / rest.sum().clamp(min=1e-300)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.name}-{r.k}")
def test_the_corrected_rule_emits_the_distribution_it_states(rule, tables):
    shape, target, drafter = TreeShape.chain(2), tables(7, 4, 3), tables(8, 4, 3)
    emitted = emitted_probs(
        rule,
        draws(shape, drafter, "independent"),
        target,
        after=relaxed_tables(rule, target, drafter),
    )
    promised = relaxed_tables(rule, target, drafter)
    first = emitted.view(4, 4, 4).sum(-1).flatten()
    assert total_variation(first, sequence_probs(promised, 2)) < 1e-12
    assert total_variation(first, sequence_probs(target, 2)) > 1e-3


def test_the_corrected_residual_is_the_strict_one():
    """(p - min(q, p + S))+ and (p - q)+ have the same bits for every S >= 0; with S < 0 they have
    not.
    """
    generator = torch.Generator().manual_seed(0)
    p, q, lent = (torch.rand(64, 300, generator=generator) ** 8 for _ in range(3))
    p[:, ::7], q[:, ::5], lent[:, ::3] = 0.0, 0.0, 0.0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    strict = (p - q).clamp(min=0)
    assert torch.equal((p - torch.minimum(q, p + lent)).clamp(min=0), strict)
    assert not torch.equal((p - torch.minimum(q, p - lent)).clamp(min=0), strict)


def relaxed_tables(rule, target: list[Tensor], drafter: list[Tensor]) -> list[Tensor]:
    return [
        torch.stack([stated(rule, p, q) for p, q in zip(t, d, strict=True)])
        for t, d in zip(target, drafter, strict=True)
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.name}-{r.k}")
def test_the_stated_distribution_is_the_nearest_that_dominates_what_is_kept(rule, tables):
    p, q = tables(7, 4, 1)[0][0], tables(8, 4, 1)[0][0]
    probs = stated(rule, p, q)
    bound, factor = (rule.delta, False) if isinstance(rule, Lantern) else (rule.lambda_, True)
    lent = [
        borrowed(p.tolist(), x, rule.table.tolist(), rule.k, bound, factor) or 0.0 for x in range(4)
    ]
    a = torch.minimum(q, p + torch.tensor(lent, dtype=p.dtype))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        other = a + (1 - a.sum()) * torch.rand(4, generator=generator, dtype=p.dtype).softmax(-1)
        assert total_variation(probs, p) <= total_variation(other, p) + 1e-12


@pytest.mark.parametrize("residual", ["corrected", "release", "lumina"])
@pytest.mark.parametrize("scheme", ["without replacement", "independent", "top"])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.name}-{r.k}")
def test_the_excess_bounds_the_total_variation(rule, scheme, residual, drift):
    apart, excess = drift(replace(rule, residual=residual), scheme)
    assert apart <= excess + 1e-12
    assert apart > 1e-3 or scheme == "top"


@pytest.mark.parametrize("scheme", ["without replacement", "independent", "top"])
def test_without_neighbours_it_is_the_strict_rule(scheme, tables):
    shape, target = TreeShape.from_parents([-1, 0, 0, 1, 1]), tables(7, 4, 3)
    drawn = draws(shape, tables(8, 4, 3), scheme)
    for rule in (Lantern(CODES, 0, 0.3), Lantern(CODES, 0, 0.3, "release"), Recursive()):
        assert (
            total_variation(emitted_probs(rule, drawn, target), sequence_probs(target, 3)) < 1e-12
        )
        if rule.name == "lantern":
            assert expected_excess(rule, drawn, target) == 0
            assert not rule.exact


def test_relaxing_keeps_more(tables):
    shape, target = TreeShape.from_parents([-1, 0, 0, 1, 1]), tables(7, 4, 3)
    drawn = draws(shape, tables(8, 4, 3), "without replacement")
    p = torch.stack([target[0].expand(len(drawn.chance), -1)] * 5, dim=1)
    strict = Recursive().decisions(drawn.tree, p).accept
    assert (Lantern(CODES, 3, 0.4).decisions(drawn.tree, p).accept[:, 1] >= strict[:, 1]).all()


def test_greedy_excess_marks_tokens_other_than_the_argmax():
    p = torch.tensor([[[0.4, 0.35, 0.2, 0.05]] * 3])
    tree = DraftTree(torch.tensor([[0, 1, 0]]), TreeShape.from_parents([-1, 0, 0]))
    rule = LanternPP(torch.tensor([[1], [0], [3], [2]]), 1, 3.0, greedy=True)
    decisions = rule.decisions(tree, p, measure=True)
    assert decisions.accept.tolist() == [[1.0, 1.0, 1.0]]
    assert decisions.excess.tolist() == [[1.0, 0.0, 0.0]]
    strict = Lantern(rule.table, 0, 0.0, greedy=True).decisions(tree, p, measure=True)
    assert strict.accept.tolist() == [[1.0, 0.0, 1.0]] and strict.excess.sum() == 0


def test_of_equals_the_smaller_token_wins_when_greedy():
    """A draft whose relaxed mass is that of the likeliest token is kept where the argmax would take
    it.
    """
    # a half is borrowed from token 2
    probs = torch.tensor([[0.25, 0.5, 0.25, 0.0], [0.5, 0.25, 0.25, 0.0]])
    tree = DraftTree(torch.tensor([[3, 0], [3, 1]]), TreeShape.chain(1))
    rule = Lantern(torch.tensor([[2], [2], [0], [0]]), 1, 0.3, greedy=True)
    accept = rule.decisions(tree, probs[:, None].expand(-1, 2, -1)).accept
    assert accept[:, 1].tolist() == [1.0, 0.0]


def test_options_out_of_range_are_named():
    with pytest.raises(ValueError, match=r"delta must be in \[0, 1\], got 2"):
        Lantern(CODES, 2, 2.0)
    with pytest.raises(ValueError, match="lambda_ must be finite and at least 1"):
        LanternPP(CODES, 2, 0.5)
    with pytest.raises(ValueError, match="residual must be one of corrected, release, lumina"):
        Lantern(CODES, 2, 0.1, "other")
    with pytest.raises(ValueError, match=r"k must be in \[0, 3\]"):
        Lantern(CODES, 4)


@pytest.mark.parametrize("residual", ["corrected", "release"])
def test_an_excluded_token_is_emitted_by_the_release_alone(residual):
    """A draft that the target excludes is rejected; its neighbours hold all that is allowed."""
    p = torch.tensor([[[0.0, 0.5, 0.5, 0.0]] * 2])
    tree = DraftTree(torch.tensor([[0, 3]]), TreeShape.chain(1))
    near = torch.tensor([[1, 2], [0, 2], [0, 1], [1, 2]])
    decisions = Lantern(near, 1, 0.5, residual).decisions(tree, p)
    assert decisions.accept[0, 1] == 0.5
    assert bool(decisions.next_probs[0, 0, [0, 3]].any()) == (residual == "release")


def test_codes_may_lie_behind_words():
    """Of tokens that begin at an offset, neighbours are those of their codes."""
    table = torch.tensor([[1], [0], [3], [2]])
    near, is_code = Neighbourhood(table, 1, 0.5, offset=5).near(torch.tensor([2, 5, 7, 9]), 1)
    assert is_code.tolist() == [False, True, True, False]
    assert near[1:3, 0].tolist() == [6, 8]
