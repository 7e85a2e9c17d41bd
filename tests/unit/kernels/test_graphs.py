"""Targets with captured forwards (on a CPU: merely called) against the plain ones; the benchmark
without a GPU.
"""

import torch
import transformers as tf

from benchmarks.gpu import kernels, language
from benchmarks.gpu.graphs import GraphTarget, VLMGraphTarget
from benchmarks.gpu.parts import Bench
from specmm import methods
from specmm.core.decode import decode
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.drafters.drafting import assemble
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.programs.graphs import Graph
from specmm.verify.rule import VerifyResult

# two shapes of one size, and another size
PARENTS = [[-1, 0, 0, 1], [-1, 0, 1, 1], [-1, 0, 0, 1, 1, 2]]


@torch.inference_mode()
def follow(target, prompt):
    """Distributions of two batches of three trees each and a plain step, from one instance."""
    probs, generator = [], torch.Generator().manual_seed(0)
    for _ in range(2):
        target.prefill(prompt, 6)
        for parents in PARENTS:
            shape = TreeShape.from_parents(parents)
            tokens = torch.randint(3, 30, (2, shape.size), generator=generator)
            probs.append(target.score(DraftTree(tokens, shape)).probs.flatten())
            target.commit(
                VerifyResult(torch.tensor([[0, 1]] * 2), torch.tensor([2, 2]), tokens[:, 0])
            )
    return torch.cat(probs)


def test_llamagen():
    torch.manual_seed(0)
    model = Transformer(GPTConfig(32, 2, 2, 40, 64, num_classes=5))
    plain = LlamaGenTarget(model, Guidance(2.0), Processor())
    prompt = Prompt(torch.tensor([1, 3]))
    captured = GraphTarget(plain)
    torch.testing.assert_close(
        follow(captured, prompt), follow(plain, prompt), rtol=1e-4, atol=1e-6
    )
    for target in (captured, plain):  # also after trees of another room
        target.prefill(prompt, 0)
    for tokens in torch.tensor([[4, 9], [7, 7], [0, 30]]):
        expected = plain.step(tokens)
        found = captured.step(tokens)
        for a, b in ((found.probs, expected.probs), (found.hidden, expected.hidden)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_plain_step_has_what_a_round_has(monkeypatch):
    """It is one call of the graph, from token to distribution, and nothing waits to check it."""
    model = Transformer(GPTConfig(32, 2, 2, 40, 64, num_classes=5))
    captured = GraphTarget(LlamaGenTarget(model, Guidance(2.0), Processor()))
    captured.prefill(Prompt(torch.tensor([1, 3])), 0)
    calls = []
    call = Graph.__call__

    def counted(graph, *inputs):
        calls.append(call(graph, *inputs))
        return calls[-1]

    monkeypatch.setattr(Graph, "__call__", counted)
    with torch.inference_mode():
        output = captured.step(torch.tensor([4, 9]))
    assert len(calls) == 1 and output.probs is calls[0][0]


@torch.inference_mode()
def test_a_transformers_model_and_its_plain_steps():
    sizes = dict(hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    config = tf.LlamaConfig(
        vocab_size=40, num_key_value_heads=2, max_position_embeddings=128, **sizes
    )
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(1))
    prompt = VLMPrompt({"input_ids": ids}, max_new_tokens=20)
    plain = VLMTarget(model, Processor())
    expected = follow(plain, prompt)
    plain.prefill(prompt, 0)
    steps = [plain.step(ids[:, i]).probs for i in range(3)]
    model.set_attn_implementation("specmm_tree")
    captured = VLMGraphTarget(plain)
    torch.testing.assert_close(follow(captured, prompt), expected, rtol=1e-4, atol=1e-6)
    captured.prefill(prompt, 0)
    for i, probs in enumerate(steps):
        torch.testing.assert_close(captured.step(ids[:, i]).probs, probs, rtol=1e-4, atol=1e-6)


def proposed(target, drafter, rule, asked, monkeypatch):
    """The tokens of every tree that is drafted for 30 tokens."""
    propose = drafter.propose
    trees = []

    def recorded(*given):
        trees.append(propose(*given))
        return trees[-1]

    monkeypatch.setattr(drafter, "propose", recorded)
    list(decode(target, drafter, rule, asked.prompt, 30, asked.uniforms))
    return [tree.tokens.tolist() for tree in trees]


@torch.inference_mode()
def test_drafters_read_what_replays_give(monkeypatch):
    bench = Bench.at("cpu", True, None)
    model = language.Model(bench, language.text_sizes(bench))
    found = []
    for way in ("eager", "graph"):
        target = model.target(way)
        parts = assemble(methods.Block(length=3), target, model.drafter)
        found.append(proposed(target, *parts, model.asked(), monkeypatch))
    assert len(found[0]) > 5 and found[0] == found[1]


def test_bars_of_known_times():
    times = {}
    for shape in kernels.every_shape():
        times[shape, "ours"], times[shape, "sdpa"], times[shape, "copy"] = (
            1.0,
            2.0 + (shape.nodes == 1),
            2.0,
        )
    found = kernels.bars(times, 0)
    assert "median (bar 1.5): 2\n" in found and "least (bar 1.0): 2\n" in found
    assert "(bar 0.75): 1" in found  # half the copy's bytes in half its time
