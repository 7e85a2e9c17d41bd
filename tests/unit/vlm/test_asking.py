"""Processors of transformers, asked how they want a question: who puts placeholders, what a
template takes, rows of every kind in one batch, videos.
"""

import importlib.util

import pytest
import torch
import transformers as tf
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from specmm.vlm import wording
from specmm.vlm.asking import Questions

NAMED = {  # attributes of tokenizers that some processors read
    "image_token": "<image>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "boa_token": "<boa>",
    "eoa_token": "<eoa>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "img_line_break_token": "<line>",
    "image_wrapper_token": "<wrap>",
    "eof_token": "<eof>",
    "image_start_token": "<image_start>",
    "image_end_token": "<image_end>",
    "image_break_token": "[IMG_BREAK]",
}
MORE = (
    "<|image|> <|video|> [IMG] [IMG_END] <fake_token_around_image> <global-img> "
    "<|begin_of_video|> <|end_of_video|> <|vision_start|> <|vision_end|> <IMG_START> <IMG_ATOM> "
    "<IMG_GRID> <IMG_COL> <IMG_ROW> <IMG_END> <|patch|> <|image_start|> <|image_end|> "
    "<|tile_x_separator|> <|tile_y_separator|> <|python_tag|> <|IMG_PATCH|> TILE_GLOBAL TILE_1"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", *NAMED.values(), *MORE.split()]
TALK = "what is this where how many colour red blue green a the one two three dog cat box"
WORDS = TALK.split()


def tokenizer():
    names = [*SPECIAL, *WORDS]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens=NAMED,
    )


def template(image="<image>", video="<video>"):
    return (
        "<s>{% for m in messages %}{% for c in m['content'] %}"
        f"{{% if c['type'] == 'image' %}}{image}{{% elif c['type'] == 'video' %}}{video}"
        "{% else %} {{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
    )


def square(side):
    return {"height": side, "width": side}


SMALL = dict(size={"shortest_edge": 64, "longest_edge": 4096}, patch_size=4, merge_size=2)
TILES = dict(image_grid_pinpoints=[[8, 8], [8, 16], [16, 8], [16, 16]])
CROPPED = dict(size=square(8), crop_size=square(8))
CLIP = dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
BETWEEN = template("<|vision_start|><image><|vision_end|>", "<|vision_start|><video><|vision_end|>")


def qwen(name, pictures="Qwen2VL", videos="Qwen2VL"):
    pixels = getattr(tf, f"{pictures}ImageProcessor")(**SMALL)
    films = getattr(tf, f"{videos}VideoProcessor")(**SMALL)
    return getattr(tf, f"{name}Processor")(pixels, tokenizer(), films, chat_template=BETWEEN)


def of(name, pictures, image="<image>", **options):
    """A processor of pictures and a chat template."""
    made = getattr(tf, f"{name}Processor")
    return made(pictures, tokenizer(), chat_template=template(image), **options)


def paligemma():
    pictures = tf.SiglipImageProcessor(size=square(8))
    pictures.image_seq_length = 4
    return tf.PaliGemmaProcessor(pictures, tokenizer())


def llava(**options):
    return tf.LlavaProcessor(
        tf.CLIPImageProcessor(**CROPPED),
        tokenizer(),
        **(CLIP | {"chat_template": template()} | options),
    )


def smolvlm():
    films = tf.SmolVLMVideoProcessor(size={"longest_edge": 16}, num_frames=4, fps=1)
    pictures = tf.SmolVLMImageProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    )
    return tf.SmolVLMProcessor(
        pictures, tokenizer(), films, image_seq_len=4, chat_template=template()
    )


