"""Method ``self``: the target drafts without some of its layers, on its own cache. Token equal when
greedy, the model's distribution when sampling, broken twins caught.

Shape letters: B batch, T tokens, V vocabulary.
"""

import copy
import itertools

import pytest
import torch
import transformers as tf

from specmm import methods
from specmm.continuous_batching import Queue
from specmm.decode import decode, decode_plain
from specmm.derived import one_call
from specmm.drafter import Feedback
from specmm.hf.drafters.early_exit import LeftOut
from specmm.hf.drafting import assemble
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import VLMTarget
from specmm.layered import skipped
from specmm.processors import Processor
from specmm.randomness import PredrawnUniforms, Uniforms
from specmm.self_drafting import SelfDrafter
from specmm.stats import Clock
from specmm.tree import DraftTree
from specmm.verify import Block, Recursive
from specmm.verify.exhaustive import Draws, emitted_probs, sequence_probs, total_variation
from tests.sampling import Stream, WholeModelsProbs, fits, last

LENGTH = 12
SELF = {
    "exit": methods.SelfDraft(exit=1, length=3),
    "without the first": methods.SelfDraft(skip=(0,), length=3),
    "half": methods.SelfDraft(length=3),
}
V = 4


def run(zoo, name, processor, method, rows=None, seeds=(0, 1, 2), length=LENGTH, break_it=None):
    target = VLMTarget(zoo.model(name), processor)
    rows = zoo.rows if rows is None else rows
    prompt = VLMPrompt(zoo.batch(name, rows), length)
    uniforms = Uniforms.from_seeds(seeds[: len(rows)])
    if method is None:
        return last(decode_plain(target, prompt, length, uniforms))
    drafter, rule = assemble(method, target)
    if break_it is not None:
        break_it(drafter)
    return last(decode(target, drafter, rule, prompt, length, uniforms))


def test_greedy_answers_are_plain_decodings(zoo, family):
    plain = run(zoo, family, Processor(0), None)
    for name in ("exit", "half"):
        end = run(zoo, family, Processor(0), SELF[name])
        assert torch.equal(end.tokens[:, :LENGTH], plain.tokens), name


@pytest.mark.parametrize("method", SELF.values(), ids=SELF)
def test_longer_texts_of_deeper_models_are_plain_decodings(deep, method):
    """What is drafted is kept often enough for wrong keys to show."""
    plain = generated(deep, None, 48)
    end = generated(deep, method, 48)
    assert torch.equal(end.tokens[:, :48], plain.tokens)
    assert end.stats.tau > 1


def test_keys_of_drafts_that_stay_are_caught(deep):
    """A broken twin: verification goes on from states of other tokens' drafts."""

    def break_it(drafter):
        resume = drafter.target.resume
        drafter.target.resume = lambda first, states: resume(first, states.roll(1, 0))

    plain = generated(deep, None, 48)
    broken = generated(deep, SELF["exit"], 48, break_it)
    assert not torch.equal(broken.tokens[:, :48], plain.tokens)


def test_scratch_keys_in_the_committed_part_are_caught(deep):
    """A broken twin: drafts aim at the slots after the committed tokens of the longest row."""

    def break_it(drafter):
        at = drafter._at

        def wrong(place, token):
            given = at(place, token)
            cache = drafter.target.cache
            cache.aim(int(cache.lengths.min()) - 1, given[2].shape[-1])
            return given

        drafter._at = wrong

    plain = generated(deep, None, 48)
    broken = generated(deep, SELF["without the first"], 48, break_it)
    assert not torch.equal(broken.tokens[:, :48], plain.tokens)


@pytest.mark.parametrize("method", [SELF["exit"], SELF["without the first"]], ids=["exit", "skip"])
def test_a_row_does_not_depend_on_its_batch(zoo, method):
    name = "qwen2-vl sliding"
    processor = Processor(1.0, top_k=8, repetition_penalty=1.3)
    together = run(zoo, name, processor, method)
    for i, row in enumerate(zoo.rows):
        alone = run(zoo, name, processor, method, [row], (i,))
        assert torch.equal(alone.tokens[0, :LENGTH], together.tokens[i, :LENGTH])


def test_rows_take_up_the_next_prompt(zoo, family):
    rows, method = zoo.rows, SELF["exit"]
    target = VLMTarget(zoo.model(family), Processor(0))
    drafter, rule = assemble(method, target)
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]

    def prompt(number):
        return VLMPrompt(zoo.batch(family, rows[number : number + 1]), LENGTH)

    first = prompt(0)
    first.longest = max(prompt(n).width for n in (1, 2))
    queue = Queue(prompt, generators, 1)
    last(decode(target, drafter, rule, first, LENGTH, Uniforms(generators[:1]), queue=queue))
    plain = run(zoo, family, Processor(0), None)
    assert torch.equal(torch.stack(queue.tokens), plain.tokens)


