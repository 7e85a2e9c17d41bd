"""What OpenAI's own client gets from the server: the pipeline's answers, whole and in pieces."""

import asyncio
import json
import shutil
import socket
import subprocess

import httpx
import openai
import pytest
import torch
from PIL import Image

from tests.integration.page_snippets import ROOT, blocks
from tests.served import address, engine_of, post, served, shown, soon

PROMPT = "def add(a, b):"
GREEDY = dict(model="coder", prompt=PROMPT, max_tokens=12, temperature=0)
RED = Image.new("RGB", (96, 96), "red")


@pytest.fixture(scope="module")
def engines(coder_pipe, llava_pipe):
    return engine_of(coder_pipe, "coder"), engine_of(llava_pipe, "llava")


@pytest.fixture(scope="module")
def server(engines):
    own = {"llava": {"temperature": 0.0}}
    with served(engines, sampling=own) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.address + "/v1", api_key="any", max_retries=0)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["coder", "llava"]
    assert client.models.retrieve("llava").owned_by == "specmm"
    with pytest.raises(openai.NotFoundError, match="did you mean 'coder'"):
        client.models.retrieve("codr")


def test_a_completion_is_the_pipelines_whole_and_in_pieces(client, coder_pipe):
    wanted = coder_pipe(PROMPT, max_new_tokens=12)
    whole = client.completions.create(**GREEDY)
    assert whole.choices[0].text == wanted.texts[0]
    assert whole.choices[0].finish_reason == wanted.finish_reasons[0] == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.prompt_tokens == wanted.prompt_tokens[0]
    assert whole.specmm["method"] and whole.specmm["certificate"].startswith("exact")
    usage = {"include_usage": True}
    pieces = list(client.completions.create(**GREEDY, stream=True, stream_options=usage))
    assert "".join(p.choices[0].text for p in pieces[:-1]) == wanted.texts[0]
    assert len(pieces) > 2 and {p.id for p in pieces} == {pieces[0].id}
    assert [p.choices[0].finish_reason for p in pieces[-2:-1]] == ["length"]
    assert not pieces[-1].choices and pieces[-1].usage == whole.usage
    assert pieces[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert pieces[-2].specmm["certificate"] == whole.specmm["certificate"]
    assert pieces[-2].specmm["tau"] >= 1 <= whole.specmm["tau"]


def test_a_chat_about_a_picture_is_the_pipelines_whole_and_in_pieces(client, llava_pipe):
    given = dict(model="llava", messages=shown(address(RED)), max_completion_tokens=8)
    said = llava_pipe(RED, "What colour is it?", max_new_tokens=8)
    whole = client.chat.completions.create(**given).choices[0]
    assert whole.message.content.strip() == said.answers[0] and whole.message.role == "assistant"
    assert whole.finish_reason == "stop"
    first, *pieces = client.chat.completions.create(**given, stream=True)
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.message.content
    assert pieces[-1].choices[0].finish_reason == "stop" and pieces[-1].usage is None


def test_several_turns_roles_and_frames(server, engines):
    seen = []
    submit, engines[1].submit = engines[1].submit, lambda *of: (seen.append(of[0]), submit(*of))[1]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "Look", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "red"},
        {"role": "user", "content": [{"type": "video", "video": [address(RED)] * 2, "fps": 2}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = dict(model="llava", messages=messages, tools=tools, chat_template_kwargs={})
    try:
        status, said = post(server, "/v1/chat/completions", body)
    finally:
        engines[1].submit = submit
    assert status == 400 and "videos" in said["error"]["message"]  # this model's own sentence
    asked = seen[0]
    assert [m["role"] for m in asked.messages] == ["system", "user", "assistant", "tool", "user"]
    assert asked.messages[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert asked.messages[4]["content"][0]["video"][1].size == RED.size
    assert asked.more == {"tools": tools}


def test_an_async_client_asks_many_at_once(server, coder_pipe):
    async def ask():
        url = server.address + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any") as client:
            prompts = [f"def f{i}(x):" for i in range(6)]
            asked = (client.completions.create(**GREEDY | {"prompt": p}) for p in prompts)
            return prompts, await asyncio.gather(*asked)

    prompts, found = asyncio.run(ask())
    wanted = [coder_pipe(prompt, max_new_tokens=12).texts[0] for prompt in prompts]
    assert [one.choices[0].text for one in found] == wanted


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl(server, coder_pipe):
    words = ["curl", "-sN", server.address + "/v1/completions", "-d", "@-"]
    words += ["-H", "Content-Type: application/json"]
    body = json.dumps(GREEDY | {"stream": True}).encode()
    said = subprocess.run(words, input=body, capture_output=True, check=True).stdout.decode()
    *events, done, last = said.split("\n\n")
    assert done == "data: [DONE]" and last == ""
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(one["choices"][0]["text"] for one in found)
    assert text == coder_pipe(PROMPT, max_new_tokens=12).texts[0]


def test_n_answers_have_the_seeds_that_follow(client, coder_pipe):
    given = GREEDY | {"temperature": 1.0, "seed": 5}
    found = client.completions.create(**given, n=3)
    wanted = [coder_pipe(PROMPT, max_new_tokens=12, temperature=1.0, seed=5 + i) for i in range(3)]
    assert [c.text for c in found.choices] == [one.texts[0] for one in wanted]
    assert [c.index for c in found.choices] == [0, 1, 2]
    assert found.usage.completion_tokens == sum(len(one.tokens[0]) for one in wanted)
    assert found.usage.prompt_tokens == wanted[0].prompt_tokens[0]
    again = client.completions.create(**given, n=3, stream=True)
    texts = ["", "", ""]
    for event in again:
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [c.text for c in found.choices]


def test_several_prompts_and_ids(client, coder_pipe):
    ids = coder_pipe.tokenizer(PROMPT)["input_ids"]
    prompts = [PROMPT, "import "]
    found = client.completions.create(**GREEDY | {"prompt": prompts}, n=2)
    wanted = coder_pipe(prompts, max_new_tokens=12).texts
    assert [c.text for c in found.choices] == [wanted[0]] * 2 + [wanted[1]] * 2
    assert found.usage.prompt_tokens == sum(coder_pipe(prompts, max_new_tokens=1).prompt_tokens)
    for given in (ids, [ids]):
        again = client.completions.create(**GREEDY | {"prompt": given})
        assert again.choices[0].text == wanted[0]


def test_sampling_goes_on_as_the_pipeline_calls_it(client, coder_pipe, engines):
    seen = []
    engine = engines[0]
    submit, engine.submit = engine.submit, lambda *of: (seen.append(of[0]), submit(*of))[1]
    more = dict(top_k=-1, min_p=0.0, repetition_penalty=1.2, ignore_eos=True)
    spelled = dict(temperature=0.7, top_p=0.9, seed=-1, stop="\n", logit_bias={"5": -100})
    try:
        client.completions.create(**GREEDY | spelled, extra_body=more, user="me")
        client.completions.create(model="coder", prompt="a", logit_bias={})
    finally:
        engine.submit = submit
    assert seen[0].goes_on
    assert seen[0].options == dict(
        max_new_tokens=12,
        temperature=0.7,
        top_p=0.9,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.2,
        stop=["\n"],
        sequence_bias=[[[5], -100.0]],
        seed=2**63 - 1,
    )
    assert seen[1].options == {"temperature": 1.0, "max_new_tokens": 16}


def test_an_answer_ends_before_a_stop(client, coder_pipe):
    whole = coder_pipe(PROMPT, max_new_tokens=12).texts[0]
    end = whole[5:8]
    found = client.completions.create(**GREEDY, stop=[end, "\u0000"]).choices[0]
    assert found.text == whole[: whole.index(end)] and found.finish_reason == "stop"
    pieces = client.completions.create(**GREEDY, stop=end, stream=True)
    assert "".join(p.choices[0].text for p in pieces) == found.text


def test_penalties(client, coder_pipe):
    given = dict(presence_penalty=2.0, frequency_penalty=1.5)
    found = client.completions.create(**GREEDY, **given).choices[0]
    assert found.text == coder_pipe(PROMPT, max_new_tokens=12, method="ar", **given).texts[0]
    assert found.text != coder_pipe(PROMPT, max_new_tokens=12).texts[0]


def test_a_prompt_of_a_model_that_sees_is_continued_as_it_is(client, llava_pipe):
    pipe = llava_pipe
    ids = pipe.tokenizer("The apple is")["input_ids"]
    with torch.no_grad():
        whole = pipe.model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
    wanted = pipe.tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True)
    asked = dict(model="llava", max_tokens=6, temperature=0)
    for prompt in ("The apple is", ids):
        assert client.completions.create(prompt=prompt, **asked).choices[0].text == wanted
    shown = pipe.model.config.image_token_id
    with pytest.raises(openai.BadRequestError, match="stand-ins of pictures"):
        client.completions.create(prompt=[*ids, shown], **asked)


def test_how_likely_a_prompt_is(client, coder_pipe):
    """As evaluations ask: of long and short prompts, of ids, read before or not."""
    long = "def f(a):\n    return a\n\n" * 40
    tokenize = coder_pipe.tokenizer
    prompts = [long, PROMPT, "import os", long[: len(long) // 2], "x"]
    prompts += [tokenize(text)["input_ids"] for text in prompts]
    told = []
    for some in (prompts, [PROMPT]):
        asked = dict(GREEDY, prompt=some, max_tokens=1, echo=True, logprobs=2)
        told += zip(some, client.completions.create(**asked).choices, strict=True)
    for text, found in told:
        ids = tokenize(text)["input_ids"] if isinstance(text, str) else text
        with torch.inference_mode():
            scores = coder_pipe.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        whole = [*ids, int(scores[-1].argmax())]
        assert found.text == tokenize.decode(whole)
        wanted = scores.gather(1, torch.tensor(whole[1:])[:, None])[:, 0].tolist()
        first, *rest = found.logprobs.token_logprobs
        assert first is None and rest == pytest.approx(wanted, abs=1e-3)
        assert found.logprobs.tokens == [tokenize.decode([i]) for i in whole]
        best = [max(top.values()) for top in found.logprobs.top_logprobs[1:]]
        assert best == pytest.approx(scores.amax(-1).tolist(), abs=1e-3)
    pieces = client.completions.create(**GREEDY, echo=True, stream=True)
    assert next(pieces).choices[0].text == PROMPT


def test_log_probabilities(client, coder_pipe):
    found = client.completions.create(**GREEDY, logprobs=2).choices[0]
    told = found.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 12
    ids = coder_pipe(PROMPT, max_new_tokens=12).tokens[0]
    before = torch.tensor(coder_pipe.tokenizer(PROMPT)["input_ids"])
    with torch.inference_mode():
        scores = coder_pipe.model(torch.cat([before, ids])[None]).logits[0].log_softmax(-1)
    wanted = scores[len(before) - 1 : -1].gather(1, ids[:, None])[:, 0].tolist()
    assert told.token_logprobs == pytest.approx(wanted, abs=1e-3)
    assert all(
        max(top.values()) == own
        for top, own in zip(told.top_logprobs, told.token_logprobs, strict=True)
    )
    starts = [sum(map(len, told.tokens[:i])) for i in range(12)]
    assert told.text_offset == starts
    pieces = list(client.completions.create(**GREEDY, logprobs=2, stream=True))
    parts = [p.choices[0].logprobs for p in pieces if p.choices[0].logprobs]
    assert [t for part in parts for t in part.tokens] == told.tokens
    assert [o for part in parts for o in part.text_offset] == starts
    chat = dict(model="llava", messages=shown(address(RED)), logprobs=True, top_logprobs=1)
    content = client.chat.completions.create(**chat).choices[0].logprobs.content
    assert content[0].bytes == list(content[0].token.encode()) and len(content[0].top_logprobs) == 1
    assert sum(one.logprob for one in content) < 0


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 30}, "{"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_regex": "[0-9]{3}"}, tuple("0123456789")),
        ({"guided_json": '{"type": "boolean"}'}, ("true", "false")),
        ({"guided_grammar": 'root ::= "ab"'}, "ab"),
    ],
)
def test_answers_are_spelled_as_asked(server, body, fits):
    status, found = post(server, "/v1/completions", {**GREEDY, **body})
    assert status == 200, found
    assert found["choices"][0]["text"].strip().startswith(fits)


def test_a_schema_of_openais_client(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    found = client.chat.completions.create(
        model="llava", messages=shown(address(RED)), response_format=shape, max_tokens=40
    )
    assert json.loads(found.choices[0].message.content) == {"a": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_hangs_up_has_his_rows_freed(server, engines, stream):
    engine, body = engines[0], {**GREEDY, "max_tokens": 1000, "n": 2, "stream": stream}
    body["ignore_eos"] = True
    cancelled = engine.made["cancelled"]
    text = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
        assert soon(lambda: engine.rows.count == 2)
    assert soon(lambda: not engine.rows.count and engine.made["cancelled"] == cancelled + 2)


def test_metrics(server, client):
    client.completions.create(**GREEDY)
    text = httpx.get(server.address + "/metrics").text
    assert 'specmm_requests_total{path="/v1/completions",status="200"}' in text
    assert 'specmm_first_token_seconds_count{model="coder"}' in text
    assert 'specmm_between_tokens_seconds_count{model="coder"}' in text
    assert 'specmm_engine_rows{model="llava"} 0.0' in text
    assert "# TYPE specmm_engine_tokens_total counter" in text


def test_the_client_of_the_page(server, coder_pipe, capsys):
    """The snippet of docs/serve.md, which needs a server, asks this one."""
    code = next(b.code for b in blocks(ROOT / "docs/serve.md") if b.code.startswith("from openai"))
    assert code.count('"pocket/coder"') == code.count("http://127.0.0.1:8000") == 1
    code = code.replace("http://127.0.0.1:8000", server.address).replace("pocket/coder", "coder")
    exec(compile(code, "docs/serve.md", "exec"), {})
    said = capsys.readouterr().out
    assert said.startswith(coder_pipe(PROMPT, max_new_tokens=16).texts[0]) and "certificate" in said
