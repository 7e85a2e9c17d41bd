"""Tiny processors of transformers, over one tokenizer."""

import transformers as tf
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tests.tiny.parts import square

# attributes of tokenizers that some processors read
PLAIN = ["image", "boi", "eoi", "video", "audio", "boa", "eoa", "eof", "image_start", "image_end"]
NAMED = {f"{name}_token": f"<{name}>" for name in PLAIN}
NAMED |= dict(start_image_token="<img>", end_image_token="</img>", image_wrapper_token="<wrap>")
NAMED |= dict(context_image_token="<IMG_CONTEXT>", img_line_break_token="<line>")
NAMED |= dict(image_break_token="[IMG_BREAK]")
MORE = (
    "<|image|> <|video|> [IMG] [IMG_END] <fake_token_around_image> <global-img> "
    "<|begin_of_video|> <|end_of_video|> <|vision_start|> <|vision_end|> <IMG_START> <IMG_ATOM> "
    "<IMG_GRID> <IMG_COL> <IMG_ROW> <IMG_END> <|patch|> <|image_start|> <|image_end|> "
    "<|tile_x_separator|> <|tile_y_separator|> <|python_tag|> <|IMG_PATCH|> TILE_GLOBAL TILE_1"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", *NAMED.values(), *MORE.split()]
TALK = "what is this where how many colour red blue green a the one two three dog cat box"
WORDS = TALK.split()


def word_tokenizer(special, words, splits=None, named=None, template=None):
    """One id a word, in order, padded at the left."""
    names = [*special, *words]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = splits or pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return wrapped(made, named, template)


def wrapped(made, named=None, template=None):
    """transformers' tokenizer around one of ``tokenizers``."""
    marks = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    more = dict(padding_side="left", extra_special_tokens=named or {}, chat_template=template)
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, **marks, **more)


def tokenizer():
    return word_tokenizer(SPECIAL, WORDS, named=NAMED)


def template(image="<image>", video="<video>"):
    return (
        "<s>{% for m in messages %}{% for c in m['content'] %}"
        f"{{% if c['type'] == 'image' %}}{image}{{% elif c['type'] == 'video' %}}{video}"
        "{% else %} {{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
    )


SMALL = dict(size={"shortest_edge": 64, "longest_edge": 4096}, patch_size=4, merge_size=2)
TILES = dict(image_grid_pinpoints=[[8, 8], [8, 16], [16, 8], [16, 16]])
CROPPED = dict(size=square(8), crop_size=square(8))
CLIP = dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
IN_VISION = "<|vision_start|>{}<|vision_end|>"
BETWEEN = template(IN_VISION.format("<image>"), IN_VISION.format("<video>"))
GLM = template(IN_VISION.format("<image>"), "<|begin_of_video|><video><|end_of_video|>")


def qwen(name, pictures="Qwen2VL", videos="Qwen2VL", chat=BETWEEN):
    pixels = getattr(tf, f"{pictures}ImageProcessor")(**SMALL)
    films = getattr(tf, f"{videos}VideoProcessor")(**SMALL)
    return getattr(tf, f"{name}Processor")(pixels, tokenizer(), films, chat_template=chat)


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


LFM2 = dict(encoder_patch_size=4, min_image_tokens=1, max_image_tokens=8, max_num_patches=64)
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
    "aya-vision": lambda: of(
        "AyaVision",
        tf.GotOcr2ImageProcessor(size=square(16)),
        patch_size=4,
        img_size=16,
        downsample_factor=2,
    ),
    "cohere2-vision": lambda: of(
        "Cohere2Vision", tf.Cohere2VisionImageProcessor(size=square(16), patch_size=4)
    ),
    "ovis2": lambda: of("Ovis2", tf.Ovis2ImageProcessor(size=square(16)), image_seq_length=4),
    "qwen2-vl": lambda: qwen("Qwen2VL"),
    "qwen2.5-vl": lambda: qwen("Qwen2_5_VL"),
    "qwen3-vl": lambda: qwen("Qwen3VL", videos="Qwen3VL"),
    "glm4v": lambda: qwen("Glm4v", "Glm4v", "Glm4v", GLM),
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
        "Lfm2Vl", tf.Lfm2VlImageProcessor(tile_size=16, downsample_factor=2, **LFM2)
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
