"""Tool calls and reasoning of a server's answers, whole and in pieces, by OpenAI's client."""

import json
import random
import time
import types

import openai
import pytest
import torch
import transformers as tf
from transformers.cli.serving.utils import get_response_template

import specmm
from specmm.serving.parsing import Parsing
from specmm.serving.requests import Piece
from tests.served import engine_of, served
from tests.tiny.saying import saying

# Qwen's template, as far as tools go
TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def pipe(coder_pipe):
    """A tiny Qwen2 with the tokens and the template of one that calls tools."""
    words = coder_pipe.tokenizer.__class__.from_pretrained(coder_pipe.tokenizer.name_or_path)
    words.add_special_tokens({"additional_special_tokens": SPECIAL})
    words.add_tokens([tf.AddedToken(text, special=False) for text in ADDED])
    words.chat_template = TEMPLATE
    words.eos_token = SPECIAL[1]
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    sizes |= dict(num_key_value_heads=1, vocab_size=len(words), eos_token_id=words.eos_token_id)
    torch.manual_seed(0)
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**sizes)).eval()
    return specmm.TextPipeline(model, words)


@pytest.fixture(scope="module")
def server(pipe):
    with served([engine_of(pipe, "qwen")]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.address + "/v1", api_key="any", max_retries=0)


def asked(text, thinks=False, **more):
    """A request whose answer is ``text``, whatever the model would say."""
    spelled = f"root ::= {json.dumps(text, ensure_ascii=False)}"
    body = {"guided_grammar": spelled, "chat_template_kwargs": {"enable_thinking": thinks}}
    given = dict(model="qwen", messages=[{"role": "user", "content": "Hi"}], temperature=0)
    return {**given, "tools": TOOLS, "max_tokens": 200, "extra_body": body, **more}


def streamed(client, **given):
    """What the pieces of a stream come to: content, reasoning, calls by name, reason."""
    content, thought, calls, reasons = "", "", {}, []
    for event in client.chat.completions.create(**given, stream=True):
        [choice] = event.choices
        content += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            assert call.type == "function" and call.id and call.index not in calls
            calls[call.index] = call.function.name, call.function.arguments
        reasons.append(choice.finish_reason)
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return content, thought, [calls[i] for i in sorted(calls)], reasons[-1]


def whole(client, **given):
    """The same of a whole answer."""
    [choice] = client.chat.completions.create(**given).choices
    said = choice.message
    calls = [(one.function.name, one.function.arguments) for one in said.tool_calls or ()]
    assert (said.content is None) <= bool(calls)
    thought = getattr(said, "reasoning_content", None) or ""
    return said.content or "", thought, calls, choice.finish_reason


TIME = ("time", "{}")
KOELN = ("weather", '{"city": "Köln"}')
HALF = CALL[: CALL.index("Köln")]
SAID = [
    (CALL, {}, ("", "", [KOELN], "tool_calls")),
    (f"Well.\n{CALL}\n{OTHER}", {}, ("Well.", "", [KOELN, TIME], "tool_calls")),
    (f"<think>\nA\n\nb.\n</think>\n\nHi \n{CALL}", {}, ("Hi", "A\n\nb.", [KOELN], "tool_calls")),
    (f"It is.\n</think>\n\n{CALL}", {"thinks": True}, ("", "It is.", [KOELN], "tool_calls")),
    ("It is", {"thinks": True}, ("", "It is", [], "stop")),
    ("A <b> or </tool_call> \n", {}, ("A <b> or </tool_call>", "", [], "stop")),
    (f"<tool_call>{{oh}}</tool_call> dear {OTHER}", {}, ("{oh} dear", "", [TIME], "tool_calls")),
    ("<tool_call>\n[1]\n</tool_call>", {}, ("[1]", "", [], "stop")),
    (CALL, {"stop": "}}"}, (HALF.removeprefix("<tool_call>\n") + 'Köln"', "", [], "stop")),
    (f"{OTHER}; so", {"stop": ";"}, ("", "", [TIME], "tool_calls")),
    (CALL, {"tool_choice": "none"}, (CALL, "", [], "stop")),
    (CALL, {"tools": openai.omit}, (CALL, "", [], "stop")),
    (CALL, {"tool_choice": "auto"}, ("", "", [KOELN], "tool_calls")),
]


@pytest.mark.parametrize(("text", "more", "wanted"), SAID, ids=[str(i) for i in range(len(SAID))])
def test_a_message_is_read(client, text, more, wanted):
    assert whole(client, **asked(text, **more)) == wanted
    assert streamed(client, **asked(text, **more)) == wanted


TWO_TOOLS = [
    {"type": "function", "function": {"name": "wea", "parameters": {"enum": [{"city": "Köln"}]}}},
    {"type": "function", "function": {"name": "time"}},
]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_must_be_made(client, thinks, seed):
    """Whatever the model would say, and though the prompt has opened its reasoning."""
    given = dict(model="qwen", messages=[{"role": "user", "content": "Hi"}], tools=TWO_TOOLS)
    given |= dict(temperature=2, seed=seed, max_tokens=200)
    given["extra_body"] = {"chat_template_kwargs": {"enable_thinking": thinks}}
    one = {"type": "function", "function": {"name": "wea"}}
    found = whole(client, **given, tool_choice=one)
    assert found == ("", "", [("wea", '{"city": "Köln"}')], "tool_calls")
    assert streamed(client, **given, tool_choice=one) == found
    content, thought, calls, _ = whole(client, **given, tool_choice="required")
    assert [name for name, _ in calls] in (["wea"], ["time"]) or content.startswith("{")
    assert thought == ""


