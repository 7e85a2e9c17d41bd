"""The core on Triton: LlamaGen's target, a transformers model, the choice of implementation."""

import os
import subprocess
import sys

import pytest
import torch
import transformers as tf

from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.models.rows import Reading, RowsTarget
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.kernels.backend import backend
from specmm.kernels.tree_attention import interface, masks
from specmm.verify.rule import VerifyResult


@torch.inference_mode()
def rounds(target, prompt, device):
    """Distributions of three rounds of trees whose rows keep different paths."""
    shape = TreeShape.from_parents([-1, 0, 0, 1, 1, 2], device)
    target.prefill(prompt, shape.size)
    path = torch.tensor([[0, 1, 4], [0, 2, -1]], device=device)
    kept = torch.tensor([3, 2], device=device)
    probs, generator = [], torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(3, 30, (2, shape.size), generator=generator).to(device)
        probs.append(target.score(DraftTree(tokens, shape)).probs)
        target.commit(VerifyResult(path, kept, tokens[:, 0]))
    return torch.stack(probs)


def test_llamagen_scores_and_commits_on_triton(device, monkeypatch):
    text = dict(model_type="t2i", cls_token_num=6, caption_dim=8)
    config = GPTConfig(dim=48, n_layer=2, n_head=2, vocab_size=40, block_size=64, **text)
    torch.manual_seed(0)
    model = Transformer(config).to(device)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]], device=device)
    prompt = Prompt(torch.randn(2, 6, 8).to(device), mask)
    found = {}
    for name in ("torch", "triton"):
        monkeypatch.setenv("SPECMM_KERNELS", name)
        found[name] = rounds(LlamaGenTarget(model, Guidance(2.0), Processor()), prompt, device)
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-4, atol=1e-6)


@torch.inference_mode()
def read_beside(model, device, packed):
    """Distributions of a row's rounds, and after a prompt that is read beside them or alone."""
    target = RowsTarget(model, "rows")
    target.open(3, 2)
    ids = torch.randint(3, 30, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    first, second = (
        Reading(target, VLMPrompt(padded([part], device), 1), [Processor()], 40, 16)
        for part in (ids[:9], ids[9:])
    )
    first.go_on(9)
    target.join()
    target.take(0, first)
    tree = DraftTree(torch.tensor([[5, 6, 7]], device=device), TreeShape.chain(2, device))
    path, kept = torch.arange(3, device=device)[None], torch.tensor([2], device=device)
    probs = []
    for count in (6, 5):
        if packed:
            target.beside.append(second.next(count))
        else:
            second.go_on(count)
        probs.append(target.score(tree).probs)
        target.commit(VerifyResult(path, kept, tree.tokens[:, 0]))
    return torch.cat([*probs, second.output_of(0).probs], 1)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_what_is_read_beside_a_round(kernels, device, monkeypatch):
    sizes = dict(hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    config = tf.LlamaConfig(vocab_size=40, max_position_embeddings=128, **sizes)
    model = tf.LlamaForCausalLM(config).eval().to(device)
    model.set_attn_implementation(interface.NAME)
    monkeypatch.setenv("SPECMM_KERNELS", "torch")
    expected = read_beside(model, device, False)
    monkeypatch.setenv("SPECMM_KERNELS", kernels)
    name = {"torch": "chains_attention", "triton": "tree_attention"}[kernels]
    calls, real = [], getattr(interface, name)
    monkeypatch.setattr(interface, name, lambda *given: calls.append(1) or real(*given))
    torch.testing.assert_close(read_beside(model, device, True), expected, rtol=1e-4, atol=1e-6)
    assert len(calls) == 2 * 2 * 2  # rounds, layers, parts


@torch.inference_mode()
def scored_rows(model, device, sizes):
    """Distributions after the chains of three rows, of very different lengths."""
    target = RowsTarget(model, "rows")
    target.open(6, 3)
    numbers = torch.Generator().manual_seed(2)
    for row, length in enumerate((5, 60, 9)):
        ids = torch.randint(3, 30, (length,), generator=numbers).tolist()
        reading = Reading(target, VLMPrompt(padded([ids], device), 1), [Processor()], 90, 64)
        reading.go_on(length)
        target.join()
        target.take(row, reading)
    tokens = torch.randint(3, 30, (3, 6), generator=numbers).to(device)
    return target.score(DraftTree(tokens, TreeShape.chain(5, device), sizes=sizes)).probs


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_rows_with_fewer_drafts_score_as_with_more(kernels, device, monkeypatch):
    sizes = dict(hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    config = tf.LlamaConfig(vocab_size=40, max_position_embeddings=128, **sizes)
    model = tf.LlamaForCausalLM(config).eval().to(device)
    model.set_attn_implementation(interface.NAME)
    monkeypatch.setattr(masks, "APART", 0)
    monkeypatch.setenv("SPECMM_KERNELS", "torch")
    wanted = scored_rows(model, device, None)
    monkeypatch.setenv("SPECMM_KERNELS", kernels)
    calls, real = [], interface.chains_attention
    monkeypatch.setattr(interface, "chains_attention", lambda *x: calls.append(1) or real(*x))
    own = torch.tensor([4, 1, 6], device=device)
    found = scored_rows(model, device, own)
    for row, size in enumerate(own.tolist()):
        torch.testing.assert_close(found[row, :size], wanted[row, :size], rtol=1e-4, atol=1e-6)
    assert len(calls) == (2 if kernels == "torch" else 0)  # layers


def test_a_transformers_model_loaded_with_specmm_tree(device, monkeypatch):
    sizes = dict(hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    config = tf.LlamaConfig(
        vocab_size=40, num_key_value_heads=2, max_position_embeddings=128, **sizes
    )
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(config).eval().to(device)
    ids = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    prompt = VLMPrompt(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, max_new_tokens=20
    )
    monkeypatch.setenv("SPECMM_KERNELS", "torch")
    expected = rounds(VLMTarget(model, Processor()), prompt, device)
    model.set_attn_implementation(interface.NAME)
    monkeypatch.setenv("SPECMM_KERNELS", "triton")
    target = VLMTarget(model, Processor())  # which asks the model anew
    calls, real = [], interface.tree_attention
    monkeypatch.setattr(interface, "tree_attention", lambda *given: calls.append(1) or real(*given))
    found = rounds(target, prompt, device)
    assert len(calls) == 6  # two layers in three rounds
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_variable_overrides_and_is_checked(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("SPECMM_KERNELS", raising=False)
    assert backend(cpu) == "torch"
    monkeypatch.setenv("SPECMM_KERNELS", "cuda")
    with pytest.raises(ValueError, match="must be one of auto, triton, torch, got 'cuda'"):
        backend(cpu)
    monkeypatch.setenv("SPECMM_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="needs tensors on a GPU, got cpu"):
        backend(cpu)


@pytest.mark.slow
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    """Some of them; ``python -m benchmarks.gpu.compiles`` has all."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "benchmarks.gpu.compiles", "sm_86", "gfx942", "--each", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sm_86: ") == done.stdout.count("gfx942: ") >= 5
