"""Pictures of the server: those that it draws, and those that requests name by address, of which it
reads none that only it can reach.
"""

import base64
import io
import socket
import tempfile
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address

import numpy as np
import openai
import pytest
from PIL import Image

import specmm
from specmm.image_ar.records import read_record
from specmm.runs.run import Place, open_model
from specmm.serving import addresses
from specmm.serving.drawing import Painter
from tests.integration import test_vlm_videos
from tests.served import address, engine_of, post, sentence, served, shown

DRAW, CHAT = "/v1/images/generations", "/v1/chat/completions"
RED = Image.new("RGB", (40, 30), "red")
PUBLIC = "93.184.216.34"


# ---- drawing


@pytest.fixture(scope="module")
def painter(tiny):
    return Painter.open(str(tiny), Place(), "auto", None)


@pytest.fixture(scope="module")
def server(painter):
    with served([], [painter]) as server:
        yield server


def test_pictures_are_the_pipelines(server, painter, tiny):
    client = openai.OpenAI(base_url=server.address + "/v1", api_key="any", max_retries=0)
    more = {"seed": 7, "method": "ar", "temperature": 0.9}
    found = client.images.generate(model=str(tiny), prompt="heart", n=2, extra_body=more)
    pictures = [io.BytesIO(base64.b64decode(one.b64_json)) for one in found.data]
    own = open_model("images", str(tiny), Place())
    wanted = own(classes=["heart"] * 2, seed=[7, 8], temperature=0.9).images
    assert [Image.open(one).tobytes() for one in pictures] == [one.tobytes() for one in wanted]
    assert found.size == f"{wanted[0].width}x{wanted[0].height}"
    assert found.specmm["seeds"] == [7, 8] and found.specmm["method"] == "ar"
    assert found.specmm["certificate"].startswith("exact")
    assert read_record(pictures[1])["seed"] == 8  # so that generate --like draws it again
    by_number = client.images.generate(prompt="0", extra_body=more, size="auto")
    assert by_number.data[0].b64_json != found.data[1].b64_json
    again = Image.open(io.BytesIO(base64.b64decode(by_number.data[0].b64_json)))
    assert again.size == wanted[0].size


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt must be the name or number of a class, got None"),
        ({"prompt": "hart"}, "did you mean 'heart'"),
        ({"prompt": 99}, "class id must be below 5"),
        ({"prompt": [1]}, "prompt must be"),
        ({"prompt": "heart", "n": 17}, "n must be a whole number from 1 to 16"),
        ({"prompt": "heart", "size": "1024x1024"}, "must be 24"),
        ({"prompt": "heart", "size": "big"}, "WIDTHxHEIGHT"),
        ({"prompt": "heart", "response_format": "url"}, "pictures are in the answer"),
        ({"prompt": "heart", "method": "cspd"}, "for continuous tokens"),
        ({"prompt": "heart", "method": "ar,sjd"}, "method must be one"),
        ({"prompt": "heart", "quality": "hd"}, "unknown field 'quality'"),
    ],
)
def test_wrong_requests_for_pictures(server, body, message):
    assert message in sentence(server, DRAW, body)


def test_models_are_asked_at_their_own_path(painter, llava_pipe):
    with served([engine_of(llava_pipe, "text")], [painter]) as server:
        body = {"model": "text", "prompt": "a"}
        assert "asked at /v1/chat" in sentence(server, DRAW, body, 404)
        body = {"model": painter.name, "prompt": "a"}
        assert "asked at /v1/images" in sentence(server, "/v1/completions", body, 404)
        body = {"model": painter.name, "prompt": "heart", "seed": 1}
        assert post(server, DRAW, body)[0] == 200


