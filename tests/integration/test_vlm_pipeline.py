"""``VQAPipeline`` and ``specmm ask`` on a tiny random LLaVA with a real processor and every drafter
beside it.
"""

import shutil

import pytest
import torch
import transformers as tf

import specmm
from specmm import methods
from specmm.vlm.loading import load_model
from tests.commands import as_json, refused, succeed
from tests.noisy import noisy
from tests.tiny import processors
from tests.tiny.parts import CLIP, IDS, SIZES, ending, shaken
from tests.tiny.processors import word_tokenizer

WORDS = [*processors.WORDS, *["and", "are", "in", "it"]]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
TEMPLATE = (
    "<s>{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}"
    "{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)
TEXT = SIZES | dict(max_position_embeddings=64)


def llava(seed, vocabulary):
    config = tf.LlavaConfig(
        vision_config=CLIP,
        text_config=TEXT | IDS | dict(model_type="llama", vocab_size=vocabulary),
        image_token_index=4,
        image_seq_length=4,
    )
    return ending(shaken(tf.LlavaForConditionalGeneration(config), seed), 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model, its processor, and drafters: a text model of other words, a small VLM."""
    folder = tmp_path_factory.mktemp("llava")
    words = word_tokenizer(SPECIAL, WORDS)
    pictures = tf.CLIPImageProcessor(**processors.CROPPED)
    processor = tf.LlavaProcessor(pictures, words, chat_template=TEMPLATE, **processors.CLIP)
    for place, seed in ((folder, 0), (folder / "drafters" / "vlm", 1)):
        llava(seed, len(words)).save_pretrained(place)
        processor.save_pretrained(place)
    others = word_tokenizer(SPECIAL, [*sorted(WORDS)[3:], "else", "other"])
    config = tf.LlamaConfig(vocab_size=len(others), **TEXT)
    shaken(tf.LlamaForCausalLM(config), 2).save_pretrained(folder / "drafters" / "text")
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
    images = [pictures[0], pictures[1:], None]
    questions = ["what is this", "how many red dog", "where is it"]
    out = pipe(images, questions, max_new_tokens=12, method=method)
    plain = pipe(images, questions, max_new_tokens=12)
    assert out.answers == plain.answers
    assert out.certificate.kind == plain.certificate.kind == "exact"
    assert out.stats.tau >= 1 and out.method == method
    text, how = "<s><image> what is this ", dict(return_tensors="pt", add_special_tokens=False)
    one = pipe.processor(text=text, images=pictures[:1], **how)
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
    shown, asked = [pictures[0], None], ["what is this", "how many"]
    both = pipe(shown, asked, generator=[made(s) for s in seeds], **options)
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
        said = "a raw prompt must hold one <image> for each of its 1 pictures"
        with pytest.raises(ValueError, match=said):
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
    strange = shaken(tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=4000, **TEXT)), 0)
    other = specmm.VQAPipeline(pipe.model, pipe.processor, "text-draft", strange)
    said = "drafter must share the target's vocabulary of 27 tokens, got 4000"
    with pytest.raises(ValueError, match=said):
        other(pictures[0], "what is this", max_new_tokens=4)


@pytest.fixture
def asked(folder, pictures, tmp_path):
    """Words of ``specmm ask`` on the tiny model."""
    pictures[0].save(tmp_path / "a.png")
    return "ask", folder, tmp_path / "a.png", "--question"


def test_ask_prints_one_json_object(asked, pipe, pictures):
    words = "--method prompt-lookup --max-new-tokens 9 --seed 3"
    report = as_json(*asked, "what is this", *words.split())
    assert report["outputs"] == pipe(pictures[0], "what is this", max_new_tokens=9).answers
    assert report["method"] == "prompt-lookup" and report["seed"] == 3
    assert report["certificate"]["kind"] == "exact"
    assert {"model", "seconds", "tokens", "rounds", "tau"} <= report.keys()


def test_ask_takes_options_of_the_method(asked):
    words = "--method text-draft -o tree=2,1 --max-new-tokens 9"
    assert "certificate  exact" in succeed(*asked, "what is this", *words.split()).stderr


def test_a_users_mistake_is_one_line(asked, folder, tmp_path):
    (tmp_path / "text.png").write_text("hello")
    assert "must be a picture" in refused("ask", folder, tmp_path / "text.png", "-q", "what")
    assert "question must not be empty" in refused(*asked, " ")


def test_folders_that_hold_something_else(folder, tmp_path):
    with pytest.raises(ValueError, match=r"must hold a config\.json"):
        specmm.VQAPipeline.from_pretrained(tmp_path)
    said = "must hold a vision-language model, got model type 'llama'"
    with pytest.raises(ValueError, match=said):
        specmm.VQAPipeline.from_pretrained(folder / "drafters" / "text")
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    with pytest.raises((ValueError, OSError)):
        specmm.VQAPipeline.from_pretrained(tmp_path)


def test_a_processor_that_needs_a_package_says_which(folder, monkeypatch):
    def without(*_):
        raise ImportError(
            "Package `num2words` is required.\nInstall it with `pip install num2words`."
        )

    monkeypatch.setattr("specmm.hf.loading.pretrained.load_processor", without)
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
    assert methods.make(methods.VQA, "text-draft", tree=(2, 1)) == methods.TextDraft((2, 1))
    with pytest.raises(ValueError, match="did you mean 'ngram'"):
        methods.make(methods.VQA, "prompt-lookup", ngramm=2)
