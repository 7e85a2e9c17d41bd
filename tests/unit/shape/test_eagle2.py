"""EAGLE-2's tree against the official code's trees (tests/parity/eagle_tree), and what the parity
cases cannot show.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specmm.shape.eagle2 import expand, finish, rerank, start, step

PARITY = Path(__file__).parents[2] / "parity"
CASES = {c["name"]: c for c in json.loads((PARITY / "eagle_tree.json").read_text())["cases"]}
TENSORS = load_file(PARITY / "eagle_tree.safetensors")


def drive(logits, roots, k, levels, total, d2t=None):
    """Trees of a Markov drafter: logits [T, V] (the same for all rows), roots [B]."""
    table = logits.log_softmax(-1)
    beams = [start(table[roots], k, d2t)]
    for _ in range(levels):
        beams.append(step(beams[-1], table[beams[-1].tokens], d2t))
    return finish(beams[-1], roots, total), beams


def run_case(name):
    case = CASES[name]
    roots = torch.tensor([case["root_token"]])
    d2t = TENSORS.get(f"{name}.d2t")
    logits = TENSORS[f"{name}.logits_table"]
    return drive(logits, roots, case["top_k"], case["depth"], case["total_tokens_arg"], d2t)


@pytest.mark.parametrize("name", CASES)
def test_tree_equals_the_official_one(name):
    tree, _ = run_case(name)
    assert tree.tokens.equal(TENSORS[f"{name}.draft_tokens"])
    assert tree.shape.parents[0].equal(TENSORS[f"{name}.parents"])
    assert tree.shape.ancestors[0].equal(TENSORS[f"{name}.tree_mask"].bool())
    assert tree.shape.depths[0].equal(TENSORS[f"{name}.position_ids"])


@pytest.mark.parametrize("name", CASES)
def test_every_expansion_feeds_what_the_official_one_feeds(name):
    _, beams = run_case(name)
    for beam, record in zip(beams, CASES[name]["draft_steps"], strict=False):
        assert beam.tokens[0].tolist() == record["input_ids"]
        assert beam.mask[0].int().tolist() == record["tree_mask"]


def test_rows_are_independent():
    logits = TENSORS["t02.logits_table"]
    roots = torch.tensor([3, 41, 7])
    together, _ = drive(logits, roots, 6, 4, 30)
    for row in range(3):
        alone, _ = drive(logits, roots[row : row + 1], 6, 4, 30)
        assert together.tokens[row].equal(alone.tokens[0])
        assert together.shape.parents[row].equal(alone.shape.parents[0])
        assert together.shape.ancestors[row].equal(alone.shape.ancestors[0])
    assert not together.shape.shared


def test_bounds_hold():
    tree, _ = drive(TENSORS["t02.logits_table"], torch.tensor([1, 2]), 5, 3, 20)
    assert int(tree.shape.depths.max()) <= tree.shape.depth
    assert int(tree.shape.ranks.max()) < tree.shape.width
    assert tree.probs is None


@pytest.mark.parametrize(
    "certain", [0.0, 1e-7]
)  # a distribution that rounding left above 1 has a positive logarithm
def test_a_certain_child_never_comes_without_its_parent(certain):
    logprobs = torch.full((4, 4), float("-inf"))
    logprobs[torch.arange(4), torch.tensor([1, 2, 3, 0])] = (
        certain  # every path score ties with its parent's
    )
    beam = start(logprobs[:1], 2)
    for _ in range(3):
        beam = step(beam, logprobs[beam.tokens])
    for total in (2, 3, 4, 5):
        tree = finish(beam, torch.tensor([0]), total)
        assert tree.tokens.tolist() == [[0, 1, 2, 3, 0][:total]]
        assert tree.shape.parents.tolist() == [[-1, 0, 1, 2, 3][:total]]


def test_expand_adds_the_path():
    scores, ids = expand(
        torch.tensor([[-1.0, -2.0]]), torch.tensor([[[-3.0, -0.5, -1.0], [-0.1, -4.0, -5.0]]])
    )
    assert ids.tolist() == [[[1, 2], [0, 1]]]
    torch.testing.assert_close(scores, torch.tensor([[[-1.5, -2.0], [-2.1, -6.0]]]))


def test_origin_points_at_the_parent_in_the_previous_beam():
    _, beams = drive(TENSORS["t02.logits_table"], torch.tensor([5]), 6, 4, 30)
    for before, after in itertools.pairwise(beams):
        parents = after.pool_parents.gather(1, after.index)
        assert parents.equal(before.index.gather(1, after.origin))


def test_errors():
    logits = torch.zeros(1, 4)
    with pytest.raises(ValueError, match=r"beam width must be in \[1, 4\]"):
        start(logits, 5)
    beam = start(logits, 2)
    with pytest.raises(ValueError, match=r"total must be in \[2, 3\] for this pool, got 9"):
        finish(beam, torch.tensor([0]), 9)
    with pytest.raises(ValueError, match="logprobs must be"):
        step(beam, torch.zeros(1, 3, 4))
    with pytest.raises(ValueError, match="total must be"):
        rerank(beam.pool_scores, beam.pool_parents, beam.pool_tokens, 1, depth=1, width=2)
