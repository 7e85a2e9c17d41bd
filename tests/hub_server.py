"""A small hub on this machine: it speaks the HTTP API of huggingface.co as far as models are
fetched by, and keeps account of what was fetched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

from specmm import zoo
from specmm.zoo import published

FILE = "/{repo_id}/resolve/{revision}/{filename}"
LARGE = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")  # kept as a hub keeps large files


@dataclass
class Hub:
    """Repositories by name, each a folder; what was ``fetched``; what is ``spoilt`` on its way.

    A file of ``broken`` ends after so many bytes when it is first fetched.
    """

    repositories: dict[str, Path]
    fetched: list[str] = field(default_factory=list)
    began: dict[str, list[int]] = field(default_factory=dict)  # first byte of each fetch
    spoilt: set[str] = field(default_factory=set)
    broken: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # repositories by HTTP status
    listens: bool = False

    def start(self) -> str:
        """The address it listens at."""
        hub = self

        class Handler(_Handler):
            state = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.listens = True
        Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        """Answer no more, if it does."""
        if self.listens:
            self.listens = False
            self.server.shutdown()
            self.server.server_close()

    def files(self, name: str) -> list[Path]:
        """Of a repository, relative to it."""
        folder = self.repositories[name]
        return sorted(f.relative_to(folder) for f in folder.rglob("*") if f.is_file())

    def commit(self, name: str) -> str:
        """Forty digits that change with what the repository holds."""
        held = "".join(f"{f}{self.digest(name, f)}" for f in self.files(name))
        return hashlib.sha1(held.encode()).hexdigest()

    def digest(self, name: str, file: Path | str) -> str:
        """The hash that a hub keeps a file under."""
        data = (self.repositories[name] / file).read_bytes()
        if str(file).endswith(LARGE):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Nothing: tests read ``fetched``."""

    def do_HEAD(self) -> None:
        """The headers of a file."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """A file, or what the hub knows of a repository."""
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        if not self.state.listens:  # connections that were open before
            self.close_connection = True
            return
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        if status := self.state.refused.get(name):
            code = {403: "GatedRepo", 401: "RepoNotFound", 404: "RepoNotFound"}.get(status, "")
            return self._say({"error": code}, status, {"X-Error-Code": code})
        if name not in self.state.repositories:
            return self._say({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if api and "tree" in parts[4:5]:
            return self._say([self._listed(name, file) for file in self.state.files(name)])
        commit = self.state.commit(name)
        if api:
            if parts[4:5] == ["revision"] and parts[5] not in ("main", commit):
                return self._say({}, 404, {"X-Error-Code": "RevisionNotFound"})
            return self._say({"id": name, "sha": commit, "siblings": []})
        return self._file(name, "/".join(parts[4:]), commit, body)

    def _listed(self, name: str, file: Path) -> dict[str, Any]:
        digest = self.state.digest(name, file)
        size = (self.state.repositories[name] / file).stat().st_size
        facts: dict[str, Any] = {"type": "file", "path": str(file), "size": size, "oid": digest}
        if str(file).endswith(LARGE):
            facts["oid"] = digest[:40]
            facts["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
        return facts

    def _file(self, name: str, file: str, commit: str, body: bool) -> None:
        place = self.state.repositories[name] / file
        if not place.is_file():
            return self._say({}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = place.read_bytes()
        if file in self.state.spoilt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        digest = self.state.digest(name, file)
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
        first = int(asked[0] or 0)
        last = int(asked[1]) + 1 if asked[1:] and asked[1] else len(data)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("X-Linked-ETag", f'"{digest}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(data)}")
        self.send_header("Content-Length", str(last - first))
        self.end_headers()
        if not body:
            return
        self.state.fetched.append(f"{name}/{file}")
        self.state.began.setdefault(file, []).append(first)
        if file in self.state.broken:
            last = min(last, first + self.state.broken.pop(file))
            self.close_connection = True
        self.wfile.write(data[first:last])

    def _say(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@contextmanager
def attached(
    hub: Hub, cache: Path, patch: Any, registry: Path = published.REGISTRY
) -> Iterator[Hub]:
    """``hub`` as the one that this process fetches from, into an empty ``cache``; ``patch`` is
    pytest's monkeypatch.
    """
    address = hub.start()
    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + FILE)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    patch.setattr(published, "REGISTRY", registry)
    patch.setattr(published, "FOLDERS", cache / "folders")
    published.published_models.cache_clear()
    zoo.LOCATED.clear()
    yield hub
    hub.stop()
    zoo.LOCATED.clear()
    published.published_models.cache_clear()
