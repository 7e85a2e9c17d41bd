"""Which tokens of a chat are answers: found from templates of every kind, or marked by them."""

import pytest

from recipes.training.coder import build_tokenizer
from specmm.chats.forms import Unusable, chat_of
from specmm.chats.tokens import ChatReader
from tests.tiny.chats import one_turn

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} <|end|>{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
# As Qwen3's: what was thought stays in the last turn alone, which always has a place for it.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
TOOLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.name }}{% endfor %}<|end|>{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)
TALK = [
    ("system", "be kind"),
    ("user", "a b"),
    ("assistant", "a b"),
    ("user", "c"),
    ("assistant", "d"),
]


def reader(template, **options):
    words = build_tokenizer(["a b c user assistant system"], 300)
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = template
    ends = [words.convert_tokens_to_ids("<|im_end|>")] if "im_end" in str(template) else []
    found = ChatReader(words, ends, options.pop("room", 1024), **options)
    found.begin()
    return found


def talk(turns=TALK, **more):
    messages = [{"role": role, "content": text} for role, text in turns]
    messages[-1] |= more
    return chat_of({"messages": messages}, None)


def learnt(found, chat):
    """The pieces of text that are learnt."""
    text = found.coloured(chat, False)
    return [piece.partition("⟧")[0] for piece in text.split("⟦")[1:]]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (CHATML, ["a b<|im_end|>", "d<|im_end|>"]),
        (LLAMA2, [" a b <|end|>", " d <|end|>"]),
        (MARKED, ["a b<|end|>", "d<|end|>"]),
        (PLAIN, ["a b", "d<|end|>"]),
        (THINKING, ["a b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]),
    ],
)
def test_answers_are_found(template, wanted):
    found = reader(template)
    assert learnt(found, talk()) == wanted
    found.verify(talk())
    prompt, own = found.read([talk(), talk(TALK[:3])])
    assert own.sum(1).tolist()[1] < own.sum(1).tolist()[0] and prompt.lengths[0] > prompt.lengths[1]
    assert not bool((own & ~prompt.mask).any())
    whole = found.words.apply_chat_template(
        [{"role": r, "content": t} for r, t in TALK], tokenize=True, return_dict=False
    )
    row = prompt.rows()[0]
    assert row[: len(whole)] == whole[: len(row)] or row[:-1] == whole[: len(row) - 1]


def test_thinking_counts_or_is_left_out():
    chat = talk(reasoning_content="hm")
    inline = talk([*TALK[:-1], ("assistant", "<think>\nhm\n</think>\n\nd")])
    assert learnt(reader(THINKING), chat)[1] == "<think>\nhm\n</think>\n\nd<|im_end|>"
    assert learnt(reader(THINKING, thinking=True), chat)[1][:10] == "<think>\nhm"
    for each in (chat, inline):
        found = reader(THINKING, thinking=False)
        assert learnt(found, each)[1] == "d<|im_end|>"
        found.verify(each)
    with pytest.raises(ValueError, match="thinking is for chat templates that know it"):
        reader(CHATML, thinking=False)


def test_calls_of_tools_are_learnt():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "b"}]},
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    chat = chat_of({"messages": messages}, None)
    assert learnt(reader(TOOLS), chat) == ["<call>b<|end|>", "d<|end|>"]


def test_what_is_asked_is_what_is_served():
    found = reader(CHATML)
    asked = "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    assert found.asked(talk(TALK[1:3]), 1) == asked
    prompt = found.prompts([talk(TALK[1:3])], 7)
    assert found.words.decode(prompt.input_ids[0]) == asked and prompt.max_new_tokens == 7


def test_long_chats_are_left_out_or_cut():
    long = one_turn("a", "b " * 200)
    for options in (dict(room=100), dict(max_length=99)):
        with pytest.raises(Unusable, match="of which 99 fit"):
            reader(CHATML, **options).check(long)
        found = reader(CHATML, cut=True, **options)
        assert found.check(long) == 99
        prompt, own = found.read([long, one_turn("a", "b")])
        assert prompt.lengths[0] == 99 and bool(own[0, 98])
    for chat in (one_turn("a " * 200, "b"), one_turn("a " * 90, "b")):
        with pytest.raises(Unusable):
            reader(CHATML, max_length=64, cut=True).check(chat)
    assert reader(CHATML).has_room(long, 100) and not reader(CHATML, room=300).has_room(long, 200)


def test_templates_that_cannot_be_used():
    with pytest.raises(ValueError, match="chats need a chat template, which this tokenizer lacks"):
        reader(None)
    with pytest.raises(ValueError, match="must tell questions from answers, got one that writes"):
        reader("{% for m in messages %}{{ m.content }}\n{% endfor %}")


def test_answers_that_the_template_does_not_show():
    found = reader(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(Unusable, match="an answer that the chat template does not show"):
        found.check(talk())
    shouting = reader(CHATML.replace("m.content", "m.content | upper"))
    with pytest.raises(ValueError, match="the answer 'a b' is not in what the chat template"):
        shouting.verify(talk())
    picky = reader("{{ raise_exception('only two turns') if messages | length > 2 }}" + CHATML)
    with pytest.raises(Unusable, match=r"not as the chat template takes it .*only two turns"):
        picky.check(talk())
    with pytest.raises(Unusable, match="a picture, and the model reads text alone"):
        found.check(one_turn("a", "b", "x.png"))