# ---- sampling


def deep_model(layers=5, vocabulary=40, weak=0.25, dtype=torch.float32, seed=3):
    """A Llama whose layers say less and less, so that its first ones draft well."""
    torch.manual_seed(seed)
    config = tf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = tf.LlamaForCausalLM(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
        for layer in model.model.layers[1:]:
            layer.mlp.down_proj.weight.mul_(weak)
            layer.self_attn.o_proj.weight.mul_(weak)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def deep():
    return deep_model()


PROMPTS = [[1, 5, 6, 7, 8], [9, 10], [11, 12, 13]]


def generated(model, method, length, break_it=None, temperature=0.0):
    target = VLMTarget(model, Processor(temperature))
    prompt = VLMPrompt(padded(PROMPTS, "cpu"), length)
    uniforms = Uniforms.from_seeds([0, 1, 2])
    if method is None:
        return last(decode_plain(target, prompt, length, uniforms))
    drafter, rule = assemble(method, target)
    if break_it is not None:
        break_it(drafter)
    return last(decode(target, drafter, rule, prompt, length, uniforms))


def tables_of(model, row, length, processor, layers=None):
    """The distribution after each prefix of up to ``length`` tokens [V**d, V], by the model's own
    uncached forward over its first ``layers``.
    """
    found = []
    part = copy.copy(model.model)
    part._modules = dict(part._modules)
    part._modules["layers"] = model.model.layers[:layers]
    for depth in range(length):
        paths = torch.tensor(list(itertools.product(range(V), repeat=depth)), dtype=torch.int64)
        paths = paths.view(V**depth, depth)
        ids = torch.cat([torch.tensor([row]).expand(len(paths), -1), paths], 1)
        with torch.inference_mode():
            logits = model.lm_head(part(input_ids=ids, use_cache=False).last_hidden_state[:, -1])
        found.append(processor(logits))
    return found


ROW = [1, 3, 2]
HOT = Processor(1.3)
MANY = 8000


@pytest.fixture(scope="module")
def tiny():
    """Four tokens, and later layers that say much: drafts are often wrong."""
    return deep_model(3, V, 1.0)


def samples(model, method, break_it=None, rows=MANY):
    target = VLMTarget(model, HOT)
    drafter, rule = assemble(method, target)
    drafter = drafter if break_it is None else break_it(drafter)
    prompt = VLMPrompt(padded([ROW] * rows, "cpu"), 3)
    return last(decode(target, drafter, rule, prompt, 3, Stream(rows))).tokens[:, :3]


DRAWN = {
    "exit": methods.SelfDraft(exit=1, length=2),
    "skip": methods.SelfDraft(skip=(1,), length=2),
}


@pytest.mark.parametrize("method", DRAWN.values(), ids=DRAWN)
def test_samples_follow_the_models_distribution(tiny, method):
    wanted = sequence_probs(tables_of(tiny, ROW, 3, HOT), 3)
    assert fits(wanted, samples(tiny, method))


def test_the_whole_models_distributions_in_place_of_the_exits_are_caught(tiny):
    wanted = sequence_probs(tables_of(tiny, ROW, 3, HOT), 3)
    assert not fits(wanted, samples(tiny, DRAWN["exit"], WholeModelsProbs))


def by_itself(model, method, numbers):
    """The first tree of a row with these uniforms, and the target's distributions at its nodes."""
    target = VLMTarget(model, HOT)
    drafter, rule = assemble(method, target)
    prompt = VLMPrompt(padded([ROW[:-1]], "cpu"), 8)
    with torch.inference_mode():
        output = target.prefill(prompt, drafter.max_nodes)
        feedback = Feedback(output, torch.tensor(ROW[-1:]))
        drafter.begin(feedback, Clock())
        tree = drafter.propose(feedback, PredrawnUniforms(numbers[None]))
        return tree, target.score(tree).probs, rule


def emitted(model, method, cut=lambda tree: tree):
    """The distribution of the tokens of a round and those after it, from every path of drafts, each
    drawn by the real drafter and verified by the real rule on the recorded distributions.
    """
    depth = method.length
    whole = tables_of(model, ROW, depth + 1, HOT)
    first = tables_of(model, ROW, depth, HOT, method.exit)
    found = {}
    grid = [(torch.arange(12, dtype=torch.float64) + 0.5) / 12] * depth
    for numbers in itertools.product(*grid):
        tree, probs, rule = by_itself(model, method, torch.stack(numbers))
        tree = cut(tree)
        found[tuple(tree.tokens[0, 1:].tolist())] = (tree, probs, rule)
    total = whole[0].new_zeros(V ** (depth + 1))
    for path, (tree, probs, rule) in found.items():
        chance = whole[0].new_ones(1)
        prefix = [0]
        for place, token in enumerate(path):
            recorded = tree.probs[0, place + 1]
            assert torch.allclose(recorded, first[place][prefix[-1]], atol=1e-12)
            assert torch.allclose(probs[0, place], whole[place][prefix[-1]], atol=1e-12)
            chance = chance * recorded[token]
            prefix.append(prefix[-1] * V + token)
        part = emitted_probs(rule, Draws(tree, chance, torch.tensor([prefix])), whole)
        for table in whole[len(path) + 1 :]:
            part = (part[:, None] * table).flatten()
        total += part
    return total, sequence_probs(whole, depth + 1)


@pytest.fixture(scope="module")
def exact():
    """In float64, with likely tokens at every place, so that a coarse grid finds every path."""
    model = deep_model(3, V, 1.0, torch.float64)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.4)
    return model