def test_requests_for_pictures_wait_for_one_another_and_not_for_who_has_gone(painter):
    class Slow:
        takes, registry = painter.pipe.takes, painter.pipe.registry
        sampling_options, target = painter.pipe.sampling_options, painter.pipe.target
        begun, interrupted = 0, 0

        def __call__(self, callback_on_step_end, **options):
            self._interrupt, out = False, painter.pipe(**options)
            self.begun += 1
            for _ in range(100):
                callback_on_step_end(self)
                if self._interrupt:
                    self.interrupted += 1
                    out.records[0]["interrupted"] = True
                    break
                time.sleep(0.01)
            return out

    pipe = Slow()
    slow = Painter("slow", pipe, painter.method)
    with served([], [slow], max_waiting=2) as server:
        host, port = server.address.removeprefix("http://").split(":")
        body = b'{"prompt": "heart", "n": 1}'
        head = b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
        lines = [socket.create_connection((host, int(port))) for _ in range(2)]
        for line in lines:
            line.sendall(head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.2)
        assert pipe.begun == 1
        assert "as many as may" in sentence(server, DRAW, {"prompt": "heart"}, 429)
        for line in reversed(lines):
            line.close()
        status, _ = waited(lambda: post(server, DRAW, {"prompt": "heart"}), 429)
        assert status == 200 and pipe.interrupted == 1 and pipe.begun == 2


def waited(ask, busy):
    """The first answer that is not ``busy``."""
    while (found := ask())[0] == busy:
        time.sleep(0.05)
    return found


# ---- addresses


class Pictures(BaseHTTPRequestHandler):
    """``/red`` is a picture, ``/to/ADDRESS`` redirects, ``/long`` never ends."""

    def do_GET(self):
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        data = base64.b64decode(address(RED).partition(",")[2])
        self.wfile.write(data if self.path == "/red?a=b" else b"no picture")
        with suppress(OSError):  # whoever reads it leaves
            while self.path == "/long":
                self.wfile.write(b"x" * 65536)

    def log_message(self, *_):
        pass


@pytest.fixture
def site(monkeypatch):
    """A machine here that names of ``example`` lead to, as if it were a public one."""
    site = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=site.serve_forever, args=(0.01,), daemon=True).start()
    look_up, connect = socket.getaddrinfo, socket.create_connection
    asked = []

    def looked_up(host, port, *rest, **options):
        asked.append(host)
        known = {"a.example": [PUBLIC], "inside.example": ["10.0.0.7"]}
        known["both.example"] = [PUBLIC, "127.0.0.1"]
        if host in known:
            return [(socket.AF_INET, 1, 6, "", (found, port)) for found in known[host]]
        return look_up(host, port, *rest, **options)

    def connected(place, *rest, **options):
        here = place[0] == PUBLIC  # the address that was checked, not the name
        return connect(("127.0.0.1", site.server_port) if here else place, *rest, **options)

    monkeypatch.setattr(addresses.socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(addresses.socket, "create_connection", connected)
    yield asked
    site.shutdown()


@pytest.fixture(scope="module")
def seeing(llava_pipe):
    engine = engine_of(llava_pipe, "llava")
    with served([engine], http_pictures=True, max_bytes=300_000) as server:
        yield server


def ask(source):
    return {"messages": shown(source), "max_tokens": 1, "temperature": 0}


@pytest.mark.parametrize("source", ["http://a.example/red?a=b", "http://a.example/to//red?a=b#c"])
def test_a_picture_of_a_public_machine(seeing, site, source):
    found = [post(seeing, CHAT, ask(one)) for one in (source, address(RED))]
    assert found[0][1]["choices"] == found[1][1]["choices"]
    assert site.count("a.example") == 1 + source.count("/to/")  # one look-up a connection


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("http://127.0.0.1/red", "public machine"),
        ("http://127.1/red", "public machine"),
        ("http://2130706433/red", "public machine"),
        ("http://[::1]/red", "public machine"),
        ("http://[::ffff:127.0.0.1]/red", "public machine"),
        ("http://localhost:8000/v1/models", "public machine"),
        ("http://169.254.169.254/latest/meta-data", "public machine"),
        ("https://10.1.2.3/red", "public machine"),
        ("http://inside.example/red", "public machine"),
        ("http://both.example/red", "public machine"),
        ("http://a.example/to/http://127.0.0.1/red", "public machine"),
        ("http://a.example/to/http://inside.example/red", "public machine"),
        ("http://a.example/to/file:///etc/passwd", "stay at http"),
        ("http://a.example/to/http://a.example/to/x" + "/to/x" * 9, "redirects"),
        ("http://me:word@a.example/red", "without a user's name"),
        ("http://a.example/none", "status 404"),
        ("http://a.example/other", "must be a picture"),
        ("http://a.example/long", "300,000 bytes"),
        ("http://a.example:99999/red", "0-65535"),
        ("http://nobody.invalid/red", "can be fetched"),
        ("http://a.example/\r\nX: y", "can be fetched"),
        ("ftp://a.example/red", "http(s)"),
        ("http://", "http(s)"),
    ],
)
def test_addresses_that_are_not_read(seeing, site, source, message):
    assert message in sentence(seeing, CHAT, ask(source))


