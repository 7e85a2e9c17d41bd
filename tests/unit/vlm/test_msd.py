"""MSD drafting on tiny models of several classes: ragged batches with pictures anywhere, exactness,
prompt slots.
"""

import pytest
import torch

from specmm.core.decode import decode, decode_plain
from specmm.core.drafter import DeferredDrafter, Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree
from specmm.hf.drafters.features import FeatureDrafter, as_chains
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.methods import MSD
from specmm.recipes.msd import build_msd, msd_config
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import branching
from specmm.verify import GreedyMatch, Recursive
from specmm.vlm.msd import MSDConfig, MSDHead
from tests.sampling import check_recorded, fits

LENGTH = 12
TREE = Dynamic(top_k=3, depth=2, total=10)
# a picture first, none, the last but one
ROWS = [["1", 5, "2", 6, 7], [1, 9, 10, 11], [1, "3", 12, 4, "4", 3]]


def drafter_of(target, tree=TREE, sampled=True, **changes):
    head = build_msd(target, msd_config(target, **changes), seed=1)
    return FeatureDrafter(head, target, tree, sampled)


def prompt_of(zoo, family, rows=ROWS):
    return VLMPrompt(zoo.batch(family, rows), LENGTH)


def run(drafter, rule, prompt, seeds):
    *_, progress = decode(drafter.target, drafter, rule, prompt, LENGTH, Uniforms.from_seeds(seeds))
    return progress.tokens[:, :LENGTH]


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen3-vl", "smolvlm"])
def test_greedy_drafting_is_plain_decoding(zoo, name):
    target = VLMTarget(zoo.model(name), Processor(0))
    *_, plain = decode_plain(target, prompt_of(zoo, name), LENGTH, Uniforms.from_seeds([0, 1, 2]))
    for tree in (TREE, branching([2, 2])):
        drafted = run(drafter_of(target, tree), GreedyMatch(), prompt_of(zoo, name), [0, 1, 2])
        assert torch.equal(drafted, plain.tokens)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_row_does_not_depend_on_its_batch(zoo, layers):
    target = VLMTarget(zoo.model("llava"), Processor(1.0))
    drafter = drafter_of(target, branching([3, 2, 1]), num_hidden_layers=layers)
    together = run(drafter, Recursive(), prompt_of(zoo, "llava"), [4, 5, 6])
    for row, seed in enumerate([4, 5, 6]):
        alone = run(drafter, Recursive(), prompt_of(zoo, "llava", ROWS[row : row + 1]), [seed])
        assert torch.equal(alone[0], together[row])


@torch.inference_mode()
def test_prompt_slots_are_those_of_a_naive_loop(zoo):
    """Position by position and row by row: pictures raw, text through fc, position 0 without a
    slot.
    """
    target = VLMTarget(zoo.model("llava"), Processor(1.0))
    drafter = drafter_of(target, branching([2]))
    prompt, token = prompt_of(zoo, "llava"), torch.tensor([3, 4, 5])
    drafter.begin(Feedback(target.prefill(prompt, 4), token), Clock())
    states = drafter.predicted
    head, context = drafter.network.run, target.context
    for row, length in enumerate(prompt.lengths.tolist()):
        slots = []
        for j in range(length):
            last = j + 1 == length
            e = head.embed_tokens(token[row]) if last else context.embeddings[row, j + 1]
            picture = not last and int(prompt.input_ids[row, j + 1]) in target.image_tokens
            slots.append(e if picture else head.fc(torch.cat([e, context.hidden[row, j]])))
        torch.testing.assert_close(
            states[row], head(torch.stack(slots)[None])[0, -1], rtol=1e-4, atol=1e-5
        )
        assert int(context.image_mask[row, :length].sum()) == int(
            (prompt.input_ids[row] == zoo.image).sum()
        )


@torch.inference_mode()
def test_recorded_distributions_are_those_drawn_from(zoo):
    target = VLMTarget(zoo.model("llava"), Processor(0.7, top_k=20))
    drafter = drafter_of(target, branching([3, 2]))
    token = torch.tensor([3, 4, 5])
    feedback = Feedback(target.prefill(prompt_of(zoo, "llava"), drafter.max_nodes), token)
    drafter.begin(feedback, Clock())
    tree = drafter.propose(feedback, Uniforms.from_seeds([0, 1, 2]))
    check_recorded(tree)


