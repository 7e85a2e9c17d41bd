"""Method ``assistant``: Gemma 4's assistants over the target's keys and values.

transformers 5.23 cannot build one.
"""

import pytest
import torch
from transformers.generation.candidate_generator import (
    SinglePositionMultiTokenCandidateGenerator as Theirs,
)

from benchmarks.models.prompts import prompts_for
from benchmarks.models.table import GAINS
from benchmarks.models.tiny import build, tiny_config
from specmm import TextPipeline, methods
from specmm.core.decode import decode
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.tree import TreeShape
from specmm.hf.drafters.assistant import AssistantDrafter, clustered
from specmm.hf.drafters.drafting import assemble
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.verify import Recursive
from tests.cases import some
from tests.generating import as_generate, ragged_as_generate
from tests.integration.two_drafts import (
    EVERY,
    PROCESSOR,
    PROMPT,
    ROOT,
    V,
    Watching,
    check_every_draw,
    colder,
    follows,
    recorded_tables,
)
from tests.tiny import vlm_folders
from tests.tiny.assistants import SHARING, SIZES, assistant_of, buildable, target

pytestmark = pytest.mark.skipif(not buildable(), reason="transformers 5.23 cannot build one")

PROMPTS = [[9, 20, 31, 12, 25, 8, 17, 3, 4, 5, 6], [30], [11, 13, 22]]
WAYS = {
    "dynamic": methods.Assistant(),
    "tree": methods.Assistant(tree=(2, 2, 1)),
    "chain": methods.Assistant(tree="chain(4)"),
}
LENGTH = 24


@pytest.fixture(scope="module", params=["own keys", "shared keys", "clusters"])
def pair(request):
    """A target and its assistant."""
    model = target(3, **(SHARING if request.param == "shared keys" else {}))
    if request.param != "clusters":
        return model, assistant_of(model)
    few = dict(use_ordered_embeddings=True, num_centroids=6, centroid_intermediate_top_k=2)
    wide = target(3, vocab_size=36)
    return wide, assistant_of(wide, sizes=SIZES | dict(vocab_size=36), **few)


class Watched(Watching, AssistantDrafter):
    """Keeps what it drafts."""


@torch.no_grad()
def naive_round(model, assistant, ids, count):
    """``count`` greedy drafts after ``ids`` and their logits, the assistant run as by transformers
    over fresh keys and values of all tokens but the last.
    """
    seen = model(ids[None, :-1], output_hidden_states=True, return_shared_kv_states=True)
    state = seen.hidden_states[-1][:, -1:]
    token = ids[None, -1:]
    place = torch.tensor([[len(ids) - 1]])
    tokens, logits = [], []
    for _ in range(count):
        both = torch.cat([model.get_input_embeddings()(token), state], -1)
        found = assistant(
            inputs_embeds=both, position_ids=place, shared_kv_states=dict(seen.shared_kv_states)
        )
        token, state = found.logits.argmax(-1), found.last_hidden_state
        tokens.append(int(token))
        logits.append(found.logits[0, 0])
    return torch.tensor(tokens), torch.stack(logits)


def test_every_round_is_transformers_own(pair, monkeypatch):
    """By its assistant over fresh keys and values, and in its own loop where no draft was rejected
    before: there it attends a rejected one, too.
    """
    model, assistant = pair
    theirs = []
    own = Theirs.get_candidates

    def watched(self, input_ids, *given, **named):
        tokens, logits = own(self, input_ids, *given, **named)
        if logits is not None:
            theirs.append((tokens[0, input_ids.shape[1] :], logits[0]))
        return tokens, logits

    monkeypatch.setattr(Theirs, "get_candidates", watched)
    assistant.generation_config.num_assistant_tokens = 3
    ids = torch.tensor(PROMPTS[:1])
    options = dict(max_new_tokens=30, do_sample=False)
    wanted = model.generate(ids, assistant_model=assistant, **options)[0]
    drafter = Watched(assistant, VLMTarget(model, Processor(0.0)), TreeShape.chain(3))
    prompt = VLMPrompt(padded(PROMPTS[:1]), 30)
    *_, end = decode(drafter.target, drafter, Recursive(), prompt, 30, Uniforms.from_seeds([0]))
    assert torch.equal(end.tokens[0, :30], wanted[ids.shape[1] :])
    assert sum(end.stats.kept[1:]) > 3 and end.stats.kept[0] > 1
    for before, (tokens, logits) in drafter.found.items():
        naive = naive_round(model, assistant, wanted[:before], 3)
        check_round(tokens, logits, *naive)
    check_round(*drafter.found[ids.shape[1] + 1], *theirs[0])


