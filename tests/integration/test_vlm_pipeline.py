"""``VQAPipeline`` and ``specmm ask`` on a tiny random LLaVA with a real processor and every drafter
beside it.
"""

import json
import shutil

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import specmm
from specmm import methods
from specmm.vlm.loading import load_model
from tests.noisy import noisy

TALK = (
    "what is this where how many colour red blue green a the one two three dog cat box and are "
    "in it"
)
WORDS = TALK.split()
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
TEMPLATE = (
    "<s>{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}"
    "{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)
TEXT = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
CLIP = dict(
    model_type="clip_vision_model",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=8,
    patch_size=4,
)


def tokenizer(words):
    vocabulary = {word: i for i, word in enumerate(SPECIAL + words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )


def random_weights(model, seed, std=0.25):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, std, generator=generator)
    return model


def llava(seed, vocabulary):
    ids = dict(vocab_size=vocabulary, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = tf.LlavaConfig(
        vision_config=CLIP,
        text_config=dict(model_type="llama", **TEXT, **ids),
        image_token_index=4,
        image_seq_length=4,
    )
    model = random_weights(tf.LlavaForConditionalGeneration(config), seed)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model, its processor, and drafters: a text model of other words, a small VLM."""
    folder = tmp_path_factory.mktemp("llava")
    words = tokenizer(WORDS)
    pictures = tf.CLIPImageProcessor(
        size={"height": 8, "width": 8}, crop_size={"height": 8, "width": 8}
    )
    processor = tf.LlavaProcessor(
        pictures,
        words,
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )
    for place, seed in ((folder, 0), (folder / "drafters" / "vlm", 1)):
        llava(seed, len(words)).save_pretrained(place)
        processor.save_pretrained(place)
    others = tokenizer([*sorted(WORDS)[3:], "else", "other"])
    config = tf.LlamaConfig(vocab_size=len(others), **TEXT)
    random_weights(tf.LlamaForCausalLM(config), 2).save_pretrained(folder / "drafters" / "text")
    others.save_pretrained(folder / "drafters" / "text")
    return folder


@pytest.fixture(scope="module")
def pipe(folder):
    return specmm.VQAPipeline.from_pretrained(folder, torch_dtype=torch.float32)


@pytest.fixture
def pictures():
    return [noisy((20, 12), 80 + 40 * i).convert("RGB") for i in range(3)]


def test_an_expert_drafts_where_no_other_small_model_does(folder, pictures, tmp_path):
    place = shutil.copytree(folder, tmp_path / "model")
    (place / "drafters" / "experts").mkdir()
    (place / "drafters" / "vlm").rename(place / "drafters" / "experts" / "1")
    found = specmm.VQAPipeline.from_pretrained(place, torch_dtype=torch.float32)
    asked = (pictures[0], "how many red dog")
    out = found(*asked, max_new_tokens=12, method="vlm-draft")
    assert torch.equal(out.tokens[0], found(*asked, max_new_tokens=12).tokens[0])
    assert isinstance(found.drafter("vlm-draft").model, tf.LlavaForConditionalGeneration)


SPECULATIVE = ["prompt-lookup", "text-draft", "vlm-draft"]


@pytest.mark.parametrize("method", SPECULATIVE)
def test_greedy_answers_are_those_of_generate(pipe, pictures, method):
    images, questions = (
        [pictures[0], pictures[1:], None],
        ["what is this", "how many red dog", "where is it"],
    )
    out = pipe(images, questions, max_new_tokens=12, method=method)
    plain = pipe(images, questions, max_new_tokens=12)
    assert (
        out.answers == plain.answers and out.certificate.kind == plain.certificate.kind == "exact"
    )
    assert out.stats.tau >= 1 and out.method == method
    one = pipe.processor(
        text="<s><image> what is this ",
        images=pictures[:1],
        return_tensors="pt",
        add_special_tokens=False,
    )
    wanted = pipe.model.generate(**one, max_new_tokens=12, do_sample=False)[
        0, one["input_ids"].shape[1] :
    ]
    assert torch.equal(out.tokens[0], wanted)


@pytest.mark.parametrize("method", ["ar", *SPECULATIVE])
def test_an_answer_depends_on_its_own_stream(pipe, pictures, method):
    options = dict(
        method=method, temperature=1.2, top_p=0.95, repetition_penalty=1.2, max_new_tokens=10
    )
    seeds = [3, 4]
    made = lambda s: torch.Generator().manual_seed(s)  # noqa: E731
    both = pipe(
        [pictures[0], None],
        ["what is this", "how many"],
        generator=[made(s) for s in seeds],
        **options,
    )
    for i, (image, question) in enumerate(
        zip([pictures[0], None], ["what is this", "how many"], strict=True)
    ):
        alone = pipe(image, question, generator=[made(seeds[i])], **options)
        assert torch.equal(alone.tokens[0], both.tokens[i])


def test_streamed_text_joins_to_the_answer(pipe, pictures):
    options = dict(max_new_tokens=12, temperature=1.0, seed=5, method="prompt-lookup")
    parts = list(pipe.stream(pictures[:2], "what is this and this", **options))
    answer = pipe(pictures[:2], "what is this and this", **options).answers
    assert ["".join(p).strip() for p in zip(*parts, strict=True)] == answer
    assert len(parts) > 2


def test_a_raw_prompt(pipe, pictures):
    chat = pipe(pictures[0], "what is this", max_new_tokens=8)
    raw = pipe(pictures[0], "<s><image> what is this ", max_new_tokens=8, chat=False)
    assert chat.answers == raw.answers
    for text in ("<s> what is this", "<s><image><image> what is this"):
        with pytest.raises(
            ValueError, match="a raw prompt must hold one <image> for each of its 1 pictures"
        ):
            pipe(pictures[0], text, chat=False)


MISTAKES = {
    "empty question": (lambda p, i: p(i[0], "  "), "question must not be empty"),
    "placeholder": (lambda p, i: p(i[0], "what <image>"), "question must not hold the placeholder"),
    "numbers": (
        lambda p, i: p(i[:2], ["what", "is", "it"]),
        "an entry for each of the 3 questions, got 2",
    ),
    "overflow": (lambda p, i: p(i[0], "what " * 70), "must fit the 64 positions"),
    "option": (lambda p, i: p(i[0], "what", max_tokens=3), "did you mean 'max_new_tokens'"),
    "method": (lambda p, i: p(i[0], "what", method="prompt-look"), "did you mean 'prompt-lookup'"),
    "no drafter": (
        lambda p, i: p(i[0], "what", method="msd", max_new_tokens=4),
        "none in drafters/msd",
    ),
    "seeds": (
        lambda p, i: p(i[0], "what", seed=1, generator=torch.Generator(), max_new_tokens=4),
        "seed or generator, not both",
    ),
    "length": (lambda p, i: p(i[0], "what", max_new_tokens=0), "max_new_tokens must be at least 1"),
}


@pytest.mark.parametrize(("call", "says"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_explained(pipe, pictures, call, says):
    with pytest.raises(ValueError, match=says):
        call(pipe, pictures)


def test_a_drafter_of_another_vocabulary_is_refused(folder, pipe, pictures):
    strange = random_weights(tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=4000, **TEXT)), 0)
    other = specmm.VQAPipeline(pipe.model, pipe.processor, "text-draft", strange)
    with pytest.raises(
        ValueError, match="drafter must share the target's vocabulary of 27 tokens, got 4000"
    ):
        other(pictures[0], "what is this", max_new_tokens=4)


@pytest.fixture
def asked(folder, pictures, tmp_path):
    """``specmm ask`` on the tiny model."""
    from specmm.cli import app

    pictures[0].save(tmp_path / "a.png")

    def run(*args):
        return CliRunner().invoke(app, ["ask", str(folder), str(tmp_path / "a.png"), *args])

    return run


def test_ask_prints_one_json_object(asked, pipe, pictures):
    words = "--method prompt-lookup --max-new-tokens 9 --seed 3 --json"
    ran = asked("--question", "what is this", *words.split())
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert report["outputs"] == pipe(pictures[0], "what is this", max_new_tokens=9).answers
    assert (
        report["method"] == "prompt-lookup"
        and report["seed"] == 3
        and report["certificate"]["kind"] == "exact"
    )
    assert {"model", "seconds", "tokens", "rounds", "tau"} <= report.keys()


def test_ask_takes_options_of_the_method(asked):
    words = "--method text-draft -o tree=2,1 --max-new-tokens 9"
    ran = asked("--question", "what is this", *words.split())
    assert ran.exit_code == 0, ran.output
    assert "certificate  exact" in ran.stderr


def test_a_users_mistake_is_one_line(asked, folder, tmp_path):
    (tmp_path / "text.png").write_text("hello")
    from specmm.cli import app

    ran = CliRunner().invoke(
        app, ["ask", str(folder), str(tmp_path / "text.png"), "--question", "what"]
    )
    assert ran.exit_code == 2 and "must be a picture" in ran.stderr and ran.stderr.count("\n") == 1
    ran = asked("--question", " ")
    assert ran.exit_code == 2 and "question must not be empty" in ran.stderr


def test_folders_that_hold_something_else(folder, tmp_path):
    with pytest.raises(ValueError, match=r"must hold a config\.json"):
        specmm.VQAPipeline.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="must hold a vision-language model, got model type 'llama'"
    ):
        specmm.VQAPipeline.from_pretrained(folder / "drafters" / "text")
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    with pytest.raises((ValueError, OSError)):
        specmm.VQAPipeline.from_pretrained(tmp_path)


def test_a_processor_that_needs_a_package_says_which(folder, monkeypatch):
    def without(*_):
        raise ImportError(
            "Package `num2words` is required.\nInstall it with `pip install num2words`."
        )

    monkeypatch.setattr("specmm.hf.pretrained.load_processor", without)
    with pytest.raises(ValueError, match=r"needs a package: Package `num2words`.*pip install num2"):
        specmm.VQAPipeline.from_pretrained(folder)


def test_models_are_asked_for_by_their_class_not_by_a_tower(tmp_path):
    """Emu3 sees, and has no vision_config; a tower alone does not answer."""
    tf.Emu3Config().save_pretrained(tmp_path / "emu3")
    with pytest.raises((ValueError, OSError), match=r"weights|file named|safetensors"):
        load_model(tmp_path / "emu3")
    tf.CLIPVisionConfig().save_pretrained(tmp_path / "clip")
    with pytest.raises(ValueError, match="vision-language model, got model type 'clip_vision_mo"):
        load_model(tmp_path / "clip")


def test_methods_are_dataclasses():
    assert methods.resolve_vqa("text-draft", tree=(2, 1)) == methods.TextDraft((2, 1))
    with pytest.raises(ValueError, match="did you mean 'ngram'"):
        methods.resolve_vqa("prompt-lookup", ngramm=2)
