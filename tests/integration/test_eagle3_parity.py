"""EAGLE-3 and P-EAGLE heads in every released layout against the numbers of the implementations
they come from (tests/parity/eagle3): forward, rounds of drafts, folders written in each layout.

Shape letters: T positions, C width, F layers read, v drafter's vocabulary, V the target's, K steps.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.tree import TreeShape
from specmm.hf.drafters.eagle3_files import LAYOUTS, load_eagle3, save_eagle3
from specmm.hf.drafters.features import FeatureDrafter
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.shape.eagle2 import Dynamic

PARITY = Path(__file__).parents[1] / "parity" / "eagle3"
HEADS = sorted(file.parent.name for file in PARITY.glob("*/numbers.safetensors"))
ONE_BY_ONE = [name for name in HEADS if name != "peagle"]
CLOSE = {"rtol": 0, "atol": 1e-4}
STEPS = 4


def numbers(name):
    return load_file(PARITY / name / "numbers.safetensors")


def target_for(head, given):
    """A model of the head's width and vocabulary, with the embeddings that go with it."""
    torch.manual_seed(0)
    width = head.config.state_width
    sizes = dict(vocab_size=40, hidden_size=width, intermediate_size=16, num_hidden_layers=7)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64))
    if "embeddings" in given:
        model.get_input_embeddings().weight.data.copy_(given["embeddings"])
    return VLMTarget(model, Processor(0))


def begun(drafter, given, lengths):
    """``drafter`` with the first ``lengths`` recorded slots read, a row for each, and the feedback
    that it is to draft after; logits are seen by depth.
    """
    target, tokens = drafter.target, given["tokens"][0].tolist()
    rows = [[5, *tokens[: length - 1]] for length in lengths]
    roots = torch.tensor([tokens[length - 1] for length in lengths])
    output = target.prefill(VLMPrompt(padded(rows), 20), drafter.max_nodes)
    most = max(lengths)
    target.context.hidden = given["hidden"][:, :most].expand(len(rows), -1, -1)
    if "positions" in given:
        target.context.positions = given["positions"].expand(-1, len(rows), -1)
        target.offsets = torch.full_like(target.offsets, int(given["positions"].max()) + 1 - most)
    feedback = Feedback(dataclasses.replace(output, hidden=target.context.hidden[:, :1]), roots)
    drafter.begin(feedback, Clock())
    seen, logits = {}, drafter.logits

    def see(states, depth):
        seen[depth] = logits(states, depth)
        return seen[depth]

    drafter.logits = see
    return feedback, seen


def drafter_for(name, tree):
    head, given = load_eagle3(PARITY / name), numbers(name)
    return FeatureDrafter(head, target_for(head, given), tree), given


@torch.inference_mode()
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_rollouts_of_training(name):
    """Every slot, K steps on: what was drafted after it sees the slots before it and its own."""
    head, given = load_eagle3(PARITY / name), numbers(name)
    table = given.get("embeddings")
    table = head.embed_tokens.weight if table is None else table
    tokens, count = given["tokens"], given["tokens"].shape[1]
    positions = given.get("positions", torch.arange(count)[None])
    hidden, past = head.mixed(given["hidden"]), DynamicCache()
    seen = torch.ones(count, count).tril().bool()
    wanted = [given[key].view(-1, count, given[key].shape[-1]) for key in ("states", "logits")]
    for step, (states, logits) in enumerate(zip(*wanted, strict=True)):
        bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]
        hidden = head(head.slots(table[tokens], hidden), positions + step, bias, past)
        torch.testing.assert_close(hidden[0], states, **CLOSE)
        torch.testing.assert_close(head.logits(hidden)[0], logits, **CLOSE)
        tokens = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        seen = torch.cat([seen, torch.eye(count, dtype=torch.bool)], dim=1)


