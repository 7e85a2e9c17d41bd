"""Requests that are wrong, in every way: each gets an error object with a sentence, and the server
goes on.
"""

import copy
import json
import random
import socket
import string

import httpx
import openai
import pytest
from PIL import Image

from tests.served import address, engine_of, post, sentence, served, shown, soon

RED = address(Image.new("RGB", (64, 64), "red"))
CHAT, TEXT, DRAW = "/v1/chat/completions", "/v1/completions", "/v1/images/generations"
GOOD = {
    CHAT: {"model": "llava", "messages": shown(RED), "max_tokens": 1, "n": 1, "stop": ["a"]},
    TEXT: {"model": "text", "prompt": "def", "max_tokens": 1, "temperature": 0.5, "logprobs": 1},
}
LIMITS = dict(max_pictures=2, max_pixels=10_000, max_bytes=60_000, max_tokens=100, max_answers=8)


@pytest.fixture(scope="module")
def engines(coder_pipe, llava_pipe):
    return engine_of(coder_pipe, "text"), engine_of(llava_pipe, "llava")


@pytest.fixture(scope="module")
def server(engines):
    with served(engines, **LIMITS) as server:
        yield server


def chat_of(**changes):
    return CHAT, GOOD[CHAT] | changes


def text_of(**changes):
    return TEXT, GOOD[TEXT] | changes


def part(**given):
    return chat_of(messages=[{"role": "user", "content": [given]}])


