"""Traces: tokens a round are those of decoding, chances are those of the rule, and what a plan
without a model says and refuses.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.doctor import drafter_of
from specmm import zoo as pocket
from specmm.choose.costs import Costs
from specmm.choose.traces import Trace, costs_of
from specmm.core.decode import decide, decode
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.models.target import VLMTarget
from specmm.recipes.doctor import examined
from specmm.recipes.following import chances
from specmm.shape.trees import branching, sample_siblings, spine
from specmm.verify import Recursive
from tests.commands import as_json, refused, succeed
from tests.unit.vlm.test_doctor import chats

COSTS = {"step": 0.01, "host": 0.001, "draft": {"1": 0.001, "5": 0.005}, "verify": {"1": 0.01}}


def trace(answers=(5, 3), levels=3, ranks=2, seed=0):
    """A random one, whose drafts end with their answers."""
    torch.manual_seed(seed)
    kept = torch.rand(sum(answers), levels, ranks)
    kept = kept / kept.sum(-1, keepdim=True) * torch.rand(sum(answers), levels, 1)
    left = torch.cat([torch.arange(count, 0, -1) for count in answers])  # drafts of each root
    kept[torch.arange(levels) >= left[:, None]] = 0
    counts = torch.tensor(answers), torch.tensor([7, 20])
    return Trace(kept, *counts, {"temperature": 1.0, "method": "eagle3"})


def rounds_from(kept, shape, root, count):
    """Rounds expected from ``root`` of an answer's ``count`` on, path by path."""
    if root >= count:
        return 0.0
    total = 1.0
    ends = {0: 1.0}  # the node at which a round may end, and the chance of coming there
    for node in range(1, shape.size):
        parent = int(shape.parents[0, node])
        depth, rank = int(shape.depths[0, node]), int(shape.ranks[0, node])
        ends[node] = ends[parent] * float(kept[root, depth - 1, rank])
    for node, chance in ends.items():
        below = [i for i in range(1, shape.size) if int(shape.parents[0, i]) == node]
        stays = chance - sum(ends[i] for i in below)
        total += stays * rounds_from(kept, shape, root + int(shape.depths[0, node]) + 1, count)
    return total


@pytest.mark.parametrize(
    "shape", [TreeShape.chain(3), spine((2, 1, 2)), branching((2, 2)), branching((1,))]
)
def test_tau_is_that_of_all_paths(shape):
    made = trace()
    rounds = sum(
        rounds_from(part, shape, 0, len(part)) for part in made.kept.split(made.roots.tolist())
    )
    assert made.tau(shape) == pytest.approx(8 / rounds, rel=1e-5)


def test_trees_beyond_what_was_traced_are_refused():
    with pytest.raises(ValueError, match=r"at most 3 levels and 2 children a node, .*got 4 and 1"):
        trace().tau(TreeShape.chain(4))


def test_chances_are_those_of_the_rule():
    """Rank by rank, and given the token: frequencies of the real code."""
    count, ranks = 40_000, 3
    torch.manual_seed(0)
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]), torch.tensor([0.1, 0.2, 0.3, 0.1, 0.3])
    rows = p.expand(count, -1), q.expand(count, -1)
    shape = spine((ranks,))
    tokens, probs = sample_siblings(rows[1][:, None], ranks, torch.rand(count, 1, 5))
    tree = DraftTree(
        torch.cat([torch.zeros(count, 1, dtype=torch.long), tokens[:, 0]], 1),
        shape,
        torch.cat([torch.zeros(count, 1, 5), probs[:, 0]], 1),
    )
    uniforms = Uniforms.from_seeds(range(count), "cpu")
    result = decide(Recursive(), tree, rows[0][:, None].expand(-1, 1 + ranks, -1), uniforms)
    node = torch.where(result.kept > 1, result.path[:, 1], 0)
    token = torch.where(node > 0, tree.tokens.gather(1, node[:, None])[:, 0], result.next_token)
    generator = torch.Generator().manual_seed(1)
    given = torch.multinomial(p, count, True, generator=generator)
    found = chances(*rows, given, ranks, generator)
    for rank in range(ranks):
        for x in range(4):
            real = float(((node == rank + 1) & (token == x)).float().mean())
            told = float((found[:, rank] * (given == x)).mean())
            assert told == pytest.approx(real, abs=0.008), (rank, x)
    assert float(found.sum(1).max()) <= 1 + 1e-5


def test_what_is_written_is_read_back(tmp_path):
    made, file = trace(), tmp_path / "a.trace"
    made.save(file)
    read = Trace.load(file)
    torch.testing.assert_close(read.kept.float(), made.kept, rtol=1e-3, atol=1e-3)
    assert read.facts == made.facts and torch.equal(read.contexts, made.contexts.int())
    assert read.tau(spine((2, 2))) == pytest.approx(made.tau(spine((2, 2))), rel=1e-3)
    first = made.kept[:, 0, 0]
    assert read.by_context() == pytest.approx(
        {12: float(first[:5].mean()), 20: float(first[5:].mean())}, rel=1e-3
    )


