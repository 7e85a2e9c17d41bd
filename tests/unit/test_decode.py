"""The loop with real (tiny, random) transformers and every drafter: greedy, ragged batches, exact
distributions, failures.

Shape letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from specmm.core.decode import decode, decode_plain, first_token
from specmm.core.drafter import Feedback, check_rule
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.tree import TreeShape
from specmm.extending.outside import OutsideDrafter
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockDrafter, BlockHead
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleDrafter, EagleHead
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import branching
from specmm.verify import Block, Lantern, PointMass, Recursive, Traversal, Typical, neighbour_table
from tests import sampling
from tests.sampling import Stream, last
from tests.tiny.parts import random_weights

SMALL = GPTConfig(
    dim=32, n_layer=2, n_head=2, vocab_size=24, block_size=25, num_classes=5, multiple_of=8
)
CAPTIONED = replace(SMALL, model_type="t2i", cls_token_num=4, caption_dim=6)
TINY = GPTConfig(
    dim=16, n_layer=1, n_head=2, vocab_size=3, block_size=9, num_classes=3, multiple_of=8
)


def target_of(config, processor, guidance=None):
    model = random_weights(Transformer(config), seed=3, std=0.8 if config is TINY else 0.35)
    return LlamaGenTarget(model, guidance or Guidance(), processor)


def eagle(target, tree, sampled=False):
    return EagleDrafter(
        random_weights(EagleHead(EagleConfig(target.model.config)), 1), target, tree, sampled
    )


def block(target, tree, sampled=False, rejected_weight=0.0):
    head = random_weights(BlockHead(BlockConfig(3, 2, target.model.config)), 1)
    return BlockDrafter(head, target, tree, sampled, rejected_weight)


# levels are not numbered one after the other
LOPSIDED = TreeShape.from_parents([-1, 0, 0, 1, 0, 1, 3, 2])
DRAFTERS = {
    "block": lambda target: block(target, branching([2, 2, 1])),
    "block drawn": lambda target: block(target, branching([2, 2, 1]), sampled=True),
    "block, rejected_weight": lambda target: block(
        target, branching([2, 2, 1]), sampled=True, rejected_weight=0.4
    ),
    "eagle static": lambda target: eagle(target, LOPSIDED),
    "eagle drawn": lambda target: eagle(target, LOPSIDED, sampled=True),
    "eagle dynamic": lambda target: eagle(target, Dynamic(3, 2, 9)),
    "eagle one level": lambda target: eagle(target, Dynamic(3, 0, 4)),
    "jacobi": lambda target: JacobiDrafter(target, 3),
    **{
        f"jacobi, {init}": partial(JacobiDrafter, window=7, init=init)
        for init in ("left", "above", "random")
    },
    **{
        f"jacobi, {init}, coupled": partial(JacobiDrafter, window=7, init=init, coupled=True)
        for init in ("last", "above")
    },
}
every_drafter = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)


def prompt_of(config, rows):
    """A batch of ``rows`` (numbers): the same number is the same condition, padded by as many
    positions.
    """
    if config.model_type == "c2i":
        return Prompt(torch.tensor(rows))
    features = torch.stack(
        [torch.randn(4, 6, generator=torch.Generator().manual_seed(r)) for r in rows]
    )
    mask = torch.stack([torch.arange(4) >= r % 4 for r in rows])
    return Prompt(features * mask[..., None], mask)


SETTINGS = {
    "plain": (SMALL, Guidance()),
    "guided": (SMALL, Guidance(3.0)),
    "guided at first": (SMALL, Guidance(3.0, 6)),
    "captions": (CAPTIONED, Guidance(2.0)),
}


@every_drafter
@pytest.mark.parametrize(("config", "guidance"), SETTINGS.values(), ids=SETTINGS)
def test_greedy_decoding_is_plain_decoding(make, config, guidance):
    target = target_of(config, Processor(0), guidance)
    prompt = prompt_of(config, [0, 1, 2])
    seeds = [0, 1, 2]
    length = target.length
    plain = last(decode_plain(target, prompt, length, Uniforms.from_seeds(seeds)))
    uniforms = Uniforms.from_seeds(seeds)
    end = last(decode(target, make(target), Recursive(), prompt, length, uniforms))
    assert torch.equal(end.tokens[:, : target.length], plain.tokens)
    assert end.counts.tolist() == [target.length] * 3
    kept = sum((i + 1) * n for i, n in enumerate(end.stats.kept))
    assert end.stats.tokens == 3 * target.length == 3 + kept
    assert end.stats.rounds == sum(end.stats.kept) <= 3 * end.stats.batch_rounds


@every_drafter
@pytest.mark.parametrize("config", [SMALL, CAPTIONED], ids=["classes", "captions"])
def test_a_row_does_not_depend_on_its_batch(make, config):
    target = target_of(config, Processor(1.0, top_k=8), Guidance(2.0))
    rows = [3, 1, 4, 1, 2]
    seeds = [7, 8, 9, 10, 11]
    drafter = make(target)

    def tokens(rows, seeds):
        prompt, uniforms = prompt_of(config, rows), Uniforms.from_seeds(seeds)
        return last(decode(target, drafter, Recursive(), prompt, 16, uniforms)).tokens[:, :16]

    together = tokens(rows, seeds)
    assert len(together.unique(dim=0)) == 5
    for i in (0, 3, 4):
        assert torch.equal(tokens(rows[i : i + 1], seeds[i : i + 1])[0], together[i])


LENGTH, SAMPLES = 6, 3000


@torch.inference_mode()
def exact_probs(target):
    """Probability of every sequence of LENGTH tokens for class 1, by enumeration, [V ** LENGTH]
    float64.
    """
    sequences = torch.tensor(list(itertools.product(range(TINY.vocab_size), repeat=LENGTH)))
    classes = torch.full((len(sequences),), 1)
    model, guidance = target.model, target.guidance
    cond, uncond = (
        model(model.embed(c, sequences[:, :-1]))[0]
        for c in (classes, torch.full_like(classes, TINY.num_classes))
    )
    probs = target.processor(uncond + guidance.scale * (cond - uncond)).double()
    return probs.gather(-1, sequences[..., None])[..., 0].prod(-1)


def p_value(target, drafter, rule):
    """Of the chi-square test of SAMPLES decoded sequences against the exact distribution; rare
    sequences count as one.
    """
    prompt = Prompt(torch.full((SAMPLES,), 1))
    tokens = last(decode(target, drafter, rule, prompt, LENGTH, Stream(SAMPLES, 5))).tokens
    tokens = tokens[:, :LENGTH]
    cell = (tokens * TINY.vocab_size ** torch.arange(LENGTH).flip(0)).sum(1)
    return sampling.p_value(exact_probs(target), cell)


class Misreported:
    """A drafter whose trees say something else about how they were drawn."""

    def __init__(self, drafter, probs):
        self.drafter, self.probs, self.begin = drafter, probs, drafter.begin
        self.max_nodes, self.max_depth = drafter.max_nodes, drafter.max_depth

    def propose(self, feedback, uniforms):
        tree = self.drafter.propose(feedback, uniforms)
        return replace(tree, probs=self.probs(tree.probs))


DRAWN = {
    "block": lambda target: block(target, branching([2, 1]), sampled=True),
    "block, rejected_weight": lambda target: block(
        target, branching([2, 1]), sampled=True, rejected_weight=0.5
    ),
    "eagle": lambda target: eagle(target, branching([2, 1]), sampled=True),
    "jacobi": lambda target: JacobiDrafter(target, 2),
    **{
        f"jacobi, {init}": partial(JacobiDrafter, window=4, init=init)
        for init in ("left", "above", "random")
    },
    **{
        f"jacobi, {init}, coupled": partial(JacobiDrafter, window=4, init=init, coupled=True)
        for init in ("last", "left", "above", "random")
    },
}
WAYS = {
    "plain": (Processor(), Guidance()),
    "guided, top 2": (Processor(0.9, top_k=2), Guidance(1.6)),
}


@pytest.mark.parametrize(("processor", "guidance"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", DRAWN.values(), ids=DRAWN)
def test_drawn_drafts_keep_the_distribution(make, processor, guidance):
    target = target_of(TINY, processor, guidance)
    assert p_value(target, make(target), Recursive()) > 1e-3


# a later parent has more children than an earlier one
UNEVEN = TreeShape.from_parents([-1, 0, 0, 1, 2, 2, 4, 5, 5])


@pytest.mark.parametrize("make", [eagle, block], ids=["eagle", "block"])
def test_every_node_records_the_distribution_it_was_drawn_from(make):
    """Where not every child that is drawn has a place: earlier siblings have no mass, the token has
    some, and all is 1.
    """
    target = target_of(SMALL, Processor(0.8, top_k=6))
    drafter, token = make(target, UNEVEN, sampled=True), torch.tensor([3, 7])
    feedback = Feedback(target.prefill(Prompt(torch.tensor([1, 2])), UNEVEN.size), token)
    drafter.begin(feedback, Clock())
    with torch.inference_mode():
        tree = drafter.propose(feedback, Uniforms.from_seeds([0, 1]))
    torch.testing.assert_close(tree.probs[:, 1:].sum(-1), torch.ones(2, UNEVEN.size - 1))
    # [B, N, N], of each in each's distribution
    mass = tree.probs.gather(2, tree.tokens[:, None].expand(-1, UNEVEN.size, -1))
    assert bool((mass.diagonal(dim1=1, dim2=2)[:, 1:] > 0).all())
    assert float(mass[UNEVEN.earlier_siblings.expand(2, -1, -1)].sum()) == 0


LIES = {
    "flat": lambda probs: torch.full_like(probs, 1 / probs.shape[-1]),
    "rolled": lambda probs: probs.roll(1, -1),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("make", DRAWN.values(), ids=DRAWN)
def test_a_wrong_recorded_distribution_is_noticed(make, lie):
    target = target_of(TINY, Processor())
    assert p_value(target, Misreported(make(target), lie), Recursive()) < 1e-6


@pytest.mark.parametrize("rule", [Block(), Traversal(), PointMass()], ids=lambda rule: rule.name)
def test_other_exact_rules_keep_the_distribution_of_a_chain(rule):
    target = target_of(TINY, Processor())
    assert p_value(target, JacobiDrafter(target, 3), rule) > 1e-3


class Silent(Recursive):
    """A rule of others, which does not say whether it looks ahead."""


class Outspoken(Silent):
    """One that says it does not."""

    bottom_up = False


@pytest.mark.parametrize("outside", [False, True], ids=["ours", "of others"])
@pytest.mark.parametrize("rule", [Block(), Traversal(), Silent()], ids=lambda rule: rule.name)
def test_coupled_drafts_and_rules_that_look_ahead_are_refused(rule, outside):
    """For what they would draw: see tests/unit/verify/test_jacobi.py."""
    target = target_of(TINY, Processor())
    drafter = JacobiDrafter(target, 3, coupled=True)
    if outside:
        drafter = OutsideDrafter(drafter, "mine", "somebody")
    steps = decode(target, drafter, rule, Prompt(torch.tensor([1])), LENGTH, Stream(1, 0))
    with pytest.raises(ValueError, match=rf"^coupled drafts need a rule .*, got {rule.name}, .*$"):
        next(steps)
    check_rule(drafter, Recursive())
    check_rule(drafter, Outspoken())


def test_rejected_weight_keeps_the_distribution_under_a_rule_that_looks_at_every_draft():
    target = target_of(TINY, Processor())
    drafter = block(target, branching([2, 1, 1]), sampled=True, rejected_weight=0.5)
    assert p_value(target, drafter, Traversal()) > 1e-3


@pytest.mark.parametrize(
    "make", [lambda t: eagle(t, Dynamic(2, 1, 5)), lambda t: block(t, branching([2, 1]))]
)
def test_chosen_drafts_keep_the_distribution(make):
    target = target_of(TINY, Processor())
    assert p_value(target, make(target), PointMass()) > 1e-3


def test_the_first_token_obeys_the_rule():
    probs = torch.tensor([[[0.2, 0.5, 0.3]]])
    greedy = Lantern(neighbour_table(torch.randn(3, 2), 2), 1, 0.1, greedy=True)
    for rule, wanted in ((Recursive(), {0, 1, 2}), (greedy, {1})):
        numbers = [Uniforms.from_seeds([seed]).draw(1)[:, 0] for seed in range(20)]
        assert {int(first_token(rule, probs, number)) for number in numbers} == wanted


@pytest.mark.parametrize("length", [2, 3, 9])
def test_every_round_of_a_relaxed_rule_is_measured(length):
    """What is printed of a short run is not that of its first round, nor of every eighth."""
    target = target_of(TINY, Processor())
    drafter = block(target, branching([2, 1]), sampled=True)
    end = last(
        decode(target, drafter, Typical(), Prompt(torch.full((5,), 1)), length, Stream(5, 0))
    )
    assert float(end.measured) == end.stats.tokens - 5 == 5 * (length - 1)


def test_a_round_cut_short_counts_the_excess_of_what_it_kept():
    """Two tokens of a chain of three drafts: only what the rule emits after the root is in the
    text.
    """
    target, seen = target_of(TINY, Processor()), []
    rule = Lantern(
        neighbour_table(torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), 2), 1, 0.9
    )

    class Watched:
        name, exact = rule.name, rule.exact

        def decisions(self, tree, p, *, measure=False):
            found = rule.decisions(tree, p, measure=measure)
            seen.append(found.excess)
            return found

    prompt = Prompt(torch.full((200,), 1))
    drafter = block(target, branching([1, 1, 1]), sampled=True)
    end = last(decode(target, drafter, Watched(), prompt, 2, Stream(200, 0)))
    measured = [excess for excess in seen if excess is not None]
    assert end.stats.rounds == 200 == float(end.measured) and len(measured) == 1
    assert float(end.excess) == pytest.approx(float(measured[0][:, 0].sum()), rel=1e-5)
    assert measured[0][:, 1:].sum() > 0


def drafted_by_jacobi(target, length):
    prompt, drafter = Prompt(torch.tensor([1])), JacobiDrafter(target, 3)
    return last(decode(target, drafter, Recursive(), prompt, length, Stream(1, 0)))


def test_one_token_needs_no_round():
    target = target_of(SMALL, Processor())
    end = drafted_by_jacobi(target, 1)
    assert end.counts.tolist() == [1] and end.stats.rounds == 0
    assert end.stats.tokens == 1 and end.stats.tau == 0 and end.stats.taus == [0]


@pytest.mark.parametrize(
    ("name", "number"), [("cls_embedding.embedding_table.weight", 0), ("tok_embeddings.weight", 1)]
)
def test_broken_weights_name_round_and_model(name, number):
    target = target_of(SMALL, Processor())
    nn.init.constant_(target.model.get_parameter(name), float("nan"))
    with pytest.raises(ValueError, match=rf"NaN or infinity from llamagen in round {number}"):
        drafted_by_jacobi(target, 9)


@pytest.mark.parametrize("tree", [TreeShape.chain(3), branching([2, 2, 1])])
@pytest.mark.parametrize("rejected_weight", [0.0, 0.4])
def test_a_broken_drafter_stops_the_run_instead_of_spoiling_it(tree, rejected_weight):
    target = target_of(SMALL, Processor())
    drafter = block(target, tree, sampled=True, rejected_weight=rejected_weight)
    nn.init.constant_(drafter.head.previous.weight, float("nan"))
    said = "NaN or infinity from the drafter in round 1, check its weights"
    with pytest.raises(ValueError, match=said):
        last(decode(target, drafter, Traversal(), Prompt(torch.tensor([1])), 9, Stream(1, 0)))


def test_drafts_that_are_chosen_may_come_from_anywhere():
    """Point masses have no distributions a rule would ask: even of NaN, and exact."""
    target = target_of(SMALL, Processor(temperature=0))
    drafter = block(target, TreeShape.chain(3))
    nn.init.constant_(drafter.head.previous.weight, float("nan"))
    prompt = Prompt(torch.tensor([1]))
    drafted = last(decode(target, drafter, PointMass(), prompt, 25, Stream(1, 0))).tokens[:, :25]
    assert torch.equal(drafted, last(decode_plain(target, prompt, 25, Stream(1, 0))).tokens)