def check_round(tokens, logits, their_tokens, their_logits):
    """The same drafts, and logits within 1e-4 where ours are finite."""
    assert torch.equal(tokens, their_tokens)
    seen = logits.isfinite()
    assert int(seen.sum()) >= 12 * len(tokens)
    torch.testing.assert_close(logits[seen], their_logits.float()[seen], rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", some(WAYS, ["tree"]))
def test_ragged_greedy_rows_are_generates_own(pair, way):
    model, assistant = pair
    assert ragged_as_generate(model, PROMPTS, LENGTH, assistant, WAYS[way])


def test_a_folder_of_transformers_drafts_for_a_pipeline(tmp_path):
    """Rows that begin anew while others go on answer as by themselves."""
    model = target(3)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(tmp_path / "target")
    vlm_folders.tokenizer().save_pretrained(tmp_path / "target")
    assistant_of(model).save_pretrained(tmp_path / "assistant")
    pipe = TextPipeline.from_pretrained(
        tmp_path / "target", method="assistant", drafter=tmp_path / "assistant"
    )
    texts = ["abc:", "d", "efgh?fe", "hello:", "no"]
    options = dict(max_new_tokens=16, temperature=0.0)
    together = pipe(texts, batch_size=2, **options)
    assert together.certificate.kind == "exact"
    for text, found in zip(texts, together.texts, strict=True):
        assert pipe([text], method="ar", **options).texts == [found]
    drawn = dict(max_new_tokens=16, temperature=1.0, seed=4)
    assert pipe(texts, **drawn).texts == pipe(texts, batch_size=2, **drawn).texts


@pytest.mark.parametrize("kind", ["picture", "pictures", "batch"])
def test_pictures_of_gemma_4(kind):
    config = tiny_config("gemma4")
    model = build("Gemma4ForConditionalGeneration", config, 0, GAINS[0])
    text = model.config.get_text_config()
    each = text.per_layer_config
    heads = {k: c for k, c in zip(text.layer_types, each, strict=True)}
    sizes = SIZES | dict(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=each[0].num_key_value_heads,
        head_dim=heads["sliding_attention"].head_dim,
        global_head_dim=heads["full_attention"].head_dim,
    )
    assistant = assistant_of(model, sizes=sizes)
    assert as_generate(model, prompts_for(model)[kind], 12, assistant, "assistant")


def test_clusters_of_a_row_do_not_depend_on_its_batch():
    model = target(3, vocab_size=36)
    few = dict(use_ordered_embeddings=True, num_centroids=6, centroid_intermediate_top_k=2)
    assistant = assistant_of(model, sizes=SIZES | dict(vocab_size=36), **few)
    states = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    weight = assistant.lm_head.weight
    together = clustered(assistant.masked_embedding, states, weight)
    for row in range(3):
        alone = clustered(assistant.masked_embedding, states[row : row + 1], weight)
        torch.testing.assert_close(alone[0], together[row])
        assert int(alone.isfinite().sum()) == 2 * 12


@pytest.fixture(scope="module")
def small():
    model = target(0, vocab_size=V)
    return model, assistant_of(model, sizes=SIZES | dict(vocab_size=V))


def every(model, assistant):
    """A drafter of every first draft, and one after each."""
    return AssistantDrafter(assistant, VLMTarget(model, PROCESSOR), EVERY)


@torch.no_grad()
def test_recorded_distributions_are_the_assistants_own(small):
    model, assistant = small
    seen = model(torch.tensor([PROMPT]), output_hidden_states=True, return_shared_kv_states=True)
    place = torch.tensor([[len(PROMPT)]])

    def after(token, state):
        embedding = model.get_input_embeddings()(torch.tensor([[token]]))
        return assistant(
            inputs_embeds=torch.cat([embedding, state], -1),
            position_ids=place,
            shared_kv_states=dict(seen.shared_kv_states),
        )

    first = after(ROOT, seen.hidden_states[-1][:, -1:])
    found = recorded_tables(every(model, assistant))
    wanted = PROCESSOR(first.logits[0].double())
    torch.testing.assert_close(found[0].double(), wanted, rtol=0, atol=1e-6)
    for token in range(V):
        wanted = PROCESSOR(after(token, first.last_hidden_state).logits[0, 0].double())
        torch.testing.assert_close(found[1][token].double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2)])
def test_every_draw_together_is_the_targets_distribution(small, shape):
    model, _ = small
    check_every_draw(model, every(*small), shape)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(
    "method", [methods.Assistant(tree="chain(3)", rule="block"), methods.Assistant(tree=(2, 1))]
)
def test_samples_follow_the_targets_distribution(small, method, broken):
    model, assistant = small
    drafter, rule = assemble(method, VLMTarget(model, PROCESSOR), assistant)
    if broken:
        colder(drafter)
    assert follows(model, drafter, rule) == (not broken)


def test_misfits_are_named():
    model = target(0)
    aim = VLMTarget(model, Processor(0.0))

    def refused(assistant, said):
        with pytest.raises(ValueError, match=said):
            assemble(methods.Assistant(), aim, assistant)

    refused(assistant_of(model, backbone_hidden_size=48), "target's width 32, got 48")
    refused(assistant_of(model, sizes=SIZES | dict(vocab_size=40)), "vocabulary 37, got 40")
    refused(assistant_of(model, sizes=SIZES | dict(head_dim=16)), "sliding_attention layers")
    refused(model, "use method text-draft for a language model")
    refused(None, "got a NoneType")
