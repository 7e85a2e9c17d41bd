"""EAGLE-3 heads on tiny models of several classes: rounds against whole texts, ragged batches with
pictures anywhere, exactness, recorded distributions, misfits.

Shape letters: B rows, L positions, C width.
"""

import copy
import dataclasses
import itertools

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config, Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from specmm.core.decode import decode
from specmm.core.drafter import DrafterVocabulary, Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.drafting import assemble
from specmm.hf.drafters.eagle3_head import Eagle3Config, Eagle3Head
from specmm.hf.drafters.features import FeatureDrafter
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.methods import Eagle3
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import branching
from specmm.verify import GreedyMatch, Recursive
from specmm.verify.exhaustive import draws, emitted_probs, sequence_probs, total_variation
from tests.sampling import check_recorded, fits
from tests.tiny.families import WITH_STATES
from tests.tiny.parts import shaken
from tests.unit.vlm.test_continuous_batching import check_refilled

LENGTH = 10
TREE = Dynamic(top_k=8, depth=2, total=60)
ROWS = [[1, 5, "2", 6, 7], [1, 9, 10, 11], [1, "3", 12, 4, "4", 3]]
MROPE = dict(sections=(1, 1, 2))
KINDS = {
    "plain": {},
    "residual": dict(norm_before_residual=True, norm_before_fc=True),
    "eagle 3.1": dict(fc_norm=True, norm_output=True, kind=Qwen3Config),
    "own tables": dict(own_embeddings=True, tokens=40),
    "target's head": dict(own_head=False),
    "pictures": dict(picture_embeddings=True),
    "parallel": dict(mask=38, deep=2),
}


def head_for(target, kind=LlamaConfig, deep=1, tokens=20, layers=(0, 1), width=0, **changes):
    """A random head that drafts a part of the tokens."""
    config = target.family.config
    width = width or config.hidden_size
    vocabulary = target.family.vocabulary
    sizes = dict(hidden_size=width, intermediate_size=24, num_hidden_layers=deep, head_dim=8)
    sizes |= dict(vocab_size=vocabulary, num_attention_heads=4, num_key_value_heads=2)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = kind(**sizes, attn_implementation="sdpa", rope_parameters=rope)
    few = min(tokens, vocabulary)
    torch.manual_seed(1)
    head = shaken(Eagle3Head(Eagle3Config(sizes, layers, few, **changes)))
    if few < vocabulary:
        head.set_ids(torch.randperm(vocabulary)[:few])
    return head


def prompt_of(zoo, name, rows=ROWS, length=LENGTH):
    return VLMPrompt(zoo.batch(name, rows), length)


def run(drafter, rule, prompt, seeds, length=LENGTH):
    *_, end = decode(drafter.target, drafter, rule, prompt, length, Uniforms.from_seeds(seeds))
    return end.tokens[:, :length]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_greedy_drafting_is_what_generate_gives(zoo, name, kind):
    """Ragged rows with pictures; heads for models with M-RoPE take its parts."""
    changes = KINDS[kind]
    if name != "llava" and kind in ("plain", "parallel"):
        changes = changes | MROPE | dict(interleaved=name == "qwen3-vl")
    model = zoo.model(name)
    own = model.generate(**zoo.batch(name, ROWS), max_new_tokens=LENGTH, do_sample=False)
    target = VLMTarget(model, Processor(0))
    head = head_for(target, **changes)
    for tree in (TREE, branching([8, 4, 1])):
        found = run(
            FeatureDrafter(head, target, tree), GreedyMatch(), prompt_of(zoo, name), [0] * 3
        )
        assert torch.equal(found, own[:, -LENGTH:])


class Watched(FeatureDrafter):
    """Keeps of every round the rows' answers so far, the root last, and the states after them."""

    def begin(self, feedback, clock):
        super().begin(feedback, clock)
        self.rounds, self.said = [], [[token] for token in feedback.token.tolist()]

    def propose(self, feedback, uniforms):
        if feedback.result is not None:
            kept = feedback.result.kept.tolist()
            for said, row, count in zip(self.said, feedback.tokens.tolist(), kept, strict=True):
                said += row[:count]
        grow = self.growth.grow

        def seen(head, root, state, uniforms):
            ahead = state[:, None] if self.ahead is None else self.ahead.states.clone()
            self.rounds.append((copy.deepcopy(self.said), state.clone(), ahead))
            return grow(head, root, state, uniforms)

        self.growth.grow = seen
        try:
            return super().propose(feedback, uniforms)
        finally:
            self.growth.grow = grow


