"""The app's chat with a server: what is asked of it, and what it says."""

import pytest
from PIL import Image

from specmm.app.served import Served, chat, messages_of
from specmm.runs.load import CHAT, COMPLETIONS
from specmm.text.pipeline import TextPipeline
from specmm.vlm.pipeline import VQAPipeline
from tests.commands import refused
from tests.integration.browser import DESKTOP, PATIENCE, browser_here, look, needs_browser
from tests.served import engine_of, served

QUESTION = "What do you see in the picture?"


@pytest.fixture(scope="module")
def pipes():
    return {
        "llava": VQAPipeline.from_pretrained("pocket/llava"),
        "coder": TextPipeline.from_pretrained("pocket/coder"),
    }


@pytest.fixture
def server(pipes):
    with served([engine_of(pipe, name) for name, pipe in pipes.items()], api_key="k") as found:
        yield found


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "red.png"
    Image.new("RGB", (96, 96), "red").save(path)
    return str(path)


def test_turns_with_a_picture(server, pipes, picture):
    asked = Served(server.address, "k")
    assert asked.models == ["llava", "coder"]
    messages = messages_of([], {"text": QUESTION, "files": [picture]})
    assert [part["type"] for part in messages[0]["content"]] == ["image_url", "text"]
    body = {"model": "llava", "messages": messages, "max_tokens": 12, "temperature": 0}
    *_, (said, told) = asked.answer(CHAT, body)
    wanted = pipes["llava"](Image.open(picture), QUESTION, method="ar", max_new_tokens=12).answers[
        0
    ]
    assert said.strip() == wanted.strip()
    assert "tokens a round, exact" in told
    history = [
        {"role": "user", "content": messages_of([], {"text": "a"})[0]["content"]},
        {"role": "assistant", "content": [{"type": "text", "text": said}]},
    ]
    turns = messages_of(history, {"text": "b", "files": []})
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("user", "a"),
        ("assistant", said),
        ("user", "b"),
    ]


def test_a_text_goes_on(server, pipes):
    body = {"model": "coder", "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}
    *_, (said, _) = Served(server.address + "/v1/", "k").answer(COMPLETIONS, body)
    assert said == pipes["coder"]("def add(a, b):", method="ar", max_new_tokens=12).texts[0]


def test_a_server_s_own_sentence_is_told(server):
    asked = Served(server.address, "k")
    with pytest.raises(ValueError, match="max_tokens"):
        list(asked.answer(COMPLETIONS, {"model": "coder", "prompt": "a", "max_tokens": -1}))
    server.end()
    with pytest.raises(ValueError, match=r"about to end|does not answer"):
        list(asked.answer(COMPLETIONS, {"model": "coder", "prompt": "a"}))


def test_no_server(server):
    for url, key in ((server.address, "other"), ("http://127.0.0.1:1", ""), ("not an address", "")):
        with pytest.raises(ValueError, match=r"must list models, got: .*specmm serve MODEL"):
            Served(url, key)
    assert "must list models" in refused("demo", "--app", "--server", "http://127.0.0.1:1")
    assert "--model" in refused("demo", "--app", "--server", "http://x", "--model", "pocket/var")
    assert "--server" in refused("demo", "--server", "http://x")


@pytest.mark.slow
@needs_browser
def test_a_chat_in_a_browser(server, picture):
    from playwright.sync_api import sync_playwright

    from specmm.app.page import serve

    app = chat(Served(server.address, "k"))
    address = serve(app, wait=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_here(), args=["--no-sandbox"])
        page = browser.new_page(viewport=DESKTOP)
        page.set_default_timeout(PATIENCE)
        page.goto(address)
        page.locator("input[type=file]").first.set_input_files(picture)
        for turn, question in enumerate((QUESTION, "What color is it?")):
            box = page.locator("textarea").first
            box.fill(question)
            box.press("Enter")
            page.get_by_test_id("bot").nth(turn).wait_for()
            page.get_by_text("tokens a round").wait_for()
        look(page, "chat")
        browser.close()
    app.close()
