"""``specmm serve`` as a process, how a server ends, and ``specmm bench serve``."""

import json
import re
import socket
import sys
import threading
import time
from itertools import pairwise

import httpx
import pytest

from specmm.runs import load
from specmm.text.pipeline import TextPipeline
from tests.commands import as_json, refused, run
from tests.forks import command, ended
from tests.served import engine_of, post, served

TEXT = "/v1/completions"
ADDRESS = re.compile(r"serving .* at (http://127.0.0.1:\d+)$", re.M)
BODY = {"prompt": "def", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pipe():
    return TextPipeline.from_pretrained("pocket/coder")


@pytest.fixture
def engine(pipe):
    return engine_of(pipe, "text")


def slowed(engine, seconds):
    """The rounds of ``engine`` take so many ``seconds`` more."""
    play = engine._round
    engine._round = lambda: (time.sleep(seconds), play())
    return engine


def ask_behind(server, body):
    """Ask in a thread; gives what it is answered, later."""
    found = []
    thread = threading.Thread(target=lambda: found.append(post(server, TEXT, body)))
    thread.start()
    time.sleep(0.4)
    return thread, found


@pytest.mark.parametrize("seconds", [20.0, 0.2])
def test_a_server_ends_in_two_steps(engine, seconds):
    """No more requests, and those that there are end: by themselves, or when their time is over."""
    with served([slowed(engine, 0.03)], seconds=seconds) as server:
        thread, found = ask_behind(server, BODY)
        with httpx.Client(base_url=server.address) as line:
            assert line.get("/health").status_code == 200
            server.end()
            while line.get("/health").status_code == 200:
                pass
            late = line.post(TEXT, json=BODY)
        assert late.status_code == 503 and late.headers["retry-after"] == "10"
        assert "about to end" in late.json()["error"]["message"]
        thread.join(20)
    status, answer = found[0]
    if seconds > 1:
        assert status == 200 and answer["usage"]["completion_tokens"] == 60
    else:
        assert status == 503 and "before the answer ended" in answer["error"]["message"]


def test_pieces_are_sent_at_once(engine):
    """Without TCP_NODELAY, the second piece waits for the client to acknowledge the first."""
    with served([engine]) as server, httpx.Client(base_url=server.address) as line:
        line.get("/health")
        [connection] = server.server_state.connections
        sent = connection.transport.get_extra_info("socket")
        assert sent.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def process(said, *words):
    started = command("serve", *words, streams=("/dev/null", str(said)))
    while not said.exists() or not (found := ADDRESS.search(said.read_text())):
        assert started.is_alive(), "it ended"
        time.sleep(0.05)
    return started, found[1]


@pytest.mark.slow
def test_the_command_and_sigterm(tiny, tmp_path):
    """What is being made then is finished, a stream and pictures, and the process ends."""
    options = ("--port", 0, "--api-key", "word", "--prefix-memory", 0)
    server, address = process(tmp_path / "said", "pocket/coder", tiny, *options)
    client = httpx.Client(base_url=address, headers={"Authorization": "Bearer word"}, timeout=60)
    assert httpx.get(address + "/v1/models").status_code == 401
    names = [one["id"] for one in client.get("/v1/models").json()["data"]]
    assert names == ["pocket/coder", str(tiny)]
    long = BODY | {"model": "pocket/coder", "prompt": "def add(a, b):\n" * 9, "max_tokens": 1}
    told = [client.post(TEXT, json=long).json()["usage"] for _ in range(2)]
    assert told[1]["prompt_tokens_details"]["cached_tokens"] == 0
    found, threads = [], []
    for path, body in (
        (TEXT, BODY | {"model": "pocket/coder", "max_tokens": 400, "stream": True}),
        ("/v1/images/generations", {"prompt": "heart", "n": 16}),
    ):
        ask = lambda path, body: found.append(client.post(path, json=body))  # noqa: E731
        threads.append(threading.Thread(target=ask, args=(path, body)))
        threads[-1].start()
    time.sleep(0.4)
    server.terminate()
    assert ended(server) == 0
    for thread in threads:
        thread.join(10)
    drawn, told = sorted(found, key=lambda one: "data: " in one.text)
    assert drawn.status_code == 200 and len(drawn.json()["data"]) == 16
    assert told.text.endswith("data: [DONE]\n\n") and '"finish_reason": "length"' in told.text
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_mistakes_of_the_command(tiny, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(f"serve {tiny}", "--port", port)
        assert f"127.0.0.1:{port}: Address already in use" in said
    assert "specmm zoo lists them" in refused("serve pocket/nothing")
    assert "served once" in refused(f"serve {tiny} {tiny}")
    assert "serve them apart" in refused(f"serve {tiny} pocket/var --drafter x")
    assert "choose from: ar" in refused(f"serve {tiny} --method deer")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for module in ("http", "opening", "process"):
        monkeypatch.delitem(sys.modules, f"specmm.serving.{module}", raising=False)
    said = refused(f"serve {tiny}")
    assert "serve needs fastapi, run: pip install" in said


def test_the_sampling_of_a_checkpoint(text_folder, tmp_path):
    from specmm.serving.opening import own_sampling

    assert own_sampling("pocket/coder") == {} == own_sampling(str(text_folder))
    (tmp_path / "config.json").write_text((text_folder / "config.json").read_text())
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert own_sampling(str(tmp_path)) == {"temperature": 0.6, "top_k": 20}


# ---- bench serve


def test_a_load_test_by_clients(engine):
    with served([engine]) as server:
        words = f"bench serve {server.address} --clients 3 -n 7 --completions --max-tokens 5"
        found = as_json(words)
    assert found["requests"] == 7 and not found["errors"] and found["model"] == "text"
    assert 7 <= found["tokens"] <= 35 and found["prompt_tokens"] > 7
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"])
    for name in ("first_token", "between_tokens", "pause", "answer"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"] < 60
    assert found["first_token"]["p50"] <= found["answer"]["p50"]


def test_a_load_test_by_arrivals(engine, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"at": 0.3 * i, "prompt": "def", "max_tokens": 2 + i} for i in range(3)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with served([engine]) as server:
        found = as_json(f"bench serve {server.address} --trace {trace}")
        assert found["requests"] == 3 and found["tokens"] <= 9 and found["seconds"] > 0.6
        texts = tmp_path / "texts.txt"
        texts.write_text("def f\n\nimport os\n")
        words = f"bench serve {server.address} --rate 50 -n 5 --completions --prompts {texts}"
        said = run(words)
        assert said.exit_code == 0 and "5 requests in" in said.stdout
        assert re.search(r"first token +[\d.]+ +[\d.]+ +[\d.]+\n", said.stdout)
        failed = refused(f"bench serve {server.address} -n 2")  # a chat, without a template
    assert "must answer, got no token: 2 failed, status 400" in failed


def test_arrivals_are_those_of_a_poisson_process():
    times = load.arrivals(load.Load("", [], 4000, seed=1), 20.0)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert sum(gap > 1 / 20 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_times_are_those_of_the_requests():
    pieces = [load.Served(1.0, [1.5, 1.7, 2.1], 5, 3, 2.2), load.Served(2.0, [3.0], 1, 3, 3.0)]
    pieces.append(load.Served(2.0, error="status 500: x"))
    found = load.measured(pieces, 2.0)
    assert found["tokens"] == 6 and found["tokens_per_second"] == 3 and found["prompt_tokens"] == 6
    assert found["errors"] == {"status 500: x": 1} and found["requests_per_second"] == 1
    assert found["first_token"] == {"p50": 0.5, "p90": 1.0, "p99": 1.0}
    assert found["between_tokens"]["p50"] == pytest.approx(0.15)  # of 4 after the first
    assert found["pause"]["p99"] == pytest.approx(0.4)
    assert load.percentiles([]) == {"p50": None, "p90": None, "p99": None}
    assert load.percentiles(range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99}


def test_mistakes_of_a_load_test(tmp_path):
    lines = tmp_path / "lines.jsonl"
    words = f"bench serve http://127.0.0.1:1 --model m --prompts {lines}"
    for text, message in (
        ("", "a line at least"),
        ("{", "line 1 must be JSON"),
        ('{"prompt": "a"}\n[1]', "line 2 must have messages or a prompt"),
    ):
        lines.write_text(text)
        assert message in refused(words)
    lines.write_text('{"prompt": "a"}')
    assert "must have at" in refused(f"bench serve http://127.0.0.1:1 --model m --trace {lines}")
    assert "give one of" in refused("bench serve http://127.0.0.1:1 --rate 1 --clients 2")
    assert "give --model" in refused("bench serve http://127.0.0.1:1")
    assert "no token: 3 failed, " in refused("bench serve http://127.0.0.1:1 --model m -n 3")
    assert "specmm zoo lists them" in refused("bench pocket/nothing")  # a model, as ever


def test_replicas_of_a_cluster_that_does_not_answer(monkeypatch):
    pytest.importorskip("ray.serve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    said = refused("serve", "pocket/coder", "--replicas", 1)
    assert f"RAY_ADDRESS must be a cluster's, got 127.0.0.1:{port}, where nothing answers" in said


@pytest.mark.parametrize(
    ("drafter", "said"), [("pocket/llava", "of vlm-draft"), ("pocket/coder", "of text-draft")]
)
def test_a_drafter_that_is_a_model(drafter, said):
    found = refused("serve", "pocket/coder", "--drafter", drafter)
    assert "a server's drafter must be one of method block, msd, eagle3" in found and said in found