def watched_rounds(drafter, prompt):
    """The rounds of answers of several rounds, without tokens that stand for pictures."""
    for seed in range(100):
        seeds = [seed, seed + 1, seed + 2]
        found = run(drafter, Recursive(), prompt, seeds, prompt.max_new_tokens)
        if bool((found < 36).all()) and len(drafter.rounds) > 3:
            return drafter.rounds
    raise AssertionError("no such answers")


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle 3.1", "own tables", "parallel"])
@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
def test_rounds_read_what_a_whole_text_would_give(zoo, name, kind):
    """After every round of a ragged batch: the state of each row is that of a head that reads the
    row's text at once, with nothing kept from earlier rounds.
    """
    changes = KINDS[kind]
    if name != "llava" and kind != "own tables":
        changes = changes | MROPE | dict(interleaved=name == "qwen3-vl")
    target = VLMTarget(zoo.model(name), Processor(1.0))
    head = head_for(target, **changes)
    drafter = Watched(head, target, branching([2, 1, 1]))
    length = 7
    rounds = watched_rounds(drafter, prompt_of(zoo, name, length=length))
    alone = VLMTarget(zoo.model(name), Processor(1.0))
    fresh = FeatureDrafter(head, alone, branching([2, 1, 1]))
    for texts, state, ahead in rounds[1:4]:
        for row, said in enumerate(texts):
            if len(said) >= length:  # this answer has ended
                continue
            prompt = prompt_of(zoo, name, [[*ROWS[row], *said[:-1]]])
            output = alone.prefill(prompt, 9)
            fresh.begin(Feedback(output, torch.tensor(said[-1:])), Clock())
            torch.testing.assert_close(state[row], fresh.predicted[0], rtol=0, atol=1e-4)
            if fresh.ahead is not None:
                fresh.ahead.read_alone()
                torch.testing.assert_close(ahead[row], fresh.ahead.states[0], rtol=0, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["plain", "own tables", "pictures"])
def test_prompt_slots_are_those_of_a_naive_loop(zoo, kind):
    """Slot by slot: the states of the layers before and after the first, as the model's own forward
    has them, with the next token or, in heads that read them, a picture's embedding.
    """
    target = VLMTarget(zoo.model("llava"), Processor(1.0))
    head = head_for(target, **KINDS[kind])
    drafter = FeatureDrafter(head, target, branching([2]))
    token = torch.tensor([3, 4, 5])
    drafter.begin(Feedback(target.prefill(prompt_of(zoo, "llava"), 4), token), Clock())
    table = head.embed_tokens if kind == "own tables" else target.embed
    for row, text in enumerate(ROWS):
        inputs = zoo.batch("llava", [text])
        seen = target.model(**inputs, output_hidden_states=True).hidden_states
        ids = [*inputs["input_ids"][0].tolist()[1:], int(token[row])]
        read = [table(torch.tensor(token)) for token in ids]
        if kind == "pictures":
            own = seen[0][0, 1:]  # what the decoder reads
            read = [
                own[j] if t == zoo.image else e
                for j, (t, e) in enumerate(zip(ids, read, strict=True))
            ]
        # the layer after the last one's states are those before its norm
        last = unnormed(target.model, inputs)
        states = torch.cat([seen[1], last], dim=-1)[0]
        slots = [torch.cat([e, head.mixed(h)]) for e, h in zip(read, states, strict=True)]
        wanted = head(torch.stack(slots)[None])[0, -1]
        torch.testing.assert_close(drafter.predicted[row], wanted, rtol=1e-4, atol=1e-5)


def unnormed(model, inputs):
    """What the last layer gives [1, L, C]."""
    found = []
    last = model.model.language_model.layers[-1]
    handle = last.register_forward_hook(lambda *a: found.append(a[-1]))
    model(**inputs)
    handle.remove()
    return found[0] if isinstance(found[0], torch.Tensor) else found[0][0]


REFILLED = [
    ("llava", "parallel"),
    ("llava", "pictures"),
    ("qwen2.5-vl", "plain"),
    ("qwen3-vl", "parallel"),
]


@pytest.mark.parametrize(("name", "kind"), REFILLED)
def test_answers_do_not_depend_on_what_their_row_held(zoo, name, kind):
    """Rows begin anew, with pictures or without; M-RoPE's positions go along."""
    changes = KINDS[kind] | (
        MROPE | dict(interleaved=name == "qwen3-vl") if name != "llava" else {}
    )
    target = VLMTarget(zoo.model(name), Processor(1.0))
    head = head_for(target, **changes)
    head.layers[0].self_attn.q_proj.weight.data.mul_(8)  # positions matter much
    check_refilled(zoo, name, target, FeatureDrafter(head, target, branching([4, 2, 1])))