@pytest.mark.parametrize("broken", [False, True])
def test_sampling_keeps_the_distribution(zoo, broken):
    """Two tokens after a prompt with a picture, a thousand runs in one batch, against the model's
    own distribution.

    A twin that says its drafts were drawn uniformly is found out.
    """
    small, rows, runs = zoo.of_vocabulary(8), [[1, "1", 3, 4]], 1000
    target = VLMTarget(small.model("llava"), Processor(0.9, top_p=0.95))
    probs = target.prefill(VLMPrompt(small.batch("llava", rows), 3), 0).probs[0, -1]
    joint = torch.cat([probs[a] * first_step(small, rows, a) for a in range(8)])
    drafter = drafter_of(target, branching([2, 1]))
    if broken:
        propose = drafter.propose
        drafter.propose = lambda *args: mistaken(propose(*args))
    prompt = VLMPrompt(small.batch("llava", rows * runs), 3)
    *_, progress = decode(target, drafter, Recursive(), prompt, 2, Uniforms.from_seeds(range(runs)))
    assert fits(joint, progress.tokens[:, :2]) != broken


def mistaken(tree):
    return DraftTree(tree.tokens, tree.shape, torch.full_like(tree.probs, 1 / 8))


def first_step(small, rows, token):
    target = VLMTarget(small.model("llava"), Processor(0.9, top_p=0.95))
    target.prefill(VLMPrompt(small.batch("llava", rows), 3), 0)
    return target.step(torch.tensor([token])).probs[0, 0]


def test_misfits_are_named(zoo):
    target = VLMTarget(zoo.model("llava"), Processor(1.0))
    config = msd_config(target)
    for changes, message in (
        ({"hidden_size": 64}, "target's width 32, got 64"),
        ({"vocab_size": 50}, "target's vocabulary 40, got 50"),
    ):
        with pytest.raises(ValueError, match=message):
            drafter_of_config(target, MSDConfig(**{**vars(config), **changes}))
    with pytest.raises(ValueError, match="at most 40 children a node"):
        drafter_of(target, Dynamic(41, 1, 20))
    with pytest.raises(ValueError, match="total must be in"):
        Dynamic(2, 1, 90)
    with pytest.raises(ValueError, match="heads must divide the width"):
        msd_config(target, num_attention_heads=5)
    with pytest.raises(ValueError, match="must give vocab_size"):
        MSDConfig.from_json({"hidden_size": 4})
    with pytest.raises(ValueError, match="plain rotary positions"):
        MSDConfig.from_json({**vars(config), "rope_scaling": {"type": "yarn"}})


def drafter_of_config(target, config):
    return FeatureDrafter(MSDHead(config), target)


@pytest.mark.parametrize(
    ("given", "chains"),
    [
        (MSD(), MSD(top_k=1, total=7)),
        (MSD(depth=2), MSD(top_k=1, depth=2, total=4)),
        (MSD(sampled=True), MSD(sampled=True, tree=(1, 1, 1, 1, 1))),
        (MSD(sampled=True, tree="chain(3)"), None),
        (MSD(sampled=True, tree=(2, 1)), None),
        (MSD(top_k=1, total=4, depth=2), None),
    ],
)
def test_default_trees_become_chains_and_the_log_says_so(given, chains, caplog):
    with caplog.at_level("INFO"):
        assert as_chains(given) == (chains or given)
    assert ("take chains" in caplog.text) == (chains is not None)


def test_a_late_drafter_never_begins_for_an_answer_of_two_tokens(zoo):
    target = VLMTarget(zoo.model("llava"), Processor(0.0))
    early = drafter_of(target, branching([2, 1]))
    prompt, began = prompt_of(zoo, "llava"), []

    class Watched(FeatureDrafter):
        def begin(self, feedback, clock):
            began.append(1)
            super().begin(feedback, clock)

    late = DeferredDrafter(Watched(early.network.run, target, branching([2, 1])))
    for length, begins in ((2, 0), (9, 1)):
        tokens = []
        for drafter in (early, late):
            began.clear()
            *_, progress = decode(
                target, drafter, Recursive(), prompt, length, Uniforms.from_seeds([1, 2, 3])
            )
            tokens.append(progress.tokens[:, :length])
        assert torch.equal(*tokens) and len(began) == begins