PROCESSORS = {
    "llava": llava,
    "llava-next": lambda: of("LlavaNext", tf.LlavaNextImageProcessor(**CROPPED, **TILES), **CLIP),
    "llava-onevision": lambda: tf.LlavaOnevisionProcessor(
        tf.LlavaOnevisionImageProcessor(size=square(8), **TILES),
        tokenizer(),
        tf.LlavaOnevisionVideoProcessor(size=square(8)),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=template(),
    ),
    "internvl": lambda: tf.InternVLProcessor(
        tf.GotOcr2ImageProcessor(size=square(16)),
        tokenizer(),
        tf.InternVLVideoProcessor(size=square(16)),
        image_seq_length=4,
        chat_template=template("<IMG_CONTEXT>"),
    ),
    "gemma3": lambda: of(
        "Gemma3", tf.Gemma3ImageProcessor(size=square(16)), "<boi>", image_seq_length=4
    ),
    "gemma4": lambda: tf.Gemma4Processor(
        tf.Gemma4AudioFeatureExtractor(),
        tf.Gemma4ImageProcessor(),
        tokenizer(),
        tf.Gemma4VideoProcessor(),
        image_seq_length=4,
        chat_template=template("<image>", "<|video|>"),
    ),
    "paligemma": paligemma,
    "pixtral": lambda: of(
        "Pixtral",
        tf.PixtralImageProcessor(size={"longest_edge": 16}, patch_size=4),
        "[IMG]",
        patch_size=4,
        image_token="[IMG]",
    ),
    "cohere2-vision": lambda: of(
        "Cohere2Vision", tf.Cohere2VisionImageProcessor(size=square(16), patch_size=4)
    ),
    "ovis2": lambda: of("Ovis2", tf.Ovis2ImageProcessor(size=square(16)), image_seq_length=4),
    "qwen2-vl": lambda: qwen("Qwen2VL"),
    "qwen2.5-vl": lambda: qwen("Qwen2_5_VL"),
    "qwen3-vl": lambda: qwen("Qwen3VL", videos="Qwen3VL"),
    "glm4v": lambda: qwen("Glm4v", "Glm4v", "Glm4v"),
    "llama4": lambda: of(
        "Llama4", tf.Llama4ImageProcessor(size=square(16)), "<|image|>", patch_size=4
    ),
    "idefics3": lambda: of(
        "Idefics3",
        tf.Idefics3ImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        image_seq_len=4,
    ),
    "smolvlm": smolvlm,
    "lfm2-vl": lambda: of(
        "Lfm2Vl",
        tf.Lfm2VlImageProcessor(
            tile_size=16,
            encoder_patch_size=4,
            downsample_factor=2,
            min_image_tokens=1,
            max_image_tokens=8,
            max_num_patches=64,
        ),
    ),
    "kimi": lambda: tf.Kimi_K25Processor(
        tf.Kimi_K25ImageProcessor(),
        tokenizer(),
        tf.Kimi_K25VideoProcessor(),
        chat_template=template(),
    ),
    "deepseek-vl": lambda: of(
        "DeepseekVL", tf.DeepseekVLImageProcessor(size=square(8), min_size=4), num_image_tokens=4
    ),
    "janus": lambda: of(
        "Janus", tf.JanusImageProcessor(size=square(8), min_size=4), num_image_tokens=4
    ),
    "mllama": lambda: of("Mllama", tf.MllamaImageProcessor(size=square(16))),
}
FILMS = ("llava-onevision", "internvl", "gemma4", "kimi", "glm4v", "smolvlm")
FILMS += ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")
NESTED = ("idefics3", "smolvlm", "mllama", "llava-onevision")  # pictures padded to a batch's most
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
    noise = [Image.effect_noise((20, 12), 60 + 20 * i).convert("RGB") for i in range(7)]
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
        if name == "paligemma" and pictures[row] is None:
            continue  # it is never asked without a picture
        alone = Questions.of(pictures[row], question, videos=videos[row]).inputs(processor)
        assert rows[row] == rows_of(alone)[0]
        pixels += [alone["pixel_values"]] if "pixel_values" in alone else []
        per_token = {k: v for k, v in alone.items() if k in wording.PER_TOKEN}
        assert per_token.keys() == {k for k in both if k in wording.PER_TOKEN}
    if name not in NESTED:
        assert torch.equal(torch.cat(pixels), both["pixel_values"])
    assert "labels" not in both


def test_pictures_and_videos_become_placeholders(name, processor, shown):
    pictures, videos = shown
    inputs = Questions.of(pictures, QUESTIONS, videos=videos).inputs(processor)
    held = [sum(4 <= i < len(SPECIAL) for i in row) for row in rows_of(inputs)]
    assert min(held[0], held[2]) > held[1] == 0
    assert (held[3] > 0) == (name in FILMS)


def test_a_processor_without_videos_says_so(name, processor):
    if name in FILMS:
        return
    with pytest.raises(ValueError, match=r"must take videos, got a .*Processor, which takes none"):
        noise = Image.effect_noise((20, 12), 60)
        Questions.of(None, "what is", videos=[noise, noise]).inputs(processor)


def test_it_begins_with_one_bos(name, processor):
    if name == "paligemma":
        return
    (row,) = rows_of(Questions.of(None, "what is").inputs(processor))
    assert row.count(1) == 1 and row[0] == 1


PICTURE = Image.effect_noise((20, 12), 60)
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


def test_without_a_template_placeholders_come_before_the_question():
    text = tokenizer().decode(ids(llava(chat_template=None), PICTURE, "what is")[0])
    assert text.startswith("<image>") and text.endswith("what is")


@pytest.mark.parametrize(
    "bad",
    [
        "<s>{% for m in messages %}{{ m['content'][-1]['text'] }}{% endfor %}",  # no picture
        "{{ raise_exception('only tools') }}",
    ],
)
def test_a_template_that_shows_no_picture_is_refused(bad):
    with pytest.raises(
        ValueError, match="chat template of this LlavaProcessor must hold the quest"
    ):
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
    with pytest.raises(ValueError, match="PaliGemmaProcessor cannot read the question: `images`"):
        ids(made, None, "what is this")


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


def test_numbers_of_videos_must_match():
    with pytest.raises(ValueError, match="videos must be a list with an entry for each of the 2"):
        Questions.of(None, ["what", "where"], videos=[PICTURE])
    with pytest.raises(ValueError, match="2 questions, got one video"):
        Questions.of(None, ["what", "where"], videos="a.mp4")