def test_every_path_together_is_the_models_distribution(exact):
    found, wanted = emitted(exact, methods.SelfDraft(exit=1, length=2))
    assert abs(float(found.sum()) - 1) < 1e-12
    assert total_variation(found, wanted) < 1e-12


def test_a_chain_that_is_cut_after_drawing_is_caught(exact):
    """A broken twin: a draft that looks unlikely is taken back."""

    def cut(tree):
        last = int(tree.tokens[0, -1])
        if tree.probs[0, -1, last] > 0.3:
            return tree
        shape = type(tree.shape).chain(tree.shape.size - 2)
        return DraftTree(tree.tokens[:, :-1], shape, tree.probs[:, :-1])

    method = methods.SelfDraft(exit=1, length=2)
    with pytest.raises((AssertionError, RuntimeError)):
        found, wanted = emitted(exact, method, cut)
        assert total_variation(found, wanted) < 1e-3


def test_the_rule_is_block_verification_where_drafts_are_drawn(tiny):
    assert isinstance(assemble(SELF["exit"], VLMTarget(tiny, Processor(0)))[1], Recursive)
    assert isinstance(assemble(SELF["exit"], VLMTarget(tiny, HOT))[1], Block)


# ---- what is shared


def test_the_model_and_its_cache_are_shared(deep):
    before = list(deep.model.layers)
    target = VLMTarget(deep, Processor(0))
    drafter, _ = assemble(SELF["exit"], target)
    weights = sum(p.numel() for p in deep.parameters())
    generated(deep, SELF["exit"], 8)
    assert list(deep.model.layers) == before and not any(
        isinstance(module, LeftOut) for module in deep.modules()
    )
    assert sum(p.numel() for p in deep.parameters()) == weights
    assert isinstance(drafter, SelfDrafter) and not hasattr(drafter, "cache")


def test_a_draft_costs_its_layers_and_verification_the_rest(deep):
    """Each token goes through each of the first layers once, and the root alone through none
    twice.
    """
    seen = [0] * 5
    handles = [
        layer.register_forward_hook(
            lambda _, args, __, i=i: seen.__setitem__(i, seen[i] + args[0].shape[1])
        )
        for i, layer in enumerate(deep.model.layers)
    ]
    try:
        with one_call():
            generated(deep, methods.SelfDraft(exit=2, length=3), 24)  # asks a model that has hooks
            seen[:] = [0] * 5
            end = generated(deep, methods.SelfDraft(exit=2, length=3), 24)
    finally:
        for handle in handles:
            handle.remove()
    prompt = max(map(len, PROMPTS))
    assert seen == [prompt + 4 * len(end.stats.depths)] * 5


# ---- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(exit=5), r"exit must be in \[1, 4\], for the model has 5 layers, got 5"),
        (dict(exit=-1), r"exit must be in \[1, 4\]"),
        (dict(skip=(2, 7)), "skip must be layers from 0 to 4, got 7"),
        (dict(skip=(0, 1, 2, 3, 4)), "must leave at least one of the 5 layers, got all"),
        (dict(exit=1, skip=(2,)), "give exit or skip, not both"),
        (dict(exit=1, length=0), "length must be at least 1, got 0"),
    ],
)
def test_mistakes_get_a_sentence(deep, options, message):
    with pytest.raises(ValueError, match=message):
        assemble(methods.SelfDraft(**options), VLMTarget(deep, Processor(0)))


def test_layers_are_counted_from_the_first():
    assert skipped(5, exit=3) == (3, 4)
    assert skipped(5, skip=(3, 1, 3)) == (1, 3)
    assert skipped(5) == (2, 3, 4) and skipped(2) == (1,)
    with pytest.raises(ValueError, match="needs a model of two layers or more"):
        skipped(1)


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2"])
def test_layers_with_states_are_refused(zoo, name):
    with pytest.raises(ValueError, match="whose layers have states, which drafts would move"):
        assemble(SELF["exit"], VLMTarget(zoo.model(name), Processor(0)))
