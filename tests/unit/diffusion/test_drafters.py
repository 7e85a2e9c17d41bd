"""Block drafters in the loop: token equal when greedy, rows by themselves, what mistakes say.

Shape letters: V vocabulary.
"""

import json

import pytest
import torch

from specmm.core.decode import decode
from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.tree import TreeShape
from specmm.diffusion_drafters.block_drafters import ChainDrafter, DrawnTreeDrafter, TreeDrafter
from specmm.diffusion_drafters.diffusion_chains import DiffuSpecDrafter, StepsDrafter
from specmm.diffusion_drafters.models.dflash import DFlash, load_dflash, save_dflash
from specmm.diffusion_drafters.models.dflash_config import DFlashConfig
from specmm.diffusion_drafters.models.masked import block_logits
from specmm.diffusion_drafters.sources import DFlashSource, DiffusionSource
from specmm.hf.drafters.translation import Translation
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.verify import Block as BlockVerification
from specmm.verify import Recursive, Traversal
from tests.cases import some
from tests.unit.diffusion.conftest import (
    BUSH,
    DRAFTERS,
    FAST,
    LENGTH,
    ROWS,
    V,
    dflash,
    dream,
    paired,
    proxy,
    run,
    searching,
    target_model,
)


@pytest.mark.parametrize("name", some(DRAFTERS, FAST))
def test_greedy_decoding_is_plain_decoding(name):
    plain = run(None, Processor(0), Uniforms.from_seeds([0, 1, 2]))
    end = run(DRAFTERS[name], Processor(0), Uniforms.from_seeds([0, 1, 2]))
    assert torch.equal(end.tokens[:, :LENGTH], plain.tokens)


@torch.inference_mode()
@pytest.mark.parametrize("recurrent", [0, 6], ids=["pairs", "memory"])
def test_every_node_of_a_drawn_tree_records_the_distribution_it_was_drawn_from(recurrent):
    """Also where not every child that is drawn has a place, and levels whose nodes have different
    grandparents.
    """
    shape = TreeShape.from_parents([-1, 0, 0, 1, 2, 2, 3, 5, 5])
    target = VLMTarget(target_model(V), Processor(1.0), "tiny")
    source = DFlashSource(paired(V, None, recurrent), target)
    drafter, token = DrawnTreeDrafter(source, target, shape), torch.tensor([3, 4, 5])
    output = target.prefill(VLMPrompt(padded(ROWS, "cpu"), LENGTH), shape.size)
    drafter.begin(feedback := Feedback(output, token), Clock())
    blocks, inner = [], source.logits
    source.logits = lambda *given: blocks.append(inner(*given)) or blocks[-1]
    tree, [block] = drafter.propose(feedback, Uniforms.from_seeds([0, 1, 2])), blocks
    memories = {0: None}
    for node, parent in enumerate(shape.parents[0].tolist()[1:], start=1):
        place, before = block[:, int(shape.depths[0, parent])], tree.tokens[:, parent]
        scores, memories[node] = source.next_logits(place, before, memories[parent])
        probs = drafter.probs(scores)
        for earlier in shape.earlier_siblings[0, node].nonzero()[:, 0].tolist():
            probs = probs.scatter(1, tree.tokens[:, earlier, None], 0.0)
        torch.testing.assert_close(tree.probs[:, node], probs / probs.sum(-1, keepdim=True))
        assert bool((tree.probs[:, node].gather(1, tree.tokens[:, node, None]) > 0).all())


def test_some_drafts_are_kept():
    for name in ("chain of dream", "tree of dream", "diffuspec"):
        assert run(DRAFTERS[name], Processor(0), Uniforms.from_seeds([0, 1, 2])).stats.tau > 1, name


BATCHED = ["tree of pairs", "drawn tree of pairs", "recalling chain", "tree of deer"]
BATCHED += [f"chain of {name}" for name in ("mdlm", "dflash", "pairs", "few tokens", "deer")]


@pytest.mark.parametrize("name", [*BATCHED, "steps of dream", "diffuspec"])
def test_a_row_does_not_depend_on_its_batch(name):
    processor, make = Processor(1.0, top_k=8), DRAFTERS[name]
    together = run(make, processor, Uniforms.from_seeds([0, 1, 2]))
    for i, row in enumerate(ROWS):
        alone = run(make, processor, Uniforms.from_seeds([i]), [row])
        assert torch.equal(alone.tokens[0, :LENGTH], together.tokens[i, :LENGTH])