FUNCTION = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
TOOLS = [{"type": "function", "function": {"name": "times"}}]
WRONG = [
    (chat_of(messages=None), "messages must be a list of messages"),
    (chat_of(messages=[]), "one at least"),
    (chat_of(messages="hi"), "messages must be a list, got 'hi'"),
    (chat_of(messages=["hi"]), r"messages\[0\] must be a JSON object"),
    (chat_of(messages=[{"content": "a"}]), r"messages\[0\].role must be one of system"),
    (chat_of(messages=[{"role": "usr", "content": "a"}]), "did you mean 'user'"),
    (chat_of(messages=[{"role": "user"}]), r"messages\[0\].content must be a text"),
    (chat_of(messages=[{"role": "user", "content": []}]), "a list of parts"),
    (chat_of(messages=[{"role": "user", "content": "a", "nam": "b"}]), r"messages\[0\].name"),
    (chat_of(messages=[FUNCTION]), r"tool_calls\[0\].function.arguments must be JSON"),
    (part(type="input_audio", input_audio={}), "got 'input_audio', which is not served"),
    (part(type="video_url", video_url="x"), r"content\[0\].video_url must be data:image"),
    (part(type="video_url", video_url={"url": "data:video/mp4;base64,YWJj"}), "videos are MP4"),
    (part(type="video_url", video_url="http://example.com/a.mp4"), "--allow-http-pictures"),
    (part(type="video", video=[]), "frames"),
    (part(type="text"), "text must be a text"),
    (part(type="image_url", image_url={"url": "/etc/passwd"}), "got '/etc/passwd'"),
    (part(type="image_url", image_url={"url": "file:///etc/passwd"}), "must be data:image"),
    (part(type="image_url", image_url="http://example.com/a.png"), "--allow-http-pictures"),
    (part(type="image_url", image_url="data:image/png;base64,&"), "base64"),
    (part(type="image_url", image_url="data:image/png,abc"), "got other data"),
    (part(type="image_url", image_url="data:image/png;base64,YWJj"), "must be a picture"),
    (part(type="image_url", image_url={"url": RED, "details": 1}), "image_url.detail"),
    (chat_of(messages=shown(RED, RED, RED)), "may have 2 pictures"),
    (chat_of(messages=shown(address(Image.new("1", (300, 300))))), "1 to 10,000 pixels"),
    (chat_of(messages=shown(RED, address(Image.new("1", (90, 90))))), "1 to 5,904 pixels"),
    (chat_of(top_logprobs=2), "top_logprobs needs logprobs"),
    (chat_of(logprobs=2), "logprobs must be true or false, got 2"),
    (chat_of(logprobs=True, top_logprobs=21), "from 0 to 20"),
    (chat_of(tools=[{"type": "function"}]), "tools must be a list of"),
    (chat_of(tool_choice="required"), "'required'"),
    (chat_of(tools=[{"function": {}}]), "tools must be a list of"),
    (chat_of(tools=[{"function": {"name": []}}]), "tools must be a list of"),
    (chat_of(tools=TOOLS * 2), "each of another name"),
    (chat_of(tools=TOOLS, tool_choice="any"), "or a function of tools, got 'any'"),
    (chat_of(tools=TOOLS, tool_choice={}), "or a function of tools"),
    (chat_of(tools=TOOLS, tool_choice={"function": {"name": "time"}}), "did you mean 'times'"),
    (chat_of(tool_choice={"function": {"name": "f"}}), "or a function of tools, got a dict"),
    (text_of(prompt=[10**30]), "prompt must be a text that is not empty"),
    (chat_of(tools=TOOLS, tool_choice="required"), "how this model calls tools cannot be spelled"),
    (chat_of(functions=[{}]), "give tools"),
    (chat_of(modalities=["audio"]), "answers are text"),
    (chat_of(chat_template_kwargs={"chat_template": "x"}), "chat_template"),
    (chat_of(max_completion_tokens=2), "got two numbers"),
    (chat_of(response_format={"type": "xml"}), "response_format.type"),
    (chat_of(response_format={}), "response_format.type must be"),
    (chat_of(response_format={"type": "json_schema"}), "must be a JSON schema"),
    (chat_of(stream_options={}), "needs stream"),
    (text_of(stream=True, stream_options={"usage": True}), "include_usage"),
    (text_of(prompt=None), "prompt must be a text"),
    (text_of(prompt=""), "not empty"),
    (text_of(prompt=["a", 1]), "prompt must be"),
    (text_of(prompt=[1, -1]), "prompt must be"),
    (text_of(prompt=[True]), "prompt must be"),
    (text_of(prompt=["a"] * 9), "may have 8 answers, got 9"),
    (text_of(prompt="\ud800"), "half a surrogate pair"),
    (text_of(n=0), "n must be a whole number from 1 to 8, got 0"),
    (text_of(n=1.5), "got 1.5"),
    (text_of(n=True), "got True"),
    (text_of(max_tokens=101), "max_tokens must be a whole number from 1 to 100"),
    (text_of(temperature=2.1), "temperature must be a number from 0 to 2"),
    (text_of(temperature="hot"), "got 'hot'"),
    (text_of(top_p=0), "top_p must be"),
    (text_of(top_k=-2), "top_k must be"),
    (text_of(stop=""), "none of them empty"),
    (text_of(stop=[1]), "stop must be"),
    (text_of(seed="a"), "seed must be"),
    (text_of(presence_penalty=2.1), "presence_penalty must be a number from -2 to 2"),
    (text_of(frequency_penalty="a"), "frequency_penalty must be a number"),
    (text_of(logit_bias={"a": 1}), "numbers by token id"),
    (text_of(logit_bias={"1": 101}), "logit_bias.1 must be"),
    (text_of(logit_bias={"4096": 1}), "of the 4096 tokens there are, got 4096"),
    (text_of(prompt=[4096]), "must hold only the 4096 tokens"),
    (text_of(echo=2), "echo must be true or false, got 2"),
    (text_of(suffix="}"), "suffix must be None or left out"),
    (text_of(best_of=2), "best_of must be 1"),
    (text_of(guided_json="{"), "guided_json must be a JSON schema"),
    (text_of(guided_regex="("), "regex cannot be used"),
    (text_of(guided_grammar="/etc/passwd"), "grammar cannot be used"),
    (text_of(guided_json="/etc/passwd"), "guided_json must be a JSON schema"),
    (text_of(guided_regex="a", guided_choice=["a"]), "got several"),
    (text_of(structured_outputs={"xml": 1}), "structured_outputs"),
    (text_of(temperatur=1), "did you mean 'temperature'"),
    (text_of(model=3), "model must be a text"),
    ((CHAT, []), "must be a JSON object, got a list"),
    ((TEXT, b"{"), "the request must be JSON"),
    ((TEXT, b""), "the request must be JSON"),
    ((TEXT, b"\xff\xfe"), "the request must be JSON"),
    ((TEXT, b'{"temperature": NaN}'), "NaN is no number"),
    ((TEXT, b'{"model": "text", "temperature": 1e999}'), "from 0 to 2, got inf"),
    ((TEXT, b'{"seed": ' + b"9" * 5000 + b"}"), "the request must be JSON"),
    ((TEXT, b"[" * 50_000), "the request must be JSON"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[1][:30])
def test_a_wrong_request_gets_a_sentence(server, wrong):
    (path, body), message = wrong
    if not isinstance(body, bytes):  # halves of letters, which httpx would not encode
        body = json.dumps(body).encode()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(sentence(server, path, body))


def test_models_and_paths_that_there_are_not(server):
    assert "did you mean 'text'" in sentence(server, TEXT, GOOD[TEXT] | {"model": "txt"}, 404)
    assert "choose from" in sentence(server, TEXT, {"prompt": "a"}, 404)  # two, and none named
    assert "there is no POST /v1/chats here" in sentence(server, "/v1/chats", {}, 404)
    assert "there is no POST /health here" in sentence(server, "/health", {}, 405)
    assert httpx.get(server.address + "/docs").status_code == 404


def test_large_bodies_are_refused_before_they_are_read(server):
    large = b" " * (LIMITS["max_bytes"] + 1)
    assert "60,000 bytes" in sentence(server, TEXT, large, 413)
    pieces = httpx.post(
        server.address + TEXT, content=iter([large]), headers={"Content-Type": "application/json"}
    )
    assert pieces.status_code == 413  # no length was told
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as line:  # told, and never sent
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json")
        line.sendall(b"\r\nContent-Length: 99999999999999999999\r\n\r\n")
        assert line.recv(20).startswith(b"HTTP/1.1 413")


def test_a_form_is_refused_which_any_web_page_could_send(server):
    headers = {"Content-Type": "text/plain"}
    assert "application/json" in sentence(server, TEXT, GOOD[TEXT], headers=headers)


def test_a_key(coder_pipe):
    with served([engine_of(coder_pipe, "text")], api_key="sécret") as server:
        assert "API key" in sentence(server, TEXT, GOOD[TEXT], 401)
        for key in ("Bearer secret", "Bearer sécre", "Bearer"):
            headers = {"Authorization": key.encode()}
            assert "API key" in sentence(server, TEXT, GOOD[TEXT], 401, headers=headers)
        right = {"Authorization": "Bearer sécret".encode()}
        assert post(server, TEXT, GOOD[TEXT], headers=right)[0] == 200
        assert httpx.get(server.address + "/v1/models").status_code == 401
        assert httpx.get(server.address + "/health").status_code == 200
        wrong = openai.OpenAI(base_url=server.address + "/v1", api_key="other")
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_a_model_that_cannot_go_on_is_seen(coder_pipe):
    engines = [engine_of(coder_pipe, name) for name in ("text", "other")]
    with served(engines) as server:
        engines[1].close()  # as where there is no memory for an empty batch
        answer = httpx.get(server.address + "/health")
        assert answer.status_code == 503
        assert "other is not answered any more" in answer.json()["error"]["message"]
        assert post(server, TEXT, GOOD[TEXT] | {"model": "text"})[0] == 200


def test_busy(coder_pipe):
    with served([engine_of(coder_pipe, "text", waiting=0)]) as server:
        answer = httpx.post(server.address + TEXT, json=GOOD[TEXT])
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        client = openai.OpenAI(base_url=server.address + "/v1", api_key="a", max_retries=0)
        with pytest.raises(openai.RateLimitError, match="0 requests wait already"):
            client.completions.create(**GOOD[TEXT])


def test_a_failure_of_ours_is_a_sentence_and_a_line(coder_pipe, caplog):
    engine = engine_of(coder_pipe, "text")
    engine.submit = lambda *of: 1 / 0
    with served([engine]) as server:
        said = sentence(server, TEXT, GOOD[TEXT], 500)
    assert said == "the server failed (ZeroDivisionError), its log says more"
    logged = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(logged) == 1 and "division by zero" in logged[0].message
    assert logged[0].exc_info is None


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_fails_midway(coder_pipe, stream):
    engine = engine_of(coder_pipe, "text")
    with served([engine]) as server:
        engine.rows.round = lambda: 1 / 0
        client = openai.OpenAI(base_url=server.address + "/v1", api_key="a", max_retries=0)
        with pytest.raises(openai.APIError, match="division by zero"):
            list(client.completions.create(**GOOD[TEXT] | {"max_tokens": 9}, stream=stream))
        assert client.completions.create(**GOOD[TEXT]).choices  # the others go on


def test_two_hundred_wrong_requests(server, engines):
    """Good ones with a part that is something else, and texts that are no JSON any more."""
    random.seed(0)
    statuses = []
    for number in range(200):
        path = random.choice([CHAT, TEXT])
        body = spoiled(copy.deepcopy(GOOD[path]))
        text = json.dumps(body)
        if number % 5 == 0:
            place = random.randrange(len(text))
            text = text[:place] + random.choice(string.printable) + text[place + 2 :]
        status, found = post(server, path, text.encode())
        statuses.append(status)
        assert status == 200 or 400 <= status < 500, (text, found)
        if status != 200:
            assert " " in found["error"]["message"], (text, found)
    assert sum(status != 200 for status in statuses) > 150
    for path, body in GOOD.items():
        assert post(server, path, body)[0] == 200
    assert soon(lambda: not any(engine.rows.count for engine in engines))


ODD = [None, True, -1, 1e30, 2**70, "", "x", "\ud800", "\x00", [], {}, [[]], [None], {"a": {}}]
ODD += ["a" * 5000, [[[[]]]], {"type": "image_url"}, {"url": 3}, -0.0, "data:image/png;base64,"]


def spoiled(thing):
    """``thing`` with one part of it exchanged, renamed or gone."""
    places = []

    def walk(value):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in list(keys):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(thing)
    for _ in range(random.choice([1, 1, 2, 4])):
        holder, key = random.choice(places)
        how = random.random()
        if isinstance(holder, dict) and how < 0.15:
            holder[str(key) + random.choice("x_é")] = holder.pop(key, None)
        elif isinstance(holder, dict) and how < 0.25:
            holder.pop(key, None)
        elif isinstance(holder, dict) or key < len(holder):
            holder[key] = copy.deepcopy(random.choice(ODD))
    return thing


def test_grammars_are_no_files(server, tmp_path):
    (tmp_path / "grammar").write_text('root ::= "secret"')
    body = GOOD[TEXT] | {"max_tokens": 9, "guided_grammar": str(tmp_path / "grammar")}
    assert "grammar cannot be used" in sentence(server, TEXT, body)
