"""Models with PEFT's adapters are answered for as PEFT's own generate answers, or refused."""

import json
import shutil

import peft
import pytest
import torch
import transformers as tf

import specmm
from tests.integration.conftest import save_text
from tests.noisy import noisy
from tests.tiny import vlm_folders

PROMPT = "def add(a, b):\n"
LENGTH = 16
LORA = dict(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"])
VIRTUAL = {
    "PROMPT_TUNING": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "P_TUNING": peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text(tmp_path_factory.mktemp("base"))


@pytest.fixture
def base(folder):
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def words(folder):
    return tf.AutoTokenizer.from_pretrained(folder)


def adapted(model):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **LORA)).eval()


def tokens_of(model, words, **options):
    inputs = words(PROMPT, return_tensors="pt")
    given = {k: v for k, v in inputs.items() if k != "token_type_ids"}
    found = model.generate(**given, max_new_tokens=LENGTH, do_sample=False, **options)
    return found[0, inputs["input_ids"].shape[1] :].tolist()


def answer(pipe, method="ar"):
    return pipe(PROMPT, max_new_tokens=LENGTH, method=method).tokens[0].tolist()


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "block"])
def test_answers_are_those_of_peft(base, folder, words, method):
    plain = tokens_of(base, words)
    model = adapted(base)
    wanted = tokens_of(model, words)
    assert wanted != plain
    pipe = specmm.TextPipeline(model, words, folder=folder)
    assert answer(pipe, method) == wanted
    with model.disable_adapter():
        assert answer(pipe, method) == plain
    assert answer(pipe, method) == wanted
    model.merge_adapter()
    assert answer(pipe, method) == tokens_of(model, words)
    model.unmerge_adapter()
    assert answer(pipe, method) == tokens_of(model, words)
    fn = specmm.custom_generate(method="prompt-lookup")
    assert tokens_of(model, words, custom_generate=fn) == tokens_of(model, words)


def test_a_folder_that_peft_wrote_is_its_base_with_the_adapter(base, folder, words, tmp_path):
    model = adapted(base)
    wanted = tokens_of(model, words)
    model.save_pretrained(tmp_path / "adapter")
    pipe = specmm.TextPipeline.from_pretrained(
        tmp_path / "adapter", "block", torch_dtype=torch.float32
    )
    assert answer(pipe, "block") == wanted
    pipe.save_pretrained(tmp_path / "again")
    again = specmm.TextPipeline.from_pretrained(tmp_path / "again", torch_dtype=torch.float32)
    assert answer(again) == wanted
    facts = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    shutil.copytree(folder, tmp_path / "adapter/base")
    facts["base_model_name_or_path"] = "base"  # beside it
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(facts))
    moved = specmm.TextPipeline.from_pretrained(tmp_path / "adapter", torch_dtype=torch.float32)
    assert answer(moved) == wanted


def test_questions_about_pictures(tmp_path):
    vlm_folders.save("qwen2.5-vl", tmp_path / "base")
    pipe = specmm.VQAPipeline.from_pretrained(tmp_path / "base", torch_dtype=torch.float32)
    plain = pipe(noisy((16, 16), 1), "hello:", max_new_tokens=LENGTH).tokens[0].tolist()
    model = adapted(pipe.model)
    model.save_pretrained(tmp_path / "adapter")
    given = specmm.VQAPipeline(model, pipe.processor)
    found = specmm.VQAPipeline.from_pretrained(tmp_path / "adapter", torch_dtype=torch.float32)
    for method in ("ar", "prompt-lookup"):
        for each in (given, found):
            out = each(noisy((16, 16), 1), "hello:", max_new_tokens=LENGTH, method=method)
            merged = specmm.VQAPipeline(adapted_twin(tmp_path), pipe.processor)
            own = merged(noisy((16, 16), 1), "hello:", max_new_tokens=LENGTH)
            assert out.tokens[0].tolist() == own.tokens[0].tolist() != plain


def adapted_twin(folder):
    """The model with its adapter merged into its weights, by PEFT."""
    pipe = specmm.VQAPipeline.from_pretrained(folder / "base", torch_dtype=torch.float32)
    return peft.PeftModel.from_pretrained(pipe.model, folder / "adapter").merge_and_unload()


@pytest.mark.parametrize("kind", VIRTUAL)
def test_virtual_tokens_are_refused(base, words, kind):
    model = peft.get_peft_model(base, VIRTUAL[kind]).eval()
    with pytest.raises(ValueError, match=f"as LoRA, got {kind}, whose virtual tokens"):
        specmm.TextPipeline(model, words)
    fn = specmm.custom_generate(method="prompt-lookup")
    tokens_of(base, words, custom_generate=fn)  # what is known of the base says nothing of it
    with pytest.raises(ValueError, match="its generate adds to the prompt's tokens"):
        tokens_of(model, words, custom_generate=fn)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"{}"), "must hold an adapter of"),
        (lambda f: named(f, "/nowhere"), "'/nowhere' is no folder"),
        (lambda f: named(f, None), "must name its base as 'base_model_name_or_path', got None"),
        (
            lambda f: named(f, str(f.parent / "wider")),
            "must hold an adapter of Qwen2ForCausalLM wi",
        ),
    ],
)
def test_mistakes_are_one_sentence(base, words, tmp_path, make_qwen2, damage, sentence):
    adapted(base).save_pretrained(tmp_path / "adapter")
    make_qwen2(len(words), 0, hidden_size=64).save_pretrained(tmp_path / "wider")
    words.save_pretrained(tmp_path / "wider")
    damage(tmp_path / "adapter")
    with pytest.raises(ValueError, match=sentence) as caught:
        specmm.TextPipeline.from_pretrained(tmp_path / "adapter")
    assert "\n" not in str(caught.value)


def named(folder, base):
    file = folder / "adapter_config.json"
    facts = json.loads(file.read_text()) | {"base_model_name_or_path": base}
    file.write_text(json.dumps(facts))
