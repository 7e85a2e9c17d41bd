"""Processors of transformers, asked how they want a question: who puts placeholders, what a
template takes, rows of every kind in one batch, videos.
"""

import importlib.util

import pytest
import torch
import transformers as tf

from specmm.vlm import wording
from specmm.vlm.asking import Questions
from tests.noisy import noisy
from tests.tiny.processors import (
    CROPPED,
    FILMS,
    NESTED,
    PROCESSORS,
    SPECIAL,
    llava,
    paligemma,
    template,
    tokenizer,
)

QUESTIONS = ["what is this", "how many red dog", "where is the box a", "one two three"]


@pytest.fixture(scope="module", params=PROCESSORS)
def name(request):
    if request.param == "smolvlm" and importlib.util.find_spec("num2words") is None:
        pytest.skip("SmolVLM's processor needs num2words")
    return request.param


@pytest.fixture(scope="module")
def processor(name):
    return PROCESSORS[name]()


@pytest.fixture(scope="module")
def shown(name):
    """Pictures of four questions (two, none, one, none) and the last one's video where the
    processor takes any; 14 is a whole number of Kimi's patches.
    """
    noise = [noisy((20, 12), 60 + 20 * i).convert("RGB") for i in range(7)]
    return [noise[:2], None, noise[2], None], [None] * 3 + [noise[3:] if name in FILMS else None]


def rows_of(inputs):
    pairs = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]


def test_a_row_is_what_it_is_alone(name, processor, shown):
    """Its tokens, and its pixels where they are not padded to those of other rows."""
    pictures, videos = shown
    both = Questions.of(pictures, QUESTIONS, videos=videos).inputs(processor)
    rows = rows_of(both)
    words = tokenizer()
    pixels = []
    for row, question in enumerate(QUESTIONS):
        held = [i for i in rows[row] if i >= len(SPECIAL)]
        assert words.decode(held) == question
        alone = Questions.of(pictures[row], question, videos=videos[row]).inputs(processor)
        assert rows[row] == rows_of(alone)[0]
        pixels += [alone["pixel_values"]] if "pixel_values" in alone else []
        per_token = {k: v for k, v in alone.items() if k in wording.PER_TOKEN}
        assert per_token.keys() == {k for k in both if k in wording.PER_TOKEN}
    if name not in NESTED:
        assert torch.equal(torch.cat(pixels), both["pixel_values"])
    assert "labels" not in both


def test_rows_without_pictures_may_come_first_and_last(name, processor, shown):
    """Some processors look for pictures in the first row, or forget rows after the last picture."""
    pictures, videos = shown
    order = [1, 0, 2, 3]
    moved = [[given[row] for row in order] for given in (pictures, QUESTIONS, videos)]
    found = Questions.of(*moved[:2], videos=moved[2]).inputs(processor)
    wanted = Questions.of(pictures, QUESTIONS, videos=videos).inputs(processor)
    assert rows_of(found) == [rows_of(wanted)[row] for row in order]
    assert found["input_ids"].shape == wanted["input_ids"].shape
    if name == "mllama":  # by row: pictures and the mask of who sees them
        for part in ("pixel_values", "aspect_ratio_ids", "cross_attention_mask"):
            assert torch.equal(found[part], wanted[part][order]) and len(found[part]) == 4
        assert found["cross_attention_mask"].shape[1] == found["input_ids"].shape[1]
    elif name not in NESTED:  # by picture, and their order is the same
        assert torch.equal(found["pixel_values"], wanted["pixel_values"])


def test_pictures_and_videos_become_placeholders(name, processor, shown):
    pictures, videos = shown
    inputs = Questions.of(pictures, QUESTIONS, videos=videos).inputs(processor)
    held = [sum(4 <= i < len(SPECIAL) for i in row) for row in rows_of(inputs)]
    assert min(held[0], held[2]) > held[1] == 0
    assert (held[3] > 0) == (name in FILMS)


def test_a_processor_without_videos_says_so(name, processor):
    if name in FILMS:
        return
    with pytest.raises(ValueError, match=r"videos need a model that takes them, got a .*Processor"):
        noise = noisy((20, 12), 60)
        Questions.of(None, "what is", videos=[noise, noise]).inputs(processor)


def test_it_begins_with_one_bos(name, processor):
    if name == "paligemma":
        return
    (row,) = rows_of(Questions.of(None, "what is").inputs(processor))
    assert row.count(1) == 1 and row[0] == 1


PICTURE = noisy((20, 12), 60)
TEXT_ONLY = "<s>{% for m in messages %} {{ m['content'] | trim }} {% endfor %}"


def ids(processor, *given, **options):
    return rows_of(Questions.of(*given, **options).inputs(processor))


