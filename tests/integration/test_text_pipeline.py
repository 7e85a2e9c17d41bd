"""``TextPipeline`` and ``specmm complete`` on a tiny random Qwen2 with every drafter beside it."""

import json

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from typer.testing import CliRunner

import specmm
from specmm import methods
from specmm.cli import app
from specmm.diffusion_drafters.data.code import build_tokenizer
from specmm.diffusion_drafters.diffuspec.ngram import fit
from specmm.diffusion_drafters.loading import PROXY
from specmm.diffusion_drafters.models.causal import CausalPrefix, save_deer, share
from specmm.diffusion_drafters.models.dflash import DFlash, DFlashConfig, save_dflash

TEXT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n" * 3
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=160,
)
DRAFTING = ["diffuspec", "specdiff", "deer", "block", "text-draft", "prompt-lookup"]
PROMPTS = ["def add(a, b):\n", "x", "    return a + b + a"]


def shaken(model, seed, std=0.3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, std, generator=generator)
    return model


def qwen2(vocabulary, seed, layers=2, **changes):
    config = tf.Qwen2Config(vocab_size=vocabulary, num_hidden_layers=layers, **(SIZES | changes))
    model = shaken(tf.Qwen2ForCausalLM(config), seed)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 0, 1
    return model


def write_drafters(folder, target, words):
    """A diffusion model with its proxy, a DEER and a DFlash drafter, a language model; the former are disturbed copies
    of the target, so that something is accepted."""
    size, mask = len(words), words.mask_token_id
    near = qwen2(size, 0)
    near.save_pretrained(folder / "text")
    facts = near.config.to_dict() | {"model_type": "Dream", "mask_token_id": mask, "eos_token_id": 0}
    (folder / "diffusion").mkdir()
    (folder / "diffusion" / "config.json").write_text(json.dumps(facts))
    save_file({k: v for k, v in near.state_dict().items()}, folder / "diffusion" / "model.safetensors")
    fit([words(TEXT)["input_ids"]], size).save(folder / "diffusion" / PROXY)
    inner = qwen2(size, 5, layers=1)
    share(inner, target)
    save_deer(CausalPrefix(inner, mask, 5, 0, shared=True), folder / "deer", torch.float32)
    sizes = tf.Qwen3Config(vocab_size=size, num_hidden_layers=1, head_dim=8, attn_implementation="sdpa", **SIZES)
    block = shaken(DFlash(DFlashConfig(sizes, 5, mask, (0, 1))), 4)
    save_dflash(block, folder / "block", target.get_input_embeddings().weight, torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = build_tokenizer([TEXT], 280)
    target = qwen2(len(words), 0)
    target.save_pretrained(folder)
    words.save_pretrained(folder)
    write_drafters(folder / "drafters", target, words)
    return folder


@pytest.fixture(scope="module")
def pipe(folder):
    return specmm.TextPipeline.from_pretrained(folder, torch_dtype=torch.float32)


@pytest.mark.parametrize("method", DRAFTING)
def test_greedy_texts_are_those_of_generate(pipe, method):
    out, plain = pipe(PROMPTS, method=method, max_new_tokens=14), pipe(PROMPTS, max_new_tokens=14)
    assert out.texts == plain.texts and out.certificate.kind == plain.certificate.kind == "exact"
    assert out.stats.tau >= 1 and len(out.stats.depths) == out.stats.batch_rounds and out.method == method
    one = pipe.tokenizer(PROMPTS[0], return_tensors="pt")
    wanted = pipe.model.generate(**one, max_new_tokens=14, do_sample=False)[0, one["input_ids"].shape[1] :]
    assert torch.equal(out.tokens[0], wanted)


@pytest.mark.parametrize("method", DRAFTING)
def test_a_row_has_its_own_dice_whatever_its_batch(pipe, method):
    options = dict(method=method, temperature=1.0, max_new_tokens=10)
    together = pipe(PROMPTS, seed=[5, 6, 7], **options)
    for text, prompt, seed in zip(together.texts, PROMPTS, [5, 6, 7], strict=True):
        assert pipe(prompt, seed=[seed], **options).texts == [text]


@pytest.mark.parametrize(
    "method",
    [
        methods.DEER(tree=9),
        methods.DEER(length=2),
        methods.DEER(sure=0.3),
        methods.Block(tree=6),
        methods.Block(sure=0.3),
        methods.DiffuSpec(search=False),
        methods.DiffuSpec(adaptive=False, beam=0, most=4),
        methods.SpecDiff(length=4, steps=4),
    ],
    ids=str,
)
def test_options_of_methods_keep_greedy_texts(pipe, method):
    assert pipe(PROMPTS, method=method, max_new_tokens=12).texts == pipe(PROMPTS, max_new_tokens=12).texts


def test_point_masses_of_several_steps_are_exact_too(pipe):
    out = pipe(PROMPTS, method=methods.SpecDiff(4, 2, point=True), temperature=1.0, seed=3, max_new_tokens=8)
    assert out.certificate.kind == "exact" and "point mass" in str(out.certificate)


def test_streams_join_to_the_texts_and_stops_end_them(pipe):
    whole = pipe(PROMPTS, method="deer", max_new_tokens=16).texts
    parts = list(pipe.stream(PROMPTS, method="deer", max_new_tokens=16))
    assert ["".join(row) for row in zip(*parts, strict=True)] == whole
    stop = whole[0][3:6]
    cut = pipe(PROMPTS, method="deer", max_new_tokens=16, stop=[stop, "\0"])
    assert cut.texts == [text.split(stop)[0] for text in whole]
    held = list(pipe.stream(PROMPTS, method="deer", max_new_tokens=16, stop=stop))
    assert ["".join(row) for row in zip(*held, strict=True)] == cut.texts
    assert len(cut.tokens[0]) < 16


def test_generate_with_drafters_of_text(pipe):
    one = pipe.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    wanted = pipe.model.generate(**one, max_new_tokens=10, do_sample=False)
    for method in ("deer", "block", "diffuspec", "specdiff"):
        how = specmm.custom_generate(drafter=pipe.drafter(method), method=method)
        got = pipe.model.generate(**one, max_new_tokens=10, do_sample=False, custom_generate=how)
        assert torch.equal(got, wanted), method


def test_the_controller_leaves_a_trace(pipe):
    out = pipe(PROMPTS, method=methods.DiffuSpec(least=2, most=4, step=1), max_new_tokens=12)
    assert len(out.trace) == 3 and all(kept <= drafted for row in out.trace for drafted, kept in row)
    assert max(out.stats.depths) <= 5 and len(out.stats.accepted_by_position) >= 4


def test_models_with_learnt_positions_stand_the_last_block(pipe, folder):
    """A block drafted close to the end of the target's context reaches beyond it."""
    config = tf.GPT2Config(vocab_size=len(pipe.tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=24)
    model = shaken(tf.GPT2LMHeadModel(config), 2)
    model.generation_config.eos_token_id = 0
    other = specmm.TextPipeline(model, pipe.tokenizer)
    length = 24 - len(other.encode(PROMPTS[0])[0])
    plain = other(PROMPTS[0], max_new_tokens=length)
    assert other(PROMPTS[0], method="prompt-lookup", max_new_tokens=length).texts == plain.texts
    with pytest.raises(ValueError, match="24 positions"):
        other(PROMPTS[0], max_new_tokens=length + 1)


def test_complete_prints_texts_and_how_drafting_went(folder):
    run = CliRunner().invoke(app, ["complete", str(folder), "-p", PROMPTS[0], "--method", "diffuspec", "--json"])
    found = json.loads(run.stdout)
    wanted = "model method seed seconds tokens rounds tau certificate outputs accepted_by_position controller"
    assert run.exit_code == 0 and set(wanted.split()) <= set(found) and found["certificate"]["kind"] == "exact"
    run = CliRunner().invoke(app, ["complete", str(folder), "-p", "a", "-p", "b", "--method", "deer", "-o", "tree=5"])
    assert run.exit_code == 0 and "accepted by position" in run.stderr and "draft " in run.stderr