def test_json_that_was_asked_for_is_content(client):
    """What the prompt has opened and marks in texts change nothing."""
    schema = {"const": {"a": "<tool_call>\n</think>"}}
    shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    given = dict(model="qwen", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS)
    given |= dict(response_format=shape, extra_body=body, max_tokens=200)
    content, thought, calls, reason = whole(client, **given)
    assert json.loads(content) == schema["const"] and (thought, calls, reason) == ("", [], "stop")
    with pytest.raises(openai.BadRequestError, match="got both"):
        client.chat.completions.create(**given, tool_choice="required")


def test_half_a_call_is_content(client, pipe):
    body = CALL.removeprefix("<tool_call>\n")
    ids = pipe.tokenizer(CALL)["input_ids"]
    for count in range(2, len(ids)):
        given = asked(CALL, max_tokens=count)
        content, thought, calls, reason = found = whole(client, **given)
        assert streamed(client, **given) == found
        assert reason == "length" and not thought
        assert calls or body.startswith(content)
        assert not calls or count >= len(ids) - 3


def test_what_is_read_does_not_depend_on_pieces():
    """Texts of whole and half marks, good calls and bad ones, in pieces of any length."""
    random.seed(0)
    parts = [CALL, OTHER, "<tool_call>{oh}</tool_call>", "<think>", "</think>", "<tool", "_call>"]
    parts += ["hm", " ", "\n\n", "<", '{"name": 1}', "</tool_call>"]
    template = get_response_template(None, types.SimpleNamespace(config=tf.Qwen2Config()))
    calls = 0
    for number in range(300):
        text = "".join(random.choices(parts, k=random.randrange(1, 9)))
        first, *others = [read(template, text, most, number % 2) for most in (10**6, 1, 4, 20)]
        assert all(other == first for other in others), text
        calls += len(first["calls"])
    assert calls > 100


def test_many_blanks_take_no_longer():
    """Looking for blanks before a mark from each of them would take a minute."""
    template = get_response_template(None, types.SimpleNamespace(config=tf.Qwen2Config()))
    start = time.monotonic()
    found = read(template, "a" + 80_000 * "\n" + "b", 10**6, 0)
    assert found["content"] == "a" + 80_000 * "\n" + "b" and time.monotonic() - start < 10


def read(template, text, most, end):
    """What is read of a ``text`` in pieces of at most so many letters; 0 is the end token."""
    words = types.SimpleNamespace(decode=lambda ids: "")
    parser = Parsing(words, template, [0]).parser([], TOOLS)
    said = {"content": "", "reasoning_content": "", "calls": []}
    pieces = []
    while text:
        size = random.randint(1, most)
        pieces.append(Piece(text[:size], [1]))
        text = text[size:]
    pieces.append(Piece("", [end]))
    for parts in [*(parser.add(piece) for piece in pieces), parser.end()]:
        said["calls"] += [call["function"] for call in parts.pop("tool_calls", ())]
        for name, part in parts.items():
            said[name] += part
    return said


def test_a_conversation_with_a_tool(client):
    """A call goes back as it came, and the next turn reads it."""
    given = asked(CALL)
    message = client.chat.completions.create(**given).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    messages = [*given["messages"], message.model_dump(exclude_none=True), result]
    found = whole(client, **asked("It rains.", messages=messages))
    assert found == ("It rains.", "", [], "stop")


# ---- of models whose marks are special tokens


TWO = '{"a": "1", "b": "2"}'
MARKS = ["<|think|>", "<|/think|>", "<|call|>", "<|/call|>", "<|other|>"]
MARKED = {
    "start_anchor": "<|start|>",
    "fields": {
        "thinking": {"open": "<|think|>", "close": "<|/think|>"},
        "tool_calls": {
            "open_pattern": r"<\|call\|>\s*(?P<name>\w+)",
            "close": "<|/call|>",
            "content": "kv-lines",
            "content_args": {"line_sep": " ", "kv_sep": "="},
            "repeats": True,
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}


@pytest.mark.parametrize(
    ("said", "limit", "wanted"),
    [
        ("<|think|> hm <|/think|> Hi <|other|> you", 9, ("Hi you", "hm", [], "stop")),
        ("<|call|> f a=1 b=2 <|/call|>", 9, ("", "", [("f", TWO)], "tool_calls")),
        ("<|call|> f a=1 b=2 <|/call|>", 4, ("a=1 b=2", "", [], "length")),
        ("Hi <|call|> f a=1 <|/call|> </s> x", 5, ("Hi", "", [("f", '{"a": "1"}')], "length")),
    ],
)
def test_special_tokens_are_read_and_not_shown(said, limit, wanted):
    words = [word if word.startswith("<") else f"Ġ{word}" for word in said.split()]
    model, tokenizer = saying(list(dict.fromkeys(["go", *words, "</s>"])), MARKS)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.response_template = MARKED
    engine = engine_of(specmm.TextPipeline(model, tokenizer), "marked")
    messages = [{"role": "user", "content": "go"}]
    given = dict(model="marked", messages=messages, temperature=0, tools=TOOLS, max_tokens=limit)
    with served([engine]) as server:
        client = openai.OpenAI(base_url=server.address + "/v1", api_key="any", max_retries=0)
        assert whole(client, **given) == wanted
        assert streamed(client, **given) == wanted