def test_a_template_of_plain_text_gets_placeholders_before_the_question():
    ours = ids(llava(chat_template=TEXT_ONLY), [[PICTURE, PICTURE], None], ["what is", "where"])
    assert ours == ids(llava(), [[PICTURE, PICTURE], None], ["what is", "where"])


def test_a_template_may_be_the_tokenizer_s():
    made = llava(chat_template=None)
    made.tokenizer.chat_template = template()
    assert ids(made, PICTURE, "what is") == ids(llava(), PICTURE, "what is")


def test_a_template_may_trim_what_is_asked():
    lines = "{{ c['text'].split() | join(' ') }}"
    trimmed = template().replace("{{ c['text'] }}", lines)
    asked = ids(llava(chat_template=trimmed), PICTURE, " what \n\n is ")
    assert asked == ids(llava(), PICTURE, "what is")


def test_without_a_template_placeholders_come_before_the_question():
    text = tokenizer().decode(ids(llava(chat_template=None), PICTURE, "what is")[0])
    assert text.startswith("<image>") and text.endswith("what is")


@pytest.mark.parametrize(
    "bad",
    [
        "<s>{% for m in messages %}{{ m['content'][-1]['text'] }}{% endfor %}",  # no picture
        "{{ raise_exception('only tools') }}",
        "<s>{% for m in messages %}{% for c in m['content'] %}<image>{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_shows_no_picture_is_refused(bad):
    said = "the chat template must show all texts and a placeholder for each picture"
    with pytest.raises(ValueError, match=said):
        ids(llava(chat_template=bad), PICTURE, "what is")


def test_paligemma_puts_its_placeholders_itself(capfd):
    """Its own form is pictures, beginning, text; it splits texts where a row has no picture."""
    made = paligemma()
    first, second = ids(made, [None, PICTURE], ["what is this", "where"])
    pieces = made.tokenizer.convert_ids_to_tokens
    assert pieces(first) == ["<s>", "what", "is", "this"]
    assert pieces(second) == ["<image>"] * 4 + ["<s>", "where"]
    raw = ids(made, [None, PICTURE], ["what is this", "<image>where"], chat=False)
    assert raw == [first, second]
    assert "passing both" not in capfd.readouterr().err
    assert ids(made, None, "what is this") == [first]
    both = Questions.of([None, None], ["where", "what is this"]).inputs(made)
    assert rows_of(both) == [made.tokenizer.convert_tokens_to_ids(["<s>", "where"]), first]
    assert both["input_ids"].shape == (2, 4)  # not padded to the row that it was asked with
    assert both.keys() == {"input_ids", "attention_mask", "token_type_ids"}


def test_a_processor_without_placeholders_takes_one_picture_for_each_question():
    made = tf.GitProcessor(tf.CLIPImageProcessor(**CROPPED), tokenizer())
    assert len(ids(made, [PICTURE, PICTURE], ["what", "where"])) == 2
    with pytest.raises(ValueError, match="one picture for each question, got 0 to 2"):
        ids(made, [[PICTURE, PICTURE], None], ["what", "where"])


@pytest.mark.parametrize("token", ["<image>", "<video>"])
def test_placeholders_are_not_for_users(token):
    made = PROCESSORS["qwen2-vl"]()
    with pytest.raises(ValueError, match=f"must not hold the placeholder {token}"):
        ids(made, None, f"what {token} is")
    many = {"<image>": "pictures", "<video>": "videos"}[token]
    with pytest.raises(ValueError, match=f"one {token} for each of its 0 {many}, got 1"):
        ids(made, None, f"what {token} is", chat=False)


def test_a_raw_prompt_may_hold_a_video():
    made = PROCESSORS["qwen2-vl"]()
    raw = "<s><|vision_start|><video><|vision_end|> what is "
    asked = ids(made, None, "what is", videos=[PICTURE, PICTURE])
    assert ids(made, None, raw, videos=[PICTURE, PICTURE], chat=False) == asked


def test_pictures_that_videos_would_replace_are_refused():
    """SmolVLM's videos have the names of its pictures, and the last ones count."""
    made = PROCESSORS["qwen2-vl"]()
    made.video_processor.model_input_names = made.image_processor.model_input_names
    assert ids(made, None, "what is", videos=[PICTURE, PICTURE])
    with pytest.raises(ValueError, match="Qwen2VLProcessor takes pictures or videos, got both"):
        ids(made, [PICTURE, None], ["what", "where"], videos=[None, [PICTURE, PICTURE]])


def test_numbers_of_videos_must_match():
    with pytest.raises(ValueError, match="videos must be a list with an entry for each of the 2"):
        Questions.of(None, ["what", "where"], videos=[PICTURE])
    with pytest.raises(ValueError, match="2 questions, got one video"):
        Questions.of(None, ["what", "where"], videos="a.mp4")