@torch.inference_mode()
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_round_of_drafts(name):
    """The greedy chain after all slots, as our loop asks for it."""
    drafter, given = drafter_for(name, TreeShape.chain(STEPS))
    feedback, seen = begun(drafter, given, [given["tokens"].shape[1]])
    tree = drafter.propose(feedback, Uniforms.from_seeds([0]))
    if "chain_logits" in given:  # SpecForge's classes only train
        found = torch.stack([seen[depth][0, 0] for depth in range(STEPS)])
        torch.testing.assert_close(found, given["chain_logits"], **CLOSE)
        assert tree.tokens[0, 1:].tolist() == given["drafts"].tolist()
    last = given["logits"].view(-1, *given["logits"].shape[-2:])[0, -1]
    torch.testing.assert_close(seen[0][0, 0], last, **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("name", HEADS)
def test_ragged_rows(name):
    """Prefixes of every length in one batch."""
    drafter, given = drafter_for(name, TreeShape.chain(1))
    if "positions" in given:
        pytest.skip("rows of one picture's positions end at one place")
    logits = given["logits"].view(-1, *given["logits"].shape[-2:])[0]
    feedback, seen = begun(drafter, given, list(range(1, len(logits) + 1)))
    drafter.propose(feedback, Uniforms.from_seeds(range(len(logits))))
    torch.testing.assert_close(seen[0][:, 0], logits, **CLOSE)


@torch.inference_mode()
def test_the_dynamic_tree_of_the_release():
    drafter, given = drafter_for("safeailab", Dynamic(top_k=4, depth=3, total=12))
    feedback, _ = begun(drafter, given, [given["tokens"].shape[1]])
    tree = drafter.propose(feedback, Uniforms.from_seeds([0]))
    assert tree.tokens[0].tolist() == given["tree"].tolist()
    assert tree.shape.depths[0].tolist() == given["depths"].tolist()
    assert torch.equal(tree.shape.ancestors[0].bool(), given["ancestors"])


@torch.inference_mode()
def test_parallel_drafts():
    """P-EAGLE's masks after prefixes of every length, all depths of a round in one pass."""
    drafter, given = drafter_for("peagle", TreeShape.chain(STEPS))
    logits = given["logits"]  # [K, T, v]
    count = logits.shape[1]
    feedback, seen = begun(drafter, given, list(range(1, count + 1)))
    drafter.propose(feedback, Uniforms.from_seeds(range(count)))
    for depth in range(STEPS):
        inside = count - depth  # of the reference's own text
        torch.testing.assert_close(seen[depth][:inside, 0], logits[depth, :inside], **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HEADS)
def test_written_and_read_again(name, layout, tmp_path):
    """The same head, or a sentence that names what the layout does not have."""
    head = load_eagle3(PARITY / name)
    target = target_for(head, {}).model
    able = {
        "eagle": ("llama", "safeailab", "whole_vocabulary"),
        "specforge": tuple(n for n in HEADS if n == "llama" or not has_speculators_flags(n)),
        "speculators": tuple(n for n in HEADS if n != "specforge_fc_norm"),
    }
    if name not in able[layout]:
        with pytest.raises(ValueError, match=f"a head in layout {layout} must do without"):
            save_eagle3(head, tmp_path, target, layout=layout)
        return
    save_eagle3(head, tmp_path, target, layout=layout, dtype=torch.float32)
    found = load_eagle3(tmp_path)
    rest = [field.name for field in dataclasses.fields(head.config) if field.name != "sizes"]
    assert [getattr(found.config, n) for n in rest] == [getattr(head.config, n) for n in rest]
    assert found.config.sizes.rope_parameters == head.config.sizes.rope_parameters
    for key, value in head.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key


def has_speculators_flags(name):
    facts = json.loads((PARITY / name / "config.json").read_text())
    layer = facts.get("transformer_layer_config") or {}
    odd = layer.get("model_type") == "qwen3" or layer.get("attention_bias")
    return name != "peagle" and bool(odd or facts.get("norm_before_residual"))