def test_a_slow_machine_is_left(site, monkeypatch):
    monkeypatch.setattr(addresses, "PATIENCE", 0.0)
    with pytest.raises(ValueError, match="come within"):
        addresses.fetched("http://a.example/long", 10**9)


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2001:0:7f00:1::", False),
        ("ff02::1", False),
    ],
)
def test_what_is_public(text, public):
    assert addresses.public(ip_address(text)) is public


# ---- films


@pytest.fixture(scope="module")
def watching():
    """A tiny Qwen2.5-VL."""
    return specmm.VQAPipeline(test_vlm_videos.model().eval(), test_vlm_videos.processor())


def film_of(folder, kind, side=48, count=12):
    """A film of so many frames, in a file of a ``kind``."""
    cv2 = pytest.importorskip("cv2")
    file = folder / f"a.{kind}"
    code = {"avi": "MJPG", "mp4": "mp4v"}[kind]
    film = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*code), 10, (side, side))
    for i in range(count):
        film.write(np.full((side, side, 3), 20 * i, np.uint8))
    film.release()
    return file


def gif_of(folder, size=(40, 30), count=4):
    first, *rest = [Image.new("RGB", size, (i, 255 - i, 0)) for i in range(count)]
    first.save(folder / "a.gif", save_all=True, append_images=rest, duration=500)
    return folder / "a.gif"


def watched(file, **more):
    data = f"data:video/mp4;base64,{base64.b64encode(file.read_bytes()).decode()}"
    parts = [{"type": "video_url", "video_url": {"url": data}}, {"type": "text", "text": "what is"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}
    return body | more


@pytest.mark.parametrize("kind", ["avi", "mp4", "gif"])
def test_a_film_is_seen_as_by_the_pipeline(watching, tmp_path, kind):
    file = gif_of(tmp_path) if kind == "gif" else film_of(tmp_path, kind)
    with served([engine_of(watching, "qwen")]) as server:
        status, found = post(server, CHAT, watched(file, n=2))
        assert status == 200, found
    wanted = watching(None, "what is", videos=file, max_new_tokens=6).answers[0]
    assert [c["message"]["content"] for c in found["choices"]] == [wanted] * 2
    assert wanted != watching(None, "what is", max_new_tokens=6).answers[0]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (dict(max_pixels=2000), "12 frames of 2,304"),
        (dict(max_pictures=0), "may have 0 pictures"),
        (dict(max_bytes=300), "300 bytes"),
    ],
)
def test_films_that_are_too_large(watching, tmp_path, limits, message):
    with served([engine_of(watching, "qwen")], **limits) as server:
        status = 413 if "max_bytes" in limits else 400
        assert message in sentence(server, CHAT, watched(film_of(tmp_path, "avi")), status)


def test_frames_that_are_not_shown_are_decoded_too(watching, tmp_path):
    with served([engine_of(watching, "qwen")], max_pixels=260) as server:
        message = sentence(server, CHAT, watched(gif_of(tmp_path, (16, 16), 110)))
    assert "must have 26,000 pixels at most" in message and "110 frames of 256, 1 of" in message


def test_broken_films(watching, tmp_path):
    """The last one is a list of other files, which a reader would open."""
    film = film_of(tmp_path, "mp4").read_bytes()
    still = io.BytesIO()
    RED.save(still, "GIF")
    broken = {
        film[:200]: "video_url must be a video, got one that cannot be read",
        film[: len(film) // 2]: "video_url must be a video, got one that cannot be read",
        still.getvalue(): "video_url must be a video, got a picture that does not move",
        b"": "videos are MP4",
        f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path}/a.mp4\n".encode(): "videos are MP4",
    }
    with served([engine_of(watching, "qwen")]) as server:
        for data, message in broken.items():
            (tmp_path / "b").write_bytes(data)
            said = sentence(server, CHAT, watched(tmp_path / "b"))
            assert message in said and tempfile.gettempdir() not in said
