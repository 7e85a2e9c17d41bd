"""Folders that lack weights are refused by the weights' names, and none runs its own code."""

import json
import shutil

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from specmm.hf.drafters.drafting import load_drafter
from specmm.hf.loading.pretrained import (
    load_config,
    load_model,
    load_processor,
    load_target,
    load_tokenizer,
)
from specmm.image_ar.tokens.captions import CaptionEncoder
from specmm.vlm.verdict import Experts
from tests.commands import run
from tests.tiny.chats import undrafted

MATRICES = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"]


def rewritten(folder, change):
    """``folder`` with the tensors that ``change`` makes of its own."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def without(*names):
    return lambda state: {k: v for k, v in state.items() if k not in names}


def renamed(state):
    return {k.replace(".layers.", ".blocks."): v for k, v in state.items()}


def cut(state):
    return state | {MATRICES[0]: state[MATRICES[0]][:-1].contiguous()}


def merge(file, **facts):
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


@pytest.fixture
def copy(text_folder, tmp_path):
    """A text model without drafters, to be changed at will."""
    return undrafted(text_folder, tmp_path / "copy")


def complete(folder, *options, **given):
    return run("complete", folder, "--prompt", "def f", "--max-new-tokens", "4", *options, **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(*MATRICES), f"2 missing: {', '.join(MATRICES)}; fetch it again"),
        (renamed, "unexpected: model.blocks.0.input_layernorm.weight, "),
        (cut, f"1 wrong-shaped: {MATRICES[0]} [47, 32] for [48, 32]; fetch it again"),
    ],
)
def test_complete_refuses_weights_that_are_not_the_model_s(copy, change, message):
    result = complete(rewritten(copy, change))
    assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_a_config_that_counts_fewer_layers_is_refused(copy):
    merge(copy / "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    said = r"12 unexpected: model\.layers\.1\.input_layernorm\.weight"
    with pytest.raises(ValueError, match=said):
        load_target(copy)


def test_tied_weights_and_those_of_another_task_may_be_missing_and_there(
    make_qwen2, tmp_path, caplog
):
    tied = make_qwen2(50, 0, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    rewritten(tmp_path, lambda state: state | {"score.weight": torch.zeros(2, 32)})
    found = load_model(tf.AutoModelForCausalLM, tmp_path)
    assert torch.equal(found.lm_head.weight, tied.lm_head.weight)
    assert "not used by Qwen2ForCausalLM: score.weight" in caplog.text


@pytest.mark.parametrize(
    ("kind", "place"),
    [("text-draft", "text"), ("deer", "deer"), ("block", "block"), ("diffuspec", "diffusion")],
)
def test_drafters_that_lack_a_weight_are_refused(text_folder, text_pipe, tmp_path, kind, place):
    copy = shutil.copytree(text_folder / "drafters" / place, tmp_path / place)
    name = next(
        k for k in load_file(copy / "model.safetensors") if k.endswith("mlp.up_proj.weight")
    )
    with pytest.raises(ValueError, match=f"1 missing: {name}"):
        load_drafter(kind, rewritten(copy, without(name)), text_pipe.model)


@pytest.fixture
def llava_folder(text_folder, tmp_path):
    """A tiny LLaVA with a processor, to be changed at will."""
    folder = tmp_path / "llava"
    sizes = dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=2)
    vision = dict(
        model_type="clip_vision_model", intermediate_size=24, image_size=8, patch_size=4, **sizes
    )
    text = sizes | dict(model_type="llama", vocab_size=300, intermediate_size=48)
    text["max_position_embeddings"] = 64
    config = tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=299)
    tf.LlavaForConditionalGeneration(config).save_pretrained(folder)
    words = load_tokenizer(text_folder)
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    pictures = tf.CLIPImageProcessor(size={"height": 8, "width": 8}, do_center_crop=False)
    tf.LlavaProcessor(pictures, words, patch_size=4, image_token="<image>").save_pretrained(folder)
    return folder


def lacking(folder):
    """``folder`` without a matrix of its language model, and that matrix's name in the file."""
    names = load_file(folder / "model.safetensors")
    name = next(k for k in names if "vision" not in k and k.endswith("layers.0.mlp.up_proj.weight"))
    return rewritten(folder, without(name))


@pytest.mark.parametrize("change", [None, renamed])
def test_ask_refuses_a_llava_whose_language_model_is_not_there(llava_folder, tmp_path, change):
    folder = lacking(llava_folder) if change is None else rewritten(llava_folder, change)
    result = run("ask", folder, "--question", "def")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.stderr
    assert "must hold exactly the weights of the LlavaForConditionalGeneration" in result.stderr
    assert "missing: model.language_model.layers.0." in result.stderr