def test_files_that_are_no_trace(tmp_path):
    file = tmp_path / "a.trace"
    with pytest.raises(FileNotFoundError, match="there must be a trace"):
        Trace.load(file)
    file.write_bytes(b"no")
    with pytest.raises(
        ValueError, match=r"must be a trace of version 1, .* got a file that is dama"
    ):
        Trace.load(file)
    tensors = {"kept": trace().kept, "roots": trace().roots, "contexts": trace().contexts}
    told = {"format": "specmm trace", "version": "1", "facts": "{}"}
    for changes, other, said in (
        ({}, {"format": "x"}, "got other tensors"),
        ({}, {"version": "2"}, "got one of version 2"),
        ({}, {"facts": "{"}, "got one that is damaged"),
        ({"kept": 2 * torch.ones(8, 3, 2)}, {}, "got chances that are not probabilities"),
        ({"roots": torch.tensor([5, 4])}, {}, "got 8 roots, where its answers have 9"),
        ({"kept": torch.ones(8)}, {}, "got tensors of shapes"),
        ({"more": torch.ones(1)}, {}, "got one that is damaged"),
    ):
        save_file(tensors | changes, file, told | other)
        with pytest.raises(ValueError, match=said):
            Trace.load(file)


def test_costs_as_they_are_printed_and_as_they_are_stated(tmp_path):
    file = tmp_path / "costs.json"
    for written in ({"batch": 4, **COSTS}, {"batch": 4, "costs": COSTS, "candidates": []}):
        file.write_text(json.dumps(written))
        assert costs_of(file) == {4: Costs({1: 0.001, 5: 0.005}, {1: 0.01}, 0.01, 0.001)}
    for written, said in (("[]", "got none"), ('{"step": 1}', "got 'draft'"), ("{", "got ")):
        file.write_text(written)
        with pytest.raises(ValueError, match=f"costs.json must hold .*{said}"):
            costs_of(file)


def test_a_plan_without_a_model(tmp_path):
    """The faster the target verifies, the larger the tree; batches are those of the costs."""
    file, costs = tmp_path / "a.trace", tmp_path / "costs.json"
    made = trace((40, 30), 3, 2)
    made.kept[:, :, 0] += 0.9 * (1 - made.kept.sum(-1)) * (made.kept[:, :, 0] > 0)
    made.save(file)
    slow = {**COSTS, "verify": {"1": 0.01, "8": 0.2}}
    costs.write_text(json.dumps([{"batch": 1, **COSTS}, {"batch": 32, **slow}]))
    words = ("plan", "--trace", str(file), "--costs", str(costs), "--tree", "2,1")
    found = as_json(*words)
    small, large = found["plans"]
    assert small["batch"] == 1 and len(small["parents"]) > 3 and large["parents"] is None
    best = TreeShape.from_parents(small["parents"])
    assert small["tau"] == pytest.approx(made.tau(best), rel=1e-3)
    assert small["speedup"] == pytest.approx(
        small["tau"] * 0.01 / (0.001 * best.depth + 0.011), rel=1e-3
    )
    assert found["trees"]["2,1"] == pytest.approx(made.tau(spine((2, 1))), rel=1e-3)
    said = succeed(*words, "--batch", "1").stdout
    assert "tree 2,1: tau" in said and "1 at a time:" in said and "32 at" not in said
    assert "batch must be one that" in refused(*words, "--batch", "2")
    assert "give --costs FILE, or --tree" in refused("plan", "--trace", str(file))
    assert "--model does not serve traces" in refused("plan", "pocket/coder", *words[1:])
    assert "--costs does not serve" in refused("plan", "pocket/coder", "--costs", str(costs))
    assert "needs a model, or --trace FILE" in refused("plan")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["pocket/coder", "pocket/llava"])
def test_a_replayed_tree_keeps_what_a_decoded_one_does(model, tmp_path):
    """Greedy to the digit, drawn within 5%, by a file alone."""
    data = [str(chats(tmp_path, 40))] if model == "pocket/llava" else []
    case = examined(model, None, data, 12)
    case = replace(case, questions=replace(case.questions, ends=()))  # equally long answers
    prompt = case.questions.prompt
    spined, branched = spine((3, 2, 2, 1)), branching((2, 2))
    for temperature, within, shapes in ((0.0, 1e-6, (spined, branched)), (1.0, 0.05, (spined,))):
        case.trace(temperature).save(tmp_path / "a.trace")
        read = Trace.load(tmp_path / "a.trace")
        for shape in shapes:
            tokens = rounds = 0.0
            for seed in range(3 if temperature else 1):
                target = VLMTarget(case.target.model, Processor(temperature), "target")
                seeds = range(100 * seed + 50, 100 * seed + 50 + len(prompt.lengths))
                made = drafter_of(case.network, target, shape)
                *_, end = decode(
                    target,
                    made,
                    Recursive(),
                    prompt,
                    prompt.max_new_tokens,
                    Uniforms.from_seeds(seeds, target.device),
                )
                tokens, rounds = tokens + end.stats.tau, rounds + 1
            assert read.tau(shape) == pytest.approx(tokens / rounds, rel=within), shape


def test_the_command_writes_a_trace(tmp_path):
    file = tmp_path / "new" / "a.trace"
    words = ["doctor", "pocket/coder", "--questions", "2", "--trace", str(file)]
    assert "a.trace written" in succeed(*words).stderr
    read = Trace.load(file)
    assert read.facts["method"] == "block" and read.facts["temperature"] == 0
    assert len(read.facts["target"]) == 12 and len(read.facts["drafter"]) == 16
    assert pocket.POCKET.is_dir() and set(read.kept.unique().tolist()) == {0, 1}
