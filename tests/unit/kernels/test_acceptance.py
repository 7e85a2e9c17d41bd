"""Fused acceptance against the core's rules on the same uniforms, and against plain Python.

Shape letters: B batch, N nodes, V vocabulary.
"""

import pytest
import torch

from specmm.core.decode import decide
from specmm.core.randomness import Uniforms
from specmm.core.tree import DraftTree, TreeShape
from specmm.kernels.acceptance import accept, decide_fused, naive
from specmm.verify import naive as rules
from specmm.verify.bottom_up import Block, Traversal
from specmm.verify.exact import GreedyMatch, PointMass, Recursive
from specmm.verify.relaxed import Typical

V = 63


def draft_tree(shape, drawn, device, batch, seed=0, dtype=torch.float64):
    """Drafts the target likes or not, distributions they might come from, target distributions with
    zeros among them, as top-k leaves.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, batch, shape.size, V, generator=generator, dtype=dtype).mul(2)
    # a drafter that often agrees: what a rejection leaves is then another distribution
    logits[1] = logits[0] + 0.6 * logits[1]
    probs = logits.softmax(-1)
    probs = torch.where(probs > 0.003, probs, 0.0)
    probs /= probs.sum(-1, keepdim=True)
    tokens = probs[1].flatten(0, 1).multinomial(1, generator=generator).view(batch, -1)
    likely = probs[0].argmax(-1).gather(1, shape.parents.cpu().clamp(min=0).expand(batch, -1))
    tokens = torch.where(torch.rand(batch, shape.size, generator=generator) < 0.5, likely, tokens)
    return DraftTree(tokens.to(device), shape, probs[1].to(device) if drawn else None), probs[0].to(
        device
    )


def uniforms(batch, device, dtype=torch.float64):
    return Uniforms([torch.Generator(device).manual_seed(100 + b) for b in range(batch)], dtype)


RULES = {
    "greedy match": GreedyMatch(),
    "recursive": Recursive(),
    "point mass": PointMass(),
    "traversal": Traversal(),
}


def agreement(result, other):
    """The share of rows with the same result."""
    same = (result.path == other.path).all(1) & (result.kept == other.kept)
    return float((same & (result.next_token == other.next_token)).double().mean())


@pytest.mark.parametrize(
    ("drawn", "shared"), [(False, True), (True, False)], ids=["chosen", "drawn"]
)
@pytest.mark.parametrize("name", RULES)
def test_fused_results_are_the_rules_own(name, drawn, shared, random_shape, device, monkeypatch):
    batch, rule = 16, RULES[name]
    shape = random_shape(1 if shared else batch, 9, torch.Generator().manual_seed(4))
    tree, p = draft_tree(shape, drawn, device, batch)
    numbers = uniforms(batch, device), uniforms(batch, device)
    monkeypatch.setenv("SPECMM_KERNELS", "torch")
    expected = decide(rule, tree, p, numbers[0])
    monkeypatch.setenv("SPECMM_KERNELS", "triton")
    found = decide(rule, tree, p, numbers[1])
    assert agreement(found, expected) == 1
    assert torch.equal(numbers[0].draw(1), numbers[1].draw(1))  # as many uniforms used
    if name != "greedy match":
        # rows end at different depths, or the test says little
        assert expected.kept.unique().numel() > 1


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_fused_block_verification(drawn, device, monkeypatch):
    tree, p = draft_tree(TreeShape.chain(5, device), drawn, device, 24)
    found = {}
    for name in ("torch", "triton"):
        monkeypatch.setenv("SPECMM_KERNELS", name)
        found[name] = decide(Block(), tree, p, uniforms(24, device))
    assert agreement(found["triton"], found["torch"]) == 1
    assert found["torch"].kept.unique().numel() > 2


def forgotten(tree):
    """As if its drafts had been chosen."""
    return DraftTree(tree.tokens, tree.shape)


def of_another_row(tree):
    return DraftTree(tree.tokens, tree.shape, tree.probs.roll(1, 0))


@pytest.mark.parametrize(
    ("rule", "twin", "change"),
    [
        (Traversal, Traversal, forgotten),
        (Traversal, Traversal, of_another_row),
        (Traversal, Recursive, lambda tree: tree),  # from the root down
        (Recursive, Recursive, forgotten),
        (Recursive, Traversal, lambda tree: tree),  # from the leaves up
    ],
)
def test_broken_twins_are_rejected(
    rule, twin, change, random_shape, device, on_triton, monkeypatch
):
    tree, p = draft_tree(random_shape(1, 9, torch.Generator().manual_seed(4)), True, device, 10)
    found = decide_fused(twin(), change(tree), p, uniforms(10, device))
    monkeypatch.setenv("SPECMM_KERNELS", "torch")
    assert agreement(found, decide(rule(), tree, p, uniforms(10, device))) < 1


def test_the_rules_the_kernel_does_not_know_are_left_to_others(random_shape, device, on_triton):
    tree, p = draft_tree(random_shape(1, 5, torch.Generator().manual_seed(4)), True, device, 2)
    with pytest.raises(ValueError, match="must be a chain"):
        decide(Block(), tree, p, uniforms(2, device))
    assert decide_fused(Typical(), tree, p, uniforms(2, device)) is None
    assert decide(Typical(), tree, p, uniforms(2, device), measure=True).excess is not None


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_fused_equals_plain_python(drawn, random_shape, device, on_triton):
    shape = random_shape(1, 7, torch.Generator().manual_seed(1))
    tree, p = draft_tree(shape, drawn, device, 8, seed=3)
    uniforms = torch.rand(8, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    uniforms = uniforms.to(device)
    path0, _, following0 = accept(p, tree.tokens, shape.parents, uniforms, shape.depth, tree.probs)
    path1, kept1, following1 = accept(
        p, tree.tokens, shape.parents, uniforms, shape.depth, tree.probs, leaves_first=True
    )
    parents = shape.parents[0].tolist()
    probs = [None] * 8 if tree.probs is None else tree.probs.tolist()
    for b in range(8):
        given = tree.tokens[b].tolist(), parents, p[b].tolist(), probs[b]
        nodes, token = naive.accept(rules.recursive(*given), parents, uniforms[b].tolist())
        assert path0[b, : len(nodes)].tolist() == nodes and int(following0[b]) == token
        nodes, token = naive.accept(rules.traversal(*given), parents, uniforms[b].tolist())
        assert path1[b, : int(kept1[b])].tolist() == nodes and int(following1[b]) == token


@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("leaves_first", [False, True], ids=["from the root", "from the leaves"])
@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_a_draft_without_mass_is_never_kept(drawn, leaves_first, name, device, monkeypatch):
    monkeypatch.setenv("SPECMM_KERNELS", name)
    probs = torch.zeros(1, 3, V, device=device)
    probs[:, :, 5] = 1
    tokens = torch.tensor([[5, 7, 8]], device=device)
    parents = torch.tensor([[-1, 0, 0]], device=device)
    drafts = torch.full((1, 3, V), 1 / V, device=device) if drawn else None
    uniforms = torch.zeros(1, 4, device=device)
    path, kept, following = accept(
        probs, tokens, parents, uniforms, 1, drafts, leaves_first=leaves_first
    )
    assert path.tolist() == [[0, -1]] and kept.tolist() == [1] and following.tolist() == [5]


def test_the_vocabulary_may_exceed_a_block(random_shape, device, on_triton, monkeypatch):
    """Residuals, draws and gathers go across blocks."""
    from specmm.kernels.acceptance import triton as fast

    shape = random_shape(1, 9, torch.Generator().manual_seed(4))
    tree, p = draft_tree(shape, True, device, 6)
    numbers = uniforms(6, device).draw(10)
    given = (p, tree.tokens, shape.parents, numbers, shape.depth, tree.probs)
    upwards = (*given, True)
    whole = *accept(*given), *accept(*upwards)
    monkeypatch.setattr(fast, "BLOCK", 16)
    assert all(
        torch.equal(a, b) for a, b in zip(whole, (*accept(*given), *accept(*upwards)), strict=True)
    )


def test_a_token_without_mass_is_never_emitted(device, on_triton):
    probs = torch.zeros(3, 1, V, device=device)
    probs[:, :, 5] = probs[:, :, 40] = 0.5
    none = torch.zeros(3, 1, dtype=torch.int64, device=device)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-24], device=device)[:, None].repeat(1, 2)
    assert accept(probs, none, none[:1] - 1, uniforms, 0)[2].tolist() == [5, 40, 40]


def test_no_graph_break(random_shape, device, on_triton):
    shape = random_shape(1, 5, torch.Generator().manual_seed(4))
    tree, p = draft_tree(shape, True, device, 4)
    given = p, tree.tokens, shape.parents, uniforms(4, device).draw(6), shape.depth, tree.probs

    @torch.compile(fullgraph=True, backend="aot_eager")
    def verify(*arguments):
        path, kept, following = accept(*arguments)
        return path, kept + 0, following

    assert all(torch.equal(a, b) for a, b in zip(verify(*given), accept(*given), strict=True))
    torch.library.opcheck(accept, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(1, 3, 4)}, "probs must be"),
        ({3: torch.zeros(1, 2)}, "uniforms must be"),
        ({0: torch.zeros(1, 2, 4).half()}, "float32 or float64"),
    ],
)
def test_mistakes_are_one_line(change, message):
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    given = [torch.zeros(1, 2, 4), tokens, tokens - 1, torch.zeros(1, 3), 1, None]
    for place, value in change.items():
        given[place] = value
    with pytest.raises(ValueError, match=message):
        accept(*given)