@pytest.mark.parametrize("name", WITH_STATES)
def test_targets_with_states_take_chains(zoo, name):
    model = zoo.model(name)
    target = VLMTarget(model, Processor(0))
    own = model.generate(**zoo.batch(name, ROWS), max_new_tokens=LENGTH, do_sample=False)
    for kind in ("plain", "parallel"):
        parts = assemble(Eagle3(), target, head_for(target, **KINDS[kind]))
        prompt = prompt_of(zoo, name)
        uniforms = Uniforms.from_seeds([0] * 3)
        *_, end = decode(target, parts.drafter, parts.rule, prompt, LENGTH, uniforms)
        assert torch.equal(end.tokens[:, :LENGTH], own[:, -LENGTH:])
        with pytest.raises(ValueError, match="must be chains"):
            assemble(Eagle3(sampled=True, tree=(2, 1)), target, head_for(target))


def test_sections_turn_as_transformers_turns_them():
    """Qwen3-VL's, which interleave; Qwen2.5-VL's are in tests/parity/eagle3."""
    sizes = dict(hidden_size=64, num_attention_heads=1, head_dim=64, vocab_size=9)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    theirs = Qwen3VLTextRotaryEmbedding(
        Qwen3VLTextConfig(**sizes, rope_parameters=rope | {"mrope_section": [12, 10, 10]})
    )
    layers = LlamaConfig(**sizes, intermediate_size=8, num_hidden_layers=1, rope_parameters=rope)
    config = Eagle3Config(layers, (0,), 9, sections=(12, 10, 10), interleaved=True)
    head = Eagle3Head(config)
    positions = torch.randint(0, 50, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    x = torch.zeros(1)
    for ours, wanted in zip(
        head._turned(head.turns(x, positions)), theirs(x, positions), strict=True
    ):
        torch.testing.assert_close(ours, wanted)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["plain", "parallel"])
def test_recorded_distributions_are_those_drawn_from(zoo, kind):
    """And no mass is on tokens that the head lacks."""
    target = VLMTarget(zoo.model("llava"), Processor(0.7, top_k=20))
    head = head_for(target, **KINDS[kind])
    drafter = FeatureDrafter(head, target, branching([3, 2, 1]))
    feedback = Feedback(target.prefill(prompt_of(zoo, "llava"), 20), torch.tensor([3, 4, 5]))
    drafter.begin(feedback, Clock())
    tree = drafter.propose(feedback, Uniforms.from_seeds([0, 1, 2]))
    check_recorded(tree)
    lacking = torch.ones(40, dtype=torch.bool).index_fill_(0, head.ids, False)
    assert float(tree.probs[:, 1:, lacking].sum()) == 0


TEXT = [[1, "1", 3, 2]]
PROCESS = Processor(0.6, top_p=0.95)


class Ignoring(DrafterVocabulary):
    """Takes the head's ids for the target's in what is recorded."""

    def spread(self, probs):
        return torch.nn.functional.pad(probs, (0, self.size - probs.shape[-1]))


def ignoring_d2t(drafter):
    vocabulary = drafter.growth.vocabulary
    drafter.growth.vocabulary = Ignoring(vocabulary.size, vocabulary.ids)


def before_temperature(drafter):
    """Records of a chain what the logits say before the temperature, which was drawn with."""
    draw = drafter.growth._draw

    def drawn(head, logits, width, uniforms):
        return draw(head, logits, width, uniforms)[0], logits.softmax(-1)[:, :, None]

    drafter.growth._draw = drawn


TWINS = {"": None, "d2t ignored": ignoring_d2t, "before temperature": before_temperature}


