"""Words about emoji: prompts that ask for one, questions about one, and the tokenizer of both.

A token is a word. What is asked and answered is a chat in the layout of ``TEMPLATE``, a picture
being the placeholders that Janus' processor puts; what is to be drawn is the same with the token
that begins a picture behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import JanusImageProcessor, JanusProcessor, PreTrainedTokenizerFast

from recipes.captioned import SIDE, STYLES, Captioned

PAD = "<pad>"
BOS = "<s>"
EOS = "</s>"
UNKNOWN = "<unk>"
IMAGE = "<image>"
BEGIN = "<begin_of_image>"
END = "<end_of_image>"
ASSISTANT = "<|assistant|>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN, IMAGE, BEGIN, END, ASSISTANT)
TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '</s>' if message['role'] == 'assistant' }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
FORMS = (  # of a prompt, by how often it is used
    ("{article} {what}, {style}", 3),
    ("{what}, {style}", 3),
    ("{style} {what}", 2),
    ("a {style} {what}", 2),
    ("{what} in {style} style", 1),
    ("draw {article} {what} in {style} style", 1),
)
WHATS = (("name", 12), ("name, kind", 2), ("keywords, kind", 3), ("kind", 3))
QUESTIONS = {
    "name": ("what is this?", "what is it?"),
    "style": ("which style is this?", "which style?"),
    "kind": ("what kind of thing is this?", "what kind?"),
}
MEAN = 0.5  # of a pixel in [0, 1], each channel
STD = 0.5


def spoken(name: str) -> str:
    """The words of an icon's name."""
    return name.replace("-", " ")


def prompt(pictures: Captioned, i: int, random: Random) -> str:
    """One of many ways to ask for picture ``i``."""
    what = _chosen(WHATS, random)
    if "keywords" in what:
        known = pictures.keywords[i]
        what = what.replace("keywords", " ".join(random.sample(known, min(2, len(known)))))
    what = what.replace("name", spoken(pictures.names[i])).replace("kind", pictures.kind(i))
    return asked_for(what.removeprefix(", "), pictures.style(i), _chosen(FORMS, random))


def asked_for(what: str, style: str, form: str = FORMS[0][0]) -> str:
    """``what`` in the words of ``form``."""
    article = "an" if what[:1] in "aeiou" else "a"
    return form.format(article=article, what=what, style=style)


def chat(pictures: Captioned, i: int, random: Random) -> list[tuple[str, str]]:
    """All questions about picture ``i``, in some order, each with its answer."""
    answers = {
        "name": spoken(pictures.names[i]),
        "style": pictures.style(i),
        "kind": pictures.kind(i),
    }
    order = random.sample(sorted(QUESTIONS), len(QUESTIONS))
    return [(random.choice(QUESTIONS[about]), answers[about]) for about in order]


def _chosen(weighted: Iterable[tuple[str, int]], random: Random) -> str:
    texts, weights = zip(*weighted, strict=True)
    return str(random.choices(texts, weights)[0])


def build_tokenizer(pictures: Captioned) -> PreTrainedTokenizerFast:
    """A token for each word that prompts, questions and answers about ``pictures`` may hold."""
    splits = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    made = Tokenizer(models.WordLevel(_vocabulary(pictures, splits), unk_token=UNKNOWN))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = splits
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        extra_special_tokens={"image_token": IMAGE, "boi_token": BEGIN, "eoi_token": END},
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def _vocabulary(pictures: Captioned, splits: pre_tokenizers.PreTokenizer) -> dict[str, int]:
    """Ids of words, what is special first, then by the alphabet."""
    words = {*STYLES}
    texts = [text for text, _ in FORMS] + [text for asked in QUESTIONS.values() for text in asked]
    texts += ["an", *(pictures.kind(i) for i in range(len(pictures)))]
    texts += map(spoken, pictures.names)
    for text in texts:
        words |= {word for word, _ in splits.pre_tokenize_str(text.lower()) if word not in "{}"}
    words |= {word for found in pictures.keywords for word in found}
    return {word: number for number, word in enumerate([*SPECIAL, *sorted(words)])}


def build_processor(tokenizer: PreTrainedTokenizerFast, tokens: int) -> JanusProcessor:
    """Janus' own processor for pictures of so many ``tokens``."""
    pictures = JanusImageProcessor(
        size={"height": SIDE, "width": SIDE}, image_mean=[MEAN] * 3, image_std=[STD] * 3
    )
    return JanusProcessor(pictures, tokenizer, chat_template=TEMPLATE, num_image_tokens=tokens)
