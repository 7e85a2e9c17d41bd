"""Method ``mtp`` on tiny checkpoints with MTP layers: transformers' own numbers and tokens, ragged
rows, pictures, and what is refused.
"""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.generation.candidate_generator import MTPCandidateGenerator

from benchmarks.models.prompts import prompts_for
from specmm import TextPipeline, VQAPipeline, methods
from specmm.core.decode import decode
from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.tree import TreeShape
from specmm.hf.drafters.drafting import assemble
from specmm.hf.drafters.mtp import MtpDrafter
from specmm.hf.drafters.mtp_layers import layers_of
from specmm.hf.loading.pretrained import load_model
from specmm.hf.models.families import cache_name
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.shape.trees import branching
from specmm.verify import Recursive
from specmm.vlm.asking import Questions
from tests.cases import some
from tests.generating import as_generate, ragged_as_generate
from tests.integration.mtp_rounds import LENGTH, PROMPTS, Watched, greedy
from tests.noisy import noisy
from tests.tiny.mtp_models import save

KINDS = [("deepseek", 1), ("deepseek", 3), ("glm", 1), ("mellum", 1)]
WAYS = {
    "dynamic": methods.MTP(),
    "wide": methods.MTP(tree=(2, 2, 1, 1)),
    "chain": methods.MTP(tree="chain(5)"),
}
OTHERS = [("qwen3.5 text", 1), ("ernie", 1), ("mimo", 2)]  # whose rounds transformers cannot run


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def found(name, count=1):
        if (name, count) not in made:
            made[name, count] = save(name, tmp_path_factory.mktemp("mtp"), count)
        return made[name, count]

    return found


@pytest.fixture(scope="module")
def model_of(folder_of):
    made = {}

    def found(name, count=1):
        if (name, count) not in made:
            model = load_model(AutoModelForCausalLM, folder_of(name, count))
            model.generation_config.eos_token_id = None
            made[name, count] = model
        return made[name, count]

    return found


@pytest.mark.parametrize(("name", "count"), KINDS)
def test_every_round_is_transformers_own(model_of, name, count, monkeypatch):
    """Drafts equal and logits within 1e-4 wherever both draft, many drafts kept and not."""
    model = model_of(name, count)
    first = model.config.num_hidden_layers
    names = [rf"model\.layers\.{first + i}.*" for i in range(count)]  # theirs look for few depths
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"^mtp", *names])
    theirs = {}
    own = MTPCandidateGenerator.get_candidates

    def watched(self, input_ids, *given, **named):
        tokens, logits = own(self, input_ids, *given, **named)
        if logits is not None:
            theirs[input_ids.shape[1]] = (tokens[0, input_ids.shape[1] :], logits[0])
        return tokens, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", watched)
    ids = torch.tensor(PROMPTS[:1])
    wanted = model.generate(ids, use_mtp=True, max_new_tokens=40, do_sample=False)[
        0, ids.shape[1] :
    ]
    end, drafter = greedy(model, Watched, TreeShape.chain(count), PROMPTS[:1], 40)
    assert torch.equal(end.tokens[0, :40], wanted)
    assert end.stats.kept[0] > 1 and sum(end.stats.kept[1:]) > 5
    shared = theirs.keys() & drafter.found.keys()
    assert len(shared) > 15
    for before in shared:
        assert torch.equal(drafter.found[before][0], theirs[before][0])
        torch.testing.assert_close(drafter.found[before][1], theirs[before][1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "count"), some([*KINDS, *OTHERS], [*KINDS[:2], *OTHERS[::2]]))
def test_ragged_greedy_rows_are_generates_own(model_of, name, count, way):
    model = model_of(name, count)
    if way == "wide" and name == "qwen3.5 text":
        pytest.skip("its layers have states")
    assert ragged_as_generate(model, PROMPTS, LENGTH, None, WAYS[way])


def test_one_round_of_a_tree_is_that_of_each_of_its_paths(model_of):
    """Three layers in turn and the last one again: every node's draft as in a chain to it."""
    model = model_of("deepseek", 3)
    tree = branching([2, 1, 2, 1, 1])
    target = VLMTarget(model, Processor(0.0))
    drafter = Watched(layers_of(model), target, tree)
    end, _ = greedy(model, MtpDrafter, tree, PROMPTS)
    assert len(end.stats.kept) > 3
    prompt, uniforms = VLMPrompt(padded(PROMPTS[:1]), 12), Uniforms.from_seeds([0])
    *_, _ = decode(target, drafter, Recursive(), prompt, 12, uniforms)
    _, watched = greedy(model, Watched, TreeShape.chain(5), PROMPTS[:1], 12)
    first = next(iter(drafter.found))
    spine = [0]  # the first child of every node
    while (below := (tree.parents[0] == spine[-1]).nonzero()).numel():
        spine.append(int(below[0]))
    assert torch.equal(
        drafter.found[first][0][torch.tensor(spine[1:]) - 1], watched.found[first][0]
    )