DRAWN = {
    "tree": ("plain", branching([2, 1])),
    "parallel": ("parallel", branching([1, 1])),
    "dynamic": ("plain", Dynamic(top_k=2, depth=1, total=5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("drawn", DRAWN)
def test_sampling_keeps_the_distribution(zoo, drawn, twin):
    """Three tokens after a prompt with a picture, thousands of runs in one batch, against the
    model's own distribution; twins that record another are found out.
    """
    kind, tree = DRAWN[drawn]
    if twin and (drawn == "dynamic" or (drawn == "tree" and twin == "before temperature")):
        pytest.skip("a twin of chains, or of drawn trees")
    small, runs, size = zoo.of_vocabulary(6), 3000, 6
    target = VLMTarget(small.model("llava"), PROCESS)
    joint = joint_of(small, size)
    changes = {"mask": 3, "deep": 2} if kind == "parallel" else KINDS[kind]
    drafter = FeatureDrafter(head_for(target, tokens=4, **changes), target, tree)
    if TWINS[twin] is not None:
        TWINS[twin](drafter)
    prompt = VLMPrompt(small.batch("llava", TEXT * runs), 4)
    found = run(drafter, Recursive(), prompt, range(runs), 3)
    assert fits(joint, found) != bool(twin)


@torch.inference_mode()
def joint_of(small, size):
    """The model's own distribution [V^3] of three tokens."""
    target = VLMTarget(small.model("llava"), PROCESS)
    found = []
    for first, second in itertools.product(range(size), repeat=2):
        probs = target.prefill(VLMPrompt(small.batch("llava", TEXT), 4), 0).probs[0, -1, first]
        probs = probs * target.step(torch.tensor([first])).probs[0, 0, second]
        found.append(probs * target.step(torch.tensor([second])).probs[0, 0])
    return torch.cat(found)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["plain", "parallel"])
def test_enumerated_drafts_keep_the_distribution(zoo, kind):
    """Every draw of a tree by the real head's distributions, through the real rule, in float64;
    what a drawn tree records are these distributions.
    """
    size, few = 5, 3
    small = zoo.of_vocabulary(size)
    target = VLMTarget(copy.deepcopy(small.model("llava")).double(), Processor(0.8))
    changes = {"mask": 2, "deep": 2} if kind == "parallel" else KINDS[kind]
    head = head_for(target, tokens=few, **changes)
    head = head.double()
    whole = FeatureDrafter(head, target, branching([few, few]), sampled=False)
    feedback = Feedback(target.prefill(VLMPrompt(small.batch("llava", TEXT), 9), 20), LAST)
    drafts = tables_of(whole, feedback, size, few)
    shape = TreeShape.from_parents([-1, 0, 0, 1, 1])
    drawn = draws(shape, drafts, "without replacement")
    target_tables = [random_table(d, size) for d in range(3)]
    own = sequence_probs(target_tables, 3)
    assert total_variation(emitted_probs(Recursive(), drawn, target_tables), own) < 1e-12
    # a twin that takes the head's ids for the target's
    ids = torch.cat([head.ids, head.ids.new_tensor([i for i in range(size) if i not in head.ids])])
    swapped = DraftTree(drawn.tree.tokens, shape, drawn.tree.probs[..., ids])
    wrong = emitted_probs(Recursive(), dataclasses.replace(drawn, tree=swapped), target_tables)
    assert total_variation(wrong, own) > 1e-3
    drafter = FeatureDrafter(head, target, shape)
    drafter.begin(feedback, Clock())
    for seed in range(20):
        tree = drafter.propose(feedback, Uniforms.from_seeds([seed]))
        row = int((drawn.tree.tokens[:, 1:] == tree.tokens[0, 1:]).all(1).nonzero()[0])
        wanted = drawn.tree.probs[row, 1:].float()
        torch.testing.assert_close(tree.probs[0, 1:], wanted, rtol=0, atol=1e-6)


LAST = torch.tensor([2])


def tables_of(drafter, feedback, size, few):
    """The head's distribution after every prefix of its own tokens [V^d, V] for d = 0 and 1, from
    a tree of all of them; uniform after others, which are never drafted.
    """
    drafter.begin(feedback, Clock())
    logits, seen = drafter.logits, {}

    def see(states, depth):
        seen[depth] = logits(states, depth)
        return seen[depth]

    drafter.logits = see
    tree = drafter.propose(feedback, Uniforms.from_seeds([0]))
    tables = []
    for depth in range(2):
        probs = drafter.growth.vocabulary.spread(drafter.probs(seen[depth])[0]).double()
        table = torch.full((size**depth, size), 1 / size, dtype=torch.float64)
        prefix = tree.tokens[0, 1 : 1 + few] if depth else torch.tensor([0])
        table[prefix] = probs / probs.sum(-1, keepdim=True)
        tables.append(table)
    return tables


def random_table(depth, size):
    generator = torch.Generator().manual_seed(depth)
    shape = (size**depth, size)
    return torch.randn(shape, generator=generator, dtype=torch.float64).softmax(-1)
