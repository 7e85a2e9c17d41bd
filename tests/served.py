"""A server in this process, in a thread of its own."""

import base64
import io
import threading
import time
from contextlib import contextmanager

import httpx

from specmm.serving.asking import Settings
from specmm.serving.engine import BatchEngine
from specmm.serving.http import app_of
from specmm.serving.preparation import Limits
from specmm.serving.process import Server


def engine_of(pipe, name, **limits):
    """The engine of ``pipe``, by a ``name``; it ends with the process."""
    engine = BatchEngine(pipe, Limits(**limits), stripped=hasattr(pipe, "processor"))
    engine.name = name
    return engine


@contextmanager
def served(engines, painters=(), seconds=5.0, **settings):
    """A :class:`Server` of ``engines`` and ``painters``, running."""
    server = Server(app_of(engines, Settings(**settings), painters), "127.0.0.1", 0, seconds)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while httpx.get(server.address + "/health").status_code != 200:
        pass
    yield server
    server.end()
    thread.join(20)
    assert not thread.is_alive()


def post(server, path, body, **options):
    """The status and the JSON of a request's answer."""
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    url = server.address + path
    answer = httpx.post(url, headers=headers, timeout=60, **given, **options)
    return answer.status_code, answer.json()


def sentence(server, path, body, status=400, **options):
    """The sentence of a request's error, which must be of a ``status`` and in OpenAI's form."""
    got, found = post(server, path, body, **options)
    assert got == status, found
    assert found.keys() == {"error"}
    assert found["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(found["error"]["message"], str) and len(found["error"]["message"]) > 10
    return found["error"]["message"]


def address(image, kind="PNG"):
    """``image`` as data."""
    packed = io.BytesIO()
    image.save(packed, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(packed.getvalue()).decode()}"


def shown(*sources, text="What colour is it?"):
    """A chat of pictures and a question."""
    parts = [{"type": "image_url", "image_url": {"url": source}} for source in sources]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def soon(holds):
    """Whether something comes to hold."""
    end = time.monotonic() + 5
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()