def test_text_pipelines_find_the_layers_in_the_checkpoint(folder_of):
    """Rows that begin anew while others go on answer as by themselves."""
    pipe = TextPipeline.from_pretrained(folder_of("deepseek", 3), method="mtp")
    texts = ["abc:", "d", "efgh?fe", "hello:", "no"]
    options = dict(max_new_tokens=16, temperature=0.0)
    together = pipe(texts, batch_size=2, **options)
    for text, found in zip(texts, together.texts, strict=True):
        assert pipe([text], method="ar", **options).texts == [found]
    drawn = dict(max_new_tokens=16, temperature=1.0, seed=[4, 5, 6, 7, 8])
    for method in (methods.MTP(), methods.Draft("mtp", (2, 1))):
        refilled = pipe(texts, method=method, batch_size=2, **drawn)
        for text, seed, found in zip(texts, drawn["seed"], refilled.texts, strict=True):
            alone = pipe([text], method=method, **(drawn | {"seed": [seed]}))
            assert alone.texts == [found]
    assert together.certificate.kind == "exact"


def test_questions_about_pictures_equal_generate(folder_of):
    """A ragged batch of two pictures, none and one; M-RoPE and layers with states."""
    pipe = VQAPipeline.from_pretrained(folder_of("qwen3.5"), method="mtp")
    pipe.model.generation_config.eos_token_id = []
    pictures = [[noisy((16, 24), 60), noisy((24, 16), 60)], [], [noisy((32, 16), 60)]]
    questions = ["what is this", "hello", "where"]
    options = dict(max_new_tokens=20, temperature=0.0)
    found = pipe(pictures, questions, **options)
    plain = pipe(pictures, questions, method="ar", **options)
    for ours, theirs in zip(found.tokens, plain.tokens, strict=True):
        assert torch.equal(ours, theirs)
    assert sum(found.stats.kept[1:]) > 10  # drafts are kept
    refilled = pipe(pictures, questions, batch_size=2, **options)
    assert refilled.answers == found.answers


def test_three_layers_draft_after_pictures(folder_of):
    """Of a model without M-RoPE, asked through generate."""
    model = load_model(AutoModelForImageTextToText, folder_of("step3p7", 3))
    model.generation_config.eos_token_id = None
    for inputs in prompts_for(model).values():
        assert as_generate(model, inputs, 12, None, "mtp")


def test_slots_of_pictures_are_those_of_a_naive_reading(folder_of):
    """A ragged batch's states, by transformers' layer: vLLM's positions, pictures' embeddings.

    With the embeddings of placeholders they would be others.
    """
    pipe = VQAPipeline.from_pretrained(folder_of("qwen3.5"), method="mtp")
    pictures = [[noisy((16, 24), 60), noisy((24, 16), 60)], [], [noisy((32, 16), 60)]]
    questions = ["what is this", "hello", "where"]
    given = Questions.of(pictures, questions, True, None)
    prompt = VLMPrompt(given.inputs(pipe.processor), 8, given)
    target = VLMTarget(pipe.model, Processor(0.0))
    layers = layers_of(pipe.model)
    drafter = MtpDrafter(layers, target, TreeShape.chain(2))
    output = target.prefill(prompt, drafter.max_nodes)
    token = torch.tensor([20, 21, 22])
    drafter.begin(Feedback(output, token), Clock())
    for row in range(3):
        alone = VLMPrompt(given[row : row + 1].inputs(pipe.processor), 8)
        wanted, without = naive_state(pipe.model, layers, alone, token[row : row + 1])
        torch.testing.assert_close(drafter.growth.last[row, 0], wanted, rtol=0, atol=1e-4)
        assert torch.allclose(wanted, without, atol=1e-3) == (not pictures[row])


@torch.inference_mode()
def naive_state(model, layers, prompt, token):
    """What the layer predicts after ``token``, with pictures' embeddings and without."""
    seen = {}

    def see(_, __, named):
        seen["embeddings"] = named["inputs_embeds"]

    handle = model.get_decoder().register_forward_pre_hook(see, with_kwargs=True)
    hidden = model.model(**prompt.inputs).last_hidden_state
    handle.remove()
    grids = {k: v for k, v in prompt.inputs.items() if k.endswith("_thw")}
    types = prompt.inputs["mm_token_type_ids"]
    positions, _ = model.model.get_rope_index(prompt.input_ids, mm_token_type_ids=types, **grids)
    turned = layers.model.rotary_emb(hidden, position_ids=positions)
    ids = torch.cat([prompt.input_ids[:, 1:], token[None]], 1)
    plain = model.get_input_embeddings()(ids)
    both = torch.cat([seen["embeddings"][:, 1:], plain[:, -1:]], 1)
    layer = layers.model.layers[0]
    rest = {cache_name(layer): None}
    return tuple(
        layer(x, hidden, turned, attention_mask=None, position_ids=None, **rest)[0, -1]
        for x in (both, plain)
    )


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [("mellum", None, "config that names none"), ("glm", 3, "missing are layers.1")],
)
def test_checkpoints_without_the_layers_are_refused(tmp_path, name, count, said):
    config = save(name, tmp_path) / "config.json"
    facts = json.loads(config.read_text()) | {"num_nextn_predict_layers": count}
    config.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=re.escape(said)):
        TextPipeline.from_pretrained(tmp_path, method="mtp")("abc", max_new_tokens=4)


def test_other_drafters_and_models_from_nowhere_are_refused(model_of):
    target = VLMTarget(model_of("glm"), Processor(0.0))
    with pytest.raises(ValueError, match="drafter must be MTP layers, got a str"):
        assemble(methods.MTP(), target, "layers")
    made = VLMTarget(AutoModelForCausalLM.from_config(target.model.config), Processor(0.0))
    made.model.config.name_or_path = ""
    with pytest.raises(ValueError, match="a model that was not loaded from one"):
        assemble(methods.MTP(), made)
