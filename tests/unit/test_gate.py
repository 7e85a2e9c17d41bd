"""Chains that end where the block drafter is unsure: exact, the same drafts, and only alone.

Shape letters: R rows, one per draw; D drafts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specmm import methods
from specmm.autotune import Chain, Costs, Plan, plan_chains
from specmm.cache import Cache
from specmm.decode import decode, decode_plain
from specmm.guidance import Guidance
from specmm.image_ar.tokens.assemble import PictureParts, assemble
from specmm.image_ar.tokens.choosing import SURE as SURE_OF_AUTO
from specmm.image_ar.tokens.choosing import method_of, planned_for
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockDrafter, BlockHead
from specmm.image_ar.tokens.drafters.gate import Gate, ends
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.recipes.training.block_drafter import block_loss, measure_chains
from specmm.recipes.training.llamagen_drafters import seen_by
from specmm.tree import DraftTree, TreeShape
from specmm.verify import Recursive
from specmm.verify.exhaustive import Draws, draws, emitted_probs, sequence_probs, total_variation
from specmm.verify.rule import Rule, make_rule

V, D = 3, 4
SURE = 0.5
SHARP = 7.0
GPT = GPTConfig(
    dim=32, n_layer=2, n_head=2, vocab_size=20, block_size=36, num_classes=3, multiple_of=16
)
PICTURE = 36


def tables(seed: int) -> list[Tensor]:
    """Distributions of the next token after every prefix, from almost sure to unsure."""
    generator = torch.Generator().manual_seed(seed)
    kind = dict(generator=generator, dtype=torch.float64)
    sharp = [8 * torch.rand(V**d, 1, **kind) for d in range(D + 1)]
    return [(scale * torch.randn(len(scale), V, **kind)).softmax(-1) for scale in sharp]


def by_the_gate(drawn: Draws, row: int) -> int:
    """How many drafts of ``row`` the gate lets through."""
    assert drawn.tree.probs is not None
    gate = Gate(TreeShape.chain(D), SURE)
    gate.open()
    for depth, dist in enumerate(drawn.tree.probs[row, 1:]):
        if gate.shuts(dist[None, None], depth):
            return depth
    return D


def by_the_draft(drawn: Draws, row: int) -> int:
    """As a gate that looks at a draft and then throws it away."""
    assert drawn.tree.probs is not None
    for depth in ends(D)[:-1]:
        if drawn.tree.probs[row, depth + 1, drawn.tree.tokens[row, depth + 1]] < SURE:
            return depth
    return D


def emitted(rule: Rule, target: list[Tensor], length_of: Callable[[Draws, int], int]) -> Tensor:
    """The distribution [V**(D + 1)] of the first tokens, of chains cut by ``length_of``."""
    drawn = draws(TreeShape.chain(D), tables(4), "independent")
    lengths = torch.tensor([length_of(drawn, row) for row in range(len(drawn.chance))])
    assert sorted(set(lengths.tolist())) == list(ends(D))  # all lengths occur
    total = torch.zeros(V ** (D + 1), dtype=torch.float64)
    for length in ends(D):
        rows = lengths == length
        nodes = length + 1
        assert drawn.tree.probs is not None
        tree = DraftTree(
            drawn.tree.tokens[rows, :nodes], TreeShape.chain(length), drawn.tree.probs[rows, :nodes]
        )
        part = Draws(tree, drawn.chance[rows], drawn.prefix[rows, :nodes])
        found = emitted_probs(rule, part, target)
        for depth in range(nodes, D + 1):  # tokens after the round's own are the target's
            found = (found[:, None] * target[depth]).flatten()
        total += found
    return total


@pytest.mark.parametrize("name", ["recursive", "traversal", "block"])
def test_enumerated_it_keeps_the_targets_law(name: str) -> None:
    target = tables(2)
    wanted = sequence_probs(target, D + 1)
    assert total_variation(emitted(make_rule(name), target, by_the_gate), wanted) < 1e-12
    assert total_variation(emitted(make_rule(name), target, by_the_draft), wanted) > 1e-3


def parts() -> tuple[LlamaGenTarget, BlockHead]:
    """A model and a drafter of large weights, so that it is sure at some places only."""
    generator = torch.Generator().manual_seed(4)
    model, head = Transformer(GPT), BlockHead(BlockConfig(8, 2, GPT, (1,)))
    with torch.no_grad():
        for module in (model, head):
            for parameter in module.parameters():
                parameter.normal_(0, 0.3, generator=generator)
        model.output.weight.mul_(SHARP)
    return LlamaGenTarget(model, Guidance(), Processor()), head


def drawn(target: Any, drafter: BlockDrafter, seeds: list[int]) -> Any:
    prompt = Prompt(torch.tensor([2] * len(seeds)))
    uniforms = Uniforms.from_seeds(seeds)
    *_, end = decode(target, drafter, Recursive(), prompt, PICTURE, uniforms)
    return end


@torch.inference_mode()
def test_it_ends_at_a_few_depths_and_only_alone() -> None:
    target, head = parts()
    cut = BlockDrafter(head, target, TreeShape.chain(8), rejected_weight=0.3, sure=0.3)
    depths = [depth for seed in range(4) for depth in drawn(target, cut, [seed]).stats.depths]
    assert set(depths) == set(ends(8)) == {1, 4, 8}
    together = drawn(target, cut, [0, 1])
    assert set(together.stats.depths) == {8}
    whole = BlockDrafter(head, target, TreeShape.chain(8), rejected_weight=0.3)
    assert torch.equal(together.tokens, drawn(target, whole, [0, 1]).tokens)


@torch.no_grad()
def test_what_is_drafted_is_what_was_learnt() -> None:
    """In every round: the recorded distributions of a chain, however long it and the one before
    were, are those which training compares with the target's, after the same tokens.
    """
    target, head = parts()
    drafter = BlockDrafter(head, target, TreeShape.chain(8), sure=0.3)
    propose, rounds = drafter.propose, []

    def noted(*given: Any) -> DraftTree:
        tree = propose(*given)
        rounds.append((int(drafter.cache.lengths[0]) - 1, tree))
        return tree

    drafter.propose = noted  # type: ignore[method-assign]
    end = drawn(target, drafter, [4])
    assert set(end.stats.depths) == {1, 4, 8}
    logits = torch.randn(1, PICTURE, 20, generator=torch.Generator().manual_seed(5))
    inside = [(root, tree) for root, tree in rounds if root + 8 < PICTURE]
    assert len({tree.shape.depth for _, tree in inside}) == 3
    for root, tree in inside:
        count = tree.shape.size
        tokens = end.tokens[:, :PICTURE].clone()
        tokens[:, root : root + count] = tree.tokens
        seen = dataclasses.replace(
            seen_by(target.model, torch.tensor([2]), tokens, (1,)), logits=logits
        )
        given = (lambda x, _: target.model.output(x)), torch.tensor([[root]]), head.rotary
        overlap = block_loss(head, seen, *given)[1][: count - 1]
        assert tree.probs is not None
        probs = logits[0, root + 1 : root + count].softmax(-1)
        torch.testing.assert_close(overlap, torch.minimum(probs, tree.probs[0, 1:]).sum(-1))


@torch.inference_mode()
def test_greedy_tokens_are_those_of_plain_decoding() -> None:
    target, head = parts()
    greedy = target.with_processor(Processor(0.0))
    some = PictureParts({"block": head})
    method = methods.Speculative(tree="chain(8)", sure=0.3)
    own, drafter, rule = assemble(method, greedy, some)
    prompt = Prompt(torch.tensor([1]))
    *_, end = decode(own, drafter, rule, prompt, PICTURE, Uniforms.from_seeds([0]))
    *_, plain = decode_plain(greedy, prompt, PICTURE, Uniforms.from_seeds([0]))
    assert torch.equal(end.tokens[:, :PICTURE], plain.tokens)
    assert len(set(end.stats.depths)) > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(tree=(2, 1), sure=0.1), r"sure needs a chain, such as chain\(2\)"),
        (dict(drafter="eagle", sure=0.1), "sure needs the block drafter"),
    ],
)
def test_what_it_needs(options: dict[str, Any], said: str) -> None:
    target, head = parts()
    with pytest.raises(ValueError, match=said):
        assemble(methods.Speculative(**options), target, PictureParts({"block": head}))


@pytest.mark.parametrize("sure", [-0.1, 1.1])
def test_a_chance_is_between_0_and_1(sure: float) -> None:
    with pytest.raises(ValueError, match=r"sure must be in \[0, 1\]"):
        methods.LanternPP(sure=sure)


COSTS = Costs(draft={1: 1.0, 9: 2.0}, verify={1: 4.0, 9: 6.0}, step=4.0)
PLANNED = Plan(TreeShape.chain(4), 2.0, 1.2, "a chain", COSTS)
CHAINS = ((1, 0.25, 1.5), (4, 0.5, 2.5), (8, 0.25, 5.5))


def test_auto_expects_of_such_chains_what_each_length_costs_and_gives() -> None:
    method = methods.Speculative(sure=0.1)
    made = plan_chains(PLANNED, [Chain(*x) for x in CHAINS], method)
    tau = 0.25 * 1.5 + 0.5 * 2.5 + 0.25 * 5.5
    seconds = 0.25 * (1.0 + 4.25) + 0.5 * (1.375 + 5.0) + 0.25 * (1.875 + 6.0)
    assert made.draft_free == method and made.shape is None
    assert made.expected_speedup == pytest.approx(tau * 4.0 / seconds)
    faster = dataclasses.replace(PLANNED, expected_speedup=made.expected_speedup)
    kept = plan_chains(faster, [Chain(*x) for x in CHAINS], method)
    assert dataclasses.replace(kept, candidates=()) == faster
    assert [one.choice for one in kept.candidates] == [method]
    assert plan_chains(PLANNED, [], method) is PLANNED
    blind = dataclasses.replace(PLANNED, costs=None)
    assert plan_chains(blind, [Chain(*x) for x in CHAINS], method) is blind


@pytest.mark.parametrize(
    ("batch", "heat", "taken"), [(1, 1.0, True), (2, 1.0, False), (1, 0, False)]
)
def test_auto_takes_them_for_single_pictures_that_are_sampled(
    monkeypatch: pytest.MonkeyPatch, batch: int, heat: float, taken: bool
) -> None:
    target, head = parts()
    monkeypatch.setattr("specmm.autotune.planned", lambda *_, **__: PLANNED)
    some = PictureParts({"block": head}, acceptance=((0.5,),), chains=CHAINS)
    chosen = method_of(planned_for(target.with_processor(Processor(heat)), some, batch))
    whole = methods.Speculative(rule="recursive", tree=(-1, 0, 1, 2, 3))
    assert chosen == (methods.Speculative(tree="chain(8)", sure=0.1) if taken else whole)


def test_a_drafter_given_by_others_has_none() -> None:
    some = PictureParts({"block": parts()[1]}, acceptance=((0.5,),), chains=CHAINS)
    some.take_given("block")
    assert some.chains == ()


def test_they_are_measured_round_by_round() -> None:
    target, head = parts()
    prompts = [Prompt(torch.tensor([label])) for label in range(3)]
    found = measure_chains(head, target, prompts)
    shares = [share for _, share, _ in found]
    assert {drafts for drafts, _, _ in found} <= set(ends(8)) and len(found) > 1
    assert sum(shares) == pytest.approx(1, abs=1e-3)
    taken = 0
    for seed, prompt in enumerate(prompts):
        cut = BlockDrafter(head, target, TreeShape.chain(8), True, 0.3, sure=SURE_OF_AUTO)
        uniforms = Uniforms.from_seeds([seed])
        *_, end = decode(target, cut, make_rule("traversal"), prompt, PICTURE, uniforms)
        taken += len(end.stats.depths)
    tokens = sum(share * count for _, share, count in found)
    assert tokens * taken == pytest.approx(3 * (PICTURE - 1), rel=0.1)  # the last round overshoots


def test_what_it_declares() -> None:
    sure, whole = methods.Speculative(sure=0.1), methods.Speculative()
    assert sure.batch_dependent and not whole.batch_dependent
    assert sure.static_shapes and whole.static_shapes


@torch.inference_mode()
def test_masks_are_made_once_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = parts()
    cut = BlockDrafter(head, target, TreeShape.chain(8), rejected_weight=0.3, sure=0.3)
    made, new = [], Cache._new_bias
    monkeypatch.setattr(Cache, "_new_bias", lambda *given: made.append(1) or new(*given))
    depths = drawn(target, cut, [4]).stats.depths
    assert 1 < len(set(depths)) == len(made) < len(depths)