def test_what_stood_before_is_recalled():
    seen = []

    def make(target):
        drafter = DRAFTERS["recalling chain"](target)
        propose = drafter.propose
        drafter.propose = lambda *given: seen.append(propose(*given)) or seen[-1]
        return drafter

    prompt = list(range(3, 17))
    run(make, Processor(1.0), Uniforms.from_seeds(range(8)), [prompt] * 8, V, 6)
    first, surest = seen[0], seen[0].probs[:, 1:].max(-1).values  # [B, K]
    assert first.probs.shape[1] == 5 and first.probs[:, 1:].sum(-1).allclose(torch.ones(8, 4))
    roots = first.tokens[:, 0].tolist()
    known = [row for row, root in enumerate(roots) if root in prompt[:-4]]
    assert known and not set(roots) <= set(prompt)
    for row, root in enumerate(roots):
        if row in known:
            assert first.tokens[row].tolist() == list(range(root, root + 5))
            assert bool((surest[row] == 1).all())
        elif root not in prompt:
            assert bool((surest[row] < 1).all())


def test_the_controller_hears_of_every_round():
    seen = []

    def make(target):
        seen.append(DRAFTERS["diffuspec"](target))
        return seen[0]

    end = run(make, Processor(0), Uniforms.from_seeds([0]), ROWS[:1])
    trace = seen[0].rows[0].trace
    assert len(trace) == end.stats.rounds - 1  # the last round needs no further draft
    assert all(0 <= accepted <= generated <= 5 for generated, accepted in trace)
    assert 2 <= seen[0].rows[0].control.length <= 5


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS])
def test_filler_is_not_counted_as_drafted(rows):
    asked = []

    def make(target):
        drafter = searching(target, most=6, step=0)
        propose = drafter.propose

        def listen(*given):
            tree = propose(*given)
            asked.append(max(row.control.length for row in drafter.rows))
            assert tree.shape.depth == 6  # a row's uniforms do not depend on the others
            return tree

        drafter.propose = listen
        return drafter

    end = run(make, Processor(1.0), Uniforms.from_seeds(range(len(rows))), rows, length=40)
    assert min(asked) < 6 and len(asked) == len(end.stats.depths)
    assert all(depth <= most for depth, most in zip(end.stats.depths, asked, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: ChainDrafter(DFlashSource(dflash(V), t), t, 5), "drafter's 4, got 5"),
        (
            lambda t: ChainDrafter(DFlashSource(dflash(V), t), t, recall=-1),
            "recall must be at least 0 tokens, got -1",
        ),
        (lambda t: ChainDrafter(DiffusionSource(dream(V), t), t), "got None"),
        (lambda t: TreeDrafter(DFlashSource(dflash(V), t), t, 1), "at least 2 nodes"),
        (
            lambda t: DrawnTreeDrafter(DFlashSource(dflash(V), t), t, TreeShape.chain(5)),
            "drafter's 4, got 5",
        ),
        (
            lambda t: DrawnTreeDrafter(DFlashSource(paired(V, [4, 1]), t), t, BUSH),
            "at most 2 children a node, got 3",
        ),
        (lambda t: StepsDrafter(DiffusionSource(dream(V), t), t, 1), "at least 2, a draft of each"),
        (lambda t: DiffuSpecDrafter(DiffusionSource(dream(V), t), proxy(V), least=0), "least"),
        (lambda t: DiffusionSource(dream(V + 600), t), "share the target's vocabulary"),
        (
            lambda t: DFlashSource(DFlash(DFlashConfig(dflash(V).config.sizes, 5, 1, (0, 4))), t),
            r"some of the target's 4 layers, got \[0, 4\] counted from 0",
        ),
        (lambda t: DFlashSource(dflash(V + 9), t), "mask among its 30"),
        (
            lambda t: DFlashSource(paired(V - 1), t),
            "must be of the target's 30 tokens, got one of 29",
        ),
        (lambda t: paired(V, [1, 1, 2]), "d2t must name 3 different tokens"),
        (lambda t: paired(V, [1, V]), r"tokens in \[0, 30\)"),
        (
            lambda t: DFlashConfig(dflash(V).config.sizes, 5, 1, (0,), V + 1),
            "draft_vocab_size must be 0 to",
        ),
        (
            lambda t: DFlashConfig(dflash(V).config.sizes, 5, 1, (0,), 0, -1),
            "at least 0, got -1 and 0",
        ),
        (
            lambda t: DFlashConfig(dflash(V).config.sizes, 5, 1, (0,), 0, 0, -1),
            "at least 0, got 0 and -1",
        ),
        (
            lambda t: run(DRAFTERS["chain of dream"], Processor(), None, [[1]], V, 200),
            "128 positions",
        ),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make(VLMTarget(target_model(V), Processor(), "tiny"))


def test_later_steps_read_earlier_drafts():
    target = VLMTarget(target_model(V), Processor(0), "tiny")
    source, prompt = DiffusionSource(dream(V), target), VLMPrompt(padded(ROWS, "cpu"), LENGTH)
    target.prefill(prompt, 8)
    feedback = Feedback(None, torch.tensor([1, 2, 3]))
    source.begin(feedback, 4)
    drafted = torch.tensor([[5, 6], [7, 8], [9, 4]])
    together = source.logits_after(drafted, 3)
    for row, tokens in enumerate(ROWS):
        whole = torch.tensor([[*tokens, row + 1, *drafted[row].tolist()]])
        torch.testing.assert_close(
            together[row], block_logits(source.model, whole, 3)[0, :, :V], rtol=0, atol=1e-4
        )


def test_a_drafter_of_other_tokens_drafts_shared_ones_only():
    model, order = dream(V), torch.randperm(V, generator=torch.Generator().manual_seed(2))
    shared = torch.arange(V) % 3 > 0
    target = VLMTarget(target_model(V), Processor(), "tiny")
    # what it does not know must not look like a mask to it either
    ids = order.where(shared, model.mask)
    source = DiffusionSource(model, target, Translation(ids, shared))
    target.prefill(VLMPrompt(padded(ROWS[:1], "cpu"), LENGTH), 8)
    source.begin(feedback := Feedback(None, torch.tensor([4])), 4)
    logits = source.logits(feedback, 4)
    read = [int(order[t]) if t % 3 else 0 for t in [*ROWS[0], 4]]
    assert torch.equal(torch.isfinite(logits), shared.expand_as(logits))
    wanted = block_logits(model, torch.tensor([read]), 4)
    assert torch.equal(logits[..., shared], wanted[..., order[shared]])


def test_the_end_of_a_text_is_the_targets_own():
    target = VLMTarget(target_model(V), Processor(), "tiny")
    assert DiffusionSource(dream(V), target).end == 2
    shifted = Translation((torch.arange(V) + 1) % V, torch.ones(V, dtype=torch.bool))
    assert DiffusionSource(dream(V), target, shifted).end == 1
    unknown = Translation(torch.arange(V), torch.arange(V) != 2)
    assert DiffusionSource(dream(V), target, unknown).end is None


@torch.inference_mode()
@pytest.mark.parametrize("known", [None, [4, V - 1, 2]])
@pytest.mark.parametrize("recurrent", [0, 6])
def test_a_mask_is_never_drafted(known, recurrent):
    target = VLMTarget(target_model(V), Processor(), "tiny")
    source = DFlashSource(paired(V, known, recurrent), target)  # its mask is V - 1
    output = target.prefill(VLMPrompt(padded(ROWS[:1], "cpu"), 8), 5)
    feedback = Feedback(output, torch.tensor([4]))
    source.begin(feedback, 4)
    logits, _ = source.next_logits(source.logits(feedback, 4), torch.tensor([[4, 2, 4, 2]]), None)
    mask = V - 1 if known is None else 1
    assert bool((logits[..., mask] == float("-inf")).all())
    assert int(logits.isinf().sum()) == 4


def test_hooks_go_with_their_drafter():
    target = VLMTarget(target_model(V), Processor(), "tiny")
    source = DFlashSource(dflash(V), target)
    layer = target.family.decoder.layers[0]
    assert len(layer._forward_hooks) == 1
    del source, target
    assert not layer._forward_hooks


def test_a_drafter_of_few_tokens_is_read_back(tmp_path):
    drafter = paired(V, [7, 1, 22], recurrent=6)
    save_dflash(drafter, tmp_path, torch.randn(V, 32), torch.float32)
    found = load_dflash(tmp_path)
    assert found.ids.tolist() == [7, 1, 22] and found.config == drafter.config
    assert torch.equal(found.t2d, drafter.t2d) and found.t2d[22] == 2 and found.t2d[0] == 3
    previous = torch.tensor([7, 0])
    assert torch.equal(found.pairs(previous), drafter.pairs(previous))
    assert torch.equal(found.recurrent.out.weight, drafter.recurrent.out.weight)


@pytest.mark.parametrize("kind", ["chain", "drawn tree", "likeliest tree"])
def test_memories_draft_in_half_precision(kind):
    target = VLMTarget(target_model(V).bfloat16(), Processor(1.0), "tiny")
    source = DFlashSource(paired(V, None, 6).bfloat16(), target)
    drafter, rule = {
        "chain": (ChainDrafter(source, target), BlockVerification()),
        "drawn tree": (DrawnTreeDrafter(source, target, BUSH), Traversal()),
        "likeliest tree": (TreeDrafter(source, target, 7), Recursive()),
    }[kind]
    prompt = VLMPrompt(padded(ROWS, "cpu"), LENGTH)
    *_, end = decode(target, drafter, rule, prompt, LENGTH, Uniforms.from_seeds([0, 1, 2]))
    assert end.counts.tolist() == [LENGTH] * 3


@pytest.mark.parametrize("key", ["block_size", "markov_rank", "recurrent_size"])
def test_sizes_of_a_file_are_whole_numbers(tmp_path, key):
    save_dflash(paired(V, None, 6), tmp_path, torch.randn(V, 32), torch.float32)
    facts = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | {key: "5"}))
    with pytest.raises(ValueError, match=f"must give whole numbers, got {key} '5'"):
        load_dflash(tmp_path)
