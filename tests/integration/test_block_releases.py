"""Block drafters of other projects' releases, from unmodified folders: forward and one round of
drafts by the numbers of the releases' own classes (``tests/parity/blocks``), and by transformers'
own assistant.

Shape letters: B batch, K drafts, C width, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.diffusion_drafters.block_drafters import ChainDrafter
from specmm.diffusion_drafters.models.dflash import load_dflash
from specmm.diffusion_drafters.sources import DFlashSource
from specmm.hf.models.families import Family
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.methods import Block
from tests.generating import as_generate
from tests.tiny.parts import SIZES, shaken

PARITY = Path(__file__).parents[1] / "parity" / "blocks"
CASES = sorted(folder.name for folder in PARITY.glob("spec*"))
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def model():
    return tf.AutoModelForCausalLM.from_pretrained(PARITY / "target").eval()


def begun(folder, model, rows, anchor, length=None):
    """A chain drafter of ``folder`` after the prefill of ``rows``, and the feedback it gets."""
    target = VLMTarget(model, Processor(0.0), "tiny")
    prompt = VLMPrompt(padded(rows, "cpu"), 16)
    drafter = ChainDrafter(DFlashSource(load_dflash(folder), target), target, length)
    feedback = Feedback(target.prefill(prompt, drafter.max_nodes), anchor.expand(len(rows)))
    drafter.begin(feedback, Clock())
    return drafter, feedback


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_one_round_is_the_releases(case, model):
    wanted = load_file(PARITY / case / "cases.safetensors")
    prompt = wanted["prompt"][0].tolist()
    drafter, feedback = begun(PARITY / case, model, [prompt], wanted["anchor"])
    tree = drafter.propose(feedback, Uniforms.from_seeds([0]))
    assert tree.tokens[0, 0] == model(wanted["prompt"]).logits[0, -1].argmax()
    assert torch.equal(tree.tokens[0, 1:], wanted["drafts"])

    source = drafter.source
    first = 0 if source.model.config.anchor else 1
    ids = torch.full((1, source.model.config.block), source.model.config.mask)
    ids[0, 0] = wanted["anchor"]
    states = source.model.draft(source.embed(ids))[0, first:]
    torch.testing.assert_close(states, wanted["states"], **CLOSE)

    block, memory = source.logits(feedback, len(wanted["drafts"])), None
    for place in range(block.shape[1]):
        scores = block[:, place]
        if source.next_logits is not None:
            scores, memory = source.next_logits(scores, tree.tokens[:, place], memory)
        known = ~torch.isin(torch.arange(scores.shape[-1]), source.barred)
        torch.testing.assert_close(scores[0, known], wanted["logits"][place, known], **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("case", ["speculators-dspark-vanilla", "speculators-dflash-window"])
def test_ragged_rows_are_those_of_one_row(case, model):
    wanted = load_file(PARITY / case / "cases.safetensors")
    prompt = wanted["prompt"][0].tolist()
    drafter, feedback = begun(PARITY / case, model, [prompt[:3], prompt, [7]], wanted["anchor"])
    tree = drafter.propose(feedback, Uniforms.from_seeds([0, 1, 2]))
    assert torch.equal(tree.tokens[1, 1:], wanted["drafts"])


def assistant(folder, window=64, kinds=("sliding_attention", "full_attention")):
    torch.manual_seed(0)
    given = dict(num_key_value_heads=2, head_dim=8, sliding_window=window, layer_types=list(kinds))
    given |= dict(block_size=5, mask_token_id=63, target_layer_ids=[0, 2])
    config = MuseGlimmerAssistantConfig(**SIZES, **given)
    made = shaken(MuseGlimmerAssistantModel(config), std=0.3)
    made.save_pretrained(folder)
    return made


@torch.inference_mode()
@pytest.mark.parametrize("window", [64, 4])
def test_transformers_own_assistant(window, model, tmp_path):
    theirs, prompt = assistant(tmp_path, window), [5, 9, 33, 2, 41, 17, 8, 60]
    ids = torch.tensor([prompt])
    out = model(ids, output_hidden_states=True)
    anchor = out.logits[0, -1].argmax()
    cache = DFlashCache(config=theirs.config)
    cache.set_previous_accepted_tokens(len(prompt))
    block = torch.tensor([[int(anchor), 63, 63, 63, 63]])
    states = theirs(
        noise_embeds=model.get_input_embeddings()(block),
        context_hidden_states=torch.cat([out.hidden_states[1], out.hidden_states[3]], -1),
        position_ids=torch.arange(len(prompt) + 5)[None],
        past_key_values=cache,
    ).last_hidden_state[0]
    drafter, feedback = begun(tmp_path, model, [prompt], anchor)
    tree = drafter.propose(feedback, Uniforms.from_seeds([0]))
    own = drafter.source
    torch.testing.assert_close(own.model.draft(own.embed(block))[0], states, **CLOSE)
    scores = model.lm_head(states[1:])
    scores[:, 63] = float("-inf")
    assert torch.equal(tree.tokens[0, 1:], scores.argmax(-1))


@torch.inference_mode()
@pytest.mark.parametrize("tree", [0, 6, (2, 1)])
def test_answers_with_it_are_transformers_own(tree, model, tmp_path):
    assistant(tmp_path)
    drafter = load_dflash(tmp_path)
    ids = torch.tensor([[5, 9, 33, 2, 41, 17, 8, 60], [0, 0, 0, 0, 0, 4, 2, 9]])
    options = dict(pad_token_id=0, attention_mask=(ids > 0).long())
    assert as_generate(model, ids, 12, drafter, Block(tree=tree), **options)


def test_embeddings_are_read_before_a_norm_on_top(model):
    class Normed(torch.nn.Embedding):
        embed_norm = None

        def forward(self, ids):
            return 2 * super().forward(ids)

    family = Family.of(model)
    odd = Normed.from_pretrained(model.get_input_embeddings().weight)
    found = family.__class__(**{**family.__dict__, "embedding": odd}).plain_embedding
    ids = torch.tensor([3, 4])
    assert torch.equal(found(ids), model.get_input_embeddings()(ids))


def changed(case, folder, drop=(), **facts):
    shutil.copytree(PARITY / case, folder, dirs_exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k not in drop}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("speculators-dflash", {"speculators_model_type": "xpress"}, "got 'xpress'; see specmm"),
        ("speculators-dflash", {"transformer_layer_config": None}, "got None"),
        ("speculators-dflash", {"aux_hidden_state_layer_ids": [0, 3]}, "0 is the embeddings"),
        ("speculators-dflash", {"aux_hidden_state_layer_ids": None}, "no target_layer_ids"),
        ("speculators-dflash", {"aux_hidden_state_layer_ids": [1, 4]}, r"3 layers, got \[0, 3\]"),
        ("speculators-dflash-few", {"drop": ["d2t"]}, "1 missing: d2t"),
        ("speculators-dflash-few", {"draft_vocab_size": 20}, "wrong-shaped"),
        ("speculators-dspark-rnn", {"sample_from_anchor": False}, "must draft from its anchor"),
        ("speculators-dspark-rnn", {"markov_head_type": "odd"}, "got 'odd'"),
        ("speculators-dspark-rnn", {"drop": ["confidence_head.proj.bias"]}, "1 missing"),
        ("specforge-dflash", {"dflash_config": {"projector_type": "odd"}}, "got 'odd'"),
        ("specforge-domino", {"dflash_config": {"projector_type": "domino"}}, "gru_hidden_dim"),
        ("specforge-dflash-window", {"use_sliding_window": False}, "must give a sliding_window"),
    ],
)
def test_folders_that_do_not_fit(case, change, message, model, tmp_path):
    folder = changed(case, tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        DFlashSource(load_dflash(folder), VLMTarget(model, Processor(0.0), "tiny"))
