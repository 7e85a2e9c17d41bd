"""Every drafter on every class of model: token equal when greedy, the model's distribution when
sampling, broken twins caught.

Shape letters: B batch, T tokens, V vocabulary.
"""

import pytest
import torch
import transformers as tf

from specmm import methods
from specmm.core.decode import decode, decode_plain
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.hf.drafters.drafting import assemble
from specmm.hf.drafters.small_model import SmallModel
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from tests.integration.two_drafts import colder
from tests.sampling import Stream, fits, last, sequence_distribution
from tests.tiny.parts import shaken

LENGTH = 12
METHODS = {
    "prompt-lookup": methods.PromptLookup(2, 4),
    "suffix": methods.Suffix(4, 0.1),
    "recycle": methods.Recycle(tree=(2, 2, 1)),
    "text-draft": methods.TextDraft((2, 1, 1)),
    "vlm-draft": methods.VLMDraft((2, 1)),
}


def text_model(vocabulary, seed=5):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = tf.LlamaConfig(vocab_size=vocabulary, max_position_embeddings=256, **sizes)
    return shaken(tf.LlamaForCausalLM(config), std=0.3)


def drafter_of(zoo, name, method):
    """Text models are strangers; the small VLM is the target under other weights, or nearly the
    same ones.
    """
    if method.name == "text-draft":
        return SmallModel(text_model(40))
    return SmallModel(zoo.model(name, 0, 0.24)) if method.name == "vlm-draft" else None


def run(zoo, name, processor, method, rows=None, seeds=(0, 1, 2), length=LENGTH, break_it=None):
    target = VLMTarget(zoo.model(name), processor)
    rows = zoo.rows if rows is None else rows
    prompt = VLMPrompt(zoo.batch(name, rows), length)
    uniforms = Uniforms.from_seeds(seeds[: len(rows)])
    if method is None:
        return last(decode_plain(target, prompt, length, uniforms)), target
    drafter, rule = assemble(method, target, drafter_of(zoo, name, method))
    if break_it is not None:
        break_it(target, drafter)
    return last(decode(target, drafter, rule, prompt, length, uniforms)), target


def test_greedy_decoding_is_plain_decoding(zoo, family):
    """With a tree of another model's; a small model that sees comes in the next test."""
    plain, _ = run(zoo, family, Processor(0), None)
    end, _ = run(zoo, family, Processor(0), METHODS["text-draft"])
    assert torch.equal(end.tokens[:, :LENGTH], plain.tokens)
    assert end.counts.tolist() == [LENGTH] * 3


class Quiet:
    """Greedy decoding that never writes the placeholders, which no drafter drafts."""

    greedy, stateful = True, False
    check_vocabulary = Processor(0).check_vocabulary

    def probs(self, logits, history, tree, out=None):
        return Processor(0)(logits.index_fill(-1, torch.tensor([36, 37]), float("-inf")))


def test_a_drafter_that_sees_the_picture_agrees_with_its_twin(zoo, family):
    target = VLMTarget(zoo.model(family), Quiet())
    drafter, rule = assemble(methods.VLMDraft((1, 1, 1)), target, SmallModel(zoo.model(family)))
    drafter.inner.translation.ban([36, 37])
    prompt = VLMPrompt(zoo.batch(family, zoo.rows), 14)
    end = last(decode(target, drafter, rule, prompt, 14, Uniforms.from_seeds([0, 1, 2])))
    # an identical copy: all drafts kept in every round but the first, of none
    assert end.stats.kept == [3, 0, 0, 9]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_row_does_not_depend_on_its_batch(zoo, method):
    name = "qwen2-vl sliding"
    processor = Processor(1.0, top_k=8, repetition_penalty=1.3)
    together, _ = run(zoo, name, processor, method)
    for i, row in enumerate(zoo.rows):
        alone, _ = run(zoo, name, processor, method, [row], (i,))
        assert torch.equal(alone.tokens[0, :LENGTH], together.tokens[i, :LENGTH])


@pytest.mark.parametrize("method", ["prompt-lookup", "suffix"])
def test_sampled_tokens_of_earlier_texts_drafts_are_those_of_plain_decoding(zoo, method):
    processor = Processor(0.6, top_k=4, repetition_penalty=0.7)
    plain, _ = run(zoo, "qwen2-vl sliding", processor, None, length=30)
    end, _ = run(zoo, "qwen2-vl sliding", processor, METHODS[method], length=30)
    assert torch.equal(end.tokens[:, :30], plain.tokens)
    assert end.stats.kept[2:] != [0] * len(end.stats.kept[2:])