def test_experts_and_small_models_that_lack_a_weight_are_refused(llava_folder, tmp_path):
    experts = tmp_path / "experts"
    lacking(shutil.copytree(llava_folder, experts / "1"))
    with pytest.raises(ValueError, match=r"1 missing: model\.language_model\.layers\.0\.mlp"):
        Experts.load(experts, torch.float32, "cpu")
    target = tf.LlavaForConditionalGeneration.from_pretrained(llava_folder)
    with pytest.raises(ValueError, match=r"1 missing: model\.language_model\.layers\.0\.mlp"):
        load_drafter("vlm-draft", experts / "1", target)


def test_a_text_encoder_that_lacks_a_weight_is_refused(text_folder, tmp_path):
    config = tf.T5Config(vocab_size=280, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    tf.T5ForConditionalGeneration(config).save_pretrained(tmp_path)  # with a decoder, as published
    load_tokenizer(text_folder).save_pretrained(tmp_path)
    CaptionEncoder(tmp_path)
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    with pytest.raises(ValueError, match=f"1 missing: {name}"):
        CaptionEncoder(rewritten(tmp_path, without(name)))


CODE = "import pathlib\npathlib.Path({!r}).write_text('ran')\nfrom transformers import {} as {}\n"


def bringing(folder, config, auto, base, name):
    """``folder`` with a Python file that says ``name`` is its class for ``auto``, and leaves a file
    when it runs.
    """
    marker = folder.parent / "ran"
    (folder / "brought.py").write_text(CODE.format(str(marker), base, name))
    said = [f"brought.{name}", None] if auto == "AutoTokenizer" else f"brought.{name}"
    merge(folder / config, auto_map={auto: said})
    return marker


def as_dream(folder):
    """The tokenizer in ``folder`` in the files that Dream's has, without a tokenizer.json."""
    bpe = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(bpe["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in bpe["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer.json").unlink()


@pytest.fixture
def dream(text_folder, tmp_path):
    """A diffusion model whose tokenizer is a class that its folder brings, beside a target; the
    file if it runs.
    """
    folder = shutil.copytree(text_folder, tmp_path / "copy")
    drafter = folder / "drafters" / "diffusion"
    load_tokenizer(text_folder).save_pretrained(drafter)
    merge(drafter / "tokenizer_config.json", tokenizer_class="DreamTokenizer")
    base = "PreTrainedTokenizerFast"
    return (
        folder,
        drafter,
        bringing(drafter, "tokenizer_config.json", "AutoTokenizer", base, "DreamTokenizer"),
    )


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.json"])
def test_a_dream_folder_s_tokenizer_is_read_and_its_code_never_runs(dream, text_folder, files):
    folder, drafter, marker = dream
    if files == "vocab.json":
        as_dream(drafter)
    result = complete(folder, "--method", "diffuspec", input="y\ny\ny\n")
    assert result.exit_code == 0 and not marker.exists(), result.stderr
    assert "custom code" not in result.output
    found, own = load_tokenizer(drafter), load_tokenizer(text_folder)
    for text in ("def add(a, b):\n", "    return b"):
        assert found.decode(found(text)["input_ids"]) == text
        assert found(text)["input_ids"] == own(text)["input_ids"]


def test_a_tokenizer_that_only_its_code_reads_is_refused(dream):
    folder, drafter, marker = dream
    as_dream(drafter)
    merge(drafter / "tokenizer_config.json", tokenizer_class="OtherTokenizer")
    result = complete(folder, "--method", "diffuspec", input="y\ny\ny\n")
    assert result.exit_code == 2 and not marker.exists() and result.stderr.count("\n") == 1
    told = "got OtherTokenizer in Python files, which never run here; put a tokenizer.json"
    assert told in result.stderr


def test_a_model_that_only_its_code_knows_is_refused(copy):
    merge(copy / "config.json", model_type="brought")
    marker = bringing(copy, "config.json", "AutoConfig", "Qwen2Config", "BroughtConfig")
    result = complete(copy, input="y\ny\ny\n")
    assert result.exit_code == 2 and not marker.exists() and "never run here" in result.stderr
    assert "trust_remote_code" not in result.output and result.stderr.count("\n") == 1
    with pytest.raises(ValueError, match="never run here; use a conversion"):
        load_config(copy)


def test_a_processor_s_code_does_not_run(llava_folder, monkeypatch):
    file = next(llava_folder.glob("processor_config.json"))
    merge(file, processor_class="BroughtProcessor")
    marker = bringing(
        llava_folder, file.name, "AutoProcessor", "LlavaProcessor", "BroughtProcessor"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    said = r"got BroughtProcessor with Python files .* never run here"
    with pytest.raises(ValueError, match=said):
        load_processor(llava_folder)
    assert not marker.exists()


def test_a_processor_s_tokenizer_runs_no_code(llava_folder, monkeypatch):
    merge(llava_folder / "tokenizer_config.json", tokenizer_class="BroughtTokenizer")
    base = "PreTrainedTokenizerFast"
    marker = bringing(
        llava_folder, "tokenizer_config.json", "AutoTokenizer", base, "BroughtTokenizer"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert load_processor(llava_folder).tokenizer("def")["input_ids"] and not marker.exists()