SETTINGS = {
    "hot": Processor(1.3),
    "top-k and top-p": Processor(0.8, top_k=4, top_p=0.9),
    "repetition penalty": Processor(1.0, repetition_penalty=1.8),
}
T, ROWS = 3, 3000


def own_distribution(zoo, processor, row):
    """Of T tokens after ``row``, by the LLaVA's own uncached forward."""
    model, inputs = zoo.model("llava"), zoo.batch("llava", [row])
    prompt, size = inputs["input_ids"], model.config.get_text_config().vocab_size
    embed = model.get_input_embeddings()
    with torch.inference_mode():
        features = torch.cat(list(model.get_image_features(inputs["pixel_values"]).pooler_output))
        start = embed(prompt).masked_scatter((prompt == zoo.image)[..., None], features)

    def after(paths):
        ids = torch.cat([prompt.expand(len(paths), -1), paths], 1)
        inputs_embeds = torch.cat([start.expand(len(paths), -1, -1), embed(paths)], 1)
        logits = model(inputs_embeds=inputs_embeds, logits_to_keep=1).logits[:, -1]
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
        return processor(logits.double(), seen)

    return sequence_distribution(after, size, T)


@pytest.fixture(scope="module")
def small_world(zoo):
    """A LLaVA of six tokens, of which the last stands for pictures."""
    return zoo.of_vocabulary(6)


SAMPLED = [("repetition penalty", "ar"), ("repetition penalty", "vlm-draft")]
SAMPLED += [
    ("top-k and top-p", "text-draft"),
    ("hot", "text-draft"),
    ("hot", "prompt-lookup"),
    ("hot", "suffix"),
]


@pytest.mark.parametrize(("processor", "method"), SAMPLED)
def test_samples_follow_the_models_distribution(small_world, processor, method):
    row, processor = [1, 3, "1", 2], SETTINGS[processor]
    tokens = sample(small_world, processor, METHODS.get(method), row)
    assert fits(own_distribution(small_world, processor, row), tokens)


def sample(world, processor, method, row, break_it=None):
    target = VLMTarget(world.model("llava"), processor)
    prompt = VLMPrompt(world.batch("llava", [row] * ROWS), T)
    uniforms = Stream(ROWS)
    if method is None:
        return last(decode_plain(target, prompt, T, uniforms)).tokens[:, :T]
    models = {"text-draft": lambda: text_model(6), "vlm-draft": lambda: world.model("llava", 7)}
    small = SmallModel(models[method.name]()) if method.name in models else None
    late, rule = assemble(method, target, small)
    drafter = getattr(late, "inner", late)  # begun at once: T is short
    if break_it is not None:
        break_it(target, drafter)
    return last(decode(target, drafter, rule, prompt, T, uniforms)).tokens[:, :T]


def forget_ancestors(target, drafter):
    """The repetition penalty sees what is committed, not the path of a node."""
    processor = target.processor

    class Forgetful:
        greedy, stateful = False, True

        def probs(self, logits, history, tree, out=None):
            return processor(logits, history.seen(None, logits.shape[-1]).expand_as(logits))

    target.processor = Forgetful()


def claim_to_draw(target, drafter):
    """Point masses are recorded as if they had been drawn, each token as likely."""
    propose = drafter.propose

    def claiming(feedback, uniforms):
        tree = propose(feedback, uniforms)
        size = target.family.vocabulary
        tree.probs = torch.full((*tree.tokens.shape, size), 1 / size)
        return tree

    drafter.propose = claiming


@pytest.mark.parametrize(
    ("processor", "method", "break_it"),
    [
        ("repetition penalty", methods.TextDraft((1, 1)), forget_ancestors),
        ("hot", methods.TextDraft((1, 1)), lambda _, drafter: colder(drafter)),
        ("hot", METHODS["recycle"], claim_to_draw),
    ],
)
def test_the_same_test_rejects_a_broken_twin(small_world, processor, method, break_it):
    row, processor = [1, 3, "1", 2], SETTINGS[processor]
    tokens = sample(small_world, processor, method, row, break_it)
    assert not fits(own_distribution(small_world, processor, row), tokens)
