"""Pictures and films that a request names by address: data, and http(s) of public machines alone.

Otherwise a client could have the server read files and hosts that only the server can reach. So
files are never opened, a host's addresses are looked up once and all must be public, and the
connection goes to one of those that were checked; redirects are followed in the same way.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import ipaddress
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from PIL import Image
from transformers.video_utils import VideoMetadata

from specmm.extending.kinds import shown
from specmm.loading.files import sentence_of
from specmm.loading.pictures import header, upright
from specmm.serving.fields import Refused
from specmm.vlm.videos import Choice, Frames, TooLarge, Video, open_video

PATIENCE = 10.0  # seconds that a picture may take to arrive
REDIRECTS = 3
PIECE = 1 << 16  # bytes read at a time
# MP4 and MOV, WebM and Matroska, AVI: other kinds may be lists of other files, which a reader opens
FILM = re.compile(rb".{4}ftyp|\x1aE\xdf\xa3|RIFF.{4}AVI ", re.DOTALL)
MOST_FRAMES = 1024  # shown frames of a film
DECODED = 100  # times the pixels that are shown may be decoded: frames in between, too
PUBLIC_V6 = ipaddress.ip_network("2000::/3")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Looking:
    """Opens the pictures and films of one request: at most ``pictures`` of ``pixels`` in all, each
    in at most ``size`` bytes, from other machines only with ``remote``.
    """

    def __init__(self, pictures: int, pixels: int, size: int, remote: bool) -> None:
        self.pictures = self.left = pictures
        self.pixels = pixels
        self.size = size
        self.remote = remote

    def picture(self, address: Any, place: str) -> Image.Image:
        """The picture at an ``address``, which is called ``place`` in the request; raises
        :class:`Refused` if it is no picture, must not be reached, or is too large.
        """
        with self._next(place):
            found = header(io.BytesIO(self._read(address)), self.pixels)
            self.pixels -= found.width * found.height
            return upright(found)

    def film(self, address: Any, place: str) -> Video:
        """The film at an ``address``, as :meth:`picture`. The frames that a processor chooses are
        decoded once, when it asks for them; ``ValueError`` if it is no film.
        """
        with self._next(place):
            data = self._read(address)
            count = size = 1
            if FILM.match(data) is None:  # an animation
                try:
                    with header(io.BytesIO(data), self.pixels) as found:
                        count, size = getattr(found, "n_frames", 1), found.width * found.height
                except Exception as error:  # a damaged film fails in any way
                    kinds = "videos are MP4, MOV, WebM, MKV, AVI, GIF, WebP or APNG"
                    raise ValueError(f"{sentence_of(error)}; {kinds}") from error
        self._check(place, count, 1, size)
        frames: list[Frames] = []

        def read(choose: Choice) -> Frames:
            if not frames:
                frames.append(self._decoded(data, place, choose))
                self.pixels -= frames[0][0][..., 0].size
            return frames[0]

        return Video(place, read)

    @contextmanager
    def _next(self, place: str) -> Iterator[None]:
        """Context for one more picture, called ``place``; its errors begin with "must"."""
        if self.left == 0:
            raise Refused(f"a request may have {self.pictures} pictures, got more", place)
        self.left -= 1
        try:
            yield
        except (ValueError, OSError) as error:
            raise Refused(f"{place} {sentence_of(error)}", place) from error

    def _decoded(self, data: bytes, place: str, choose: Choice) -> Frames:
        """The frames of a film that are chosen."""

        def chosen(metadata: VideoMetadata, **_: Any) -> Sequence[int]:
            found = choose(metadata)
            size = (metadata.height or 0) * (metadata.width or 0)
            self._check(place, metadata.total_num_frames, len(found), size)
            return found

        with tempfile.NamedTemporaryFile() as file:  # not all readers take bytes
            file.write(data)
            file.flush()
            try:
                return open_video(Path(file.name)).read(chosen)
            except ValueError as error:
                raise ValueError(str(error).replace(file.name, place)) from None

    def _check(self, place: str, count: int, shown: int, size: int) -> None:
        """Refuse a film of ``count`` frames of ``size`` pixels, ``shown`` of them, if too many."""
        most, read = self.pixels, self.pixels * DECODED
        if shown > MOST_FRAMES or shown * size > most or count * size > read:
            raise TooLarge(
                f"{place} must have {read:,} pixels at most, {most:,} of them in at most "
                f"{MOST_FRAMES} frames that are shown, got {count} frames of {size:,}, {shown} of "
                "them shown; shorten it or scale it down"
            )

    def _read(self, address: Any) -> bytes:
        """The bytes at ``address``; errors begin with "must"."""
        if isinstance(address, str) and address[:5].lower() == "data:":
            head, comma, data = address.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise ValueError("must be data:image/…;base64,… or an address, got other data")
            try:
                return base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError) as error:
                raise ValueError(f"must be base64 after its comma, got: {error}") from error
        if not isinstance(address, str) or urlsplit(address).scheme not in ("http", "https"):
            raise ValueError(f"must be data:image/…;base64,… or http(s), got {shown(address)}")
        if not self.remote:
            raise ValueError(
                "must be data:image/…;base64,…, got an address, which this server does not fetch "
                "(specmm serve --allow-http-pictures does)"
            )
        return fetched(address, self.size)


def fetched(address: str, most: int) -> bytes:
    """At most ``most`` bytes from an http(s) ``address`` of a public machine.

    Raises ``ValueError``, with a text that begins with "must", for other addresses and for
    failures.
    """
    end = time.monotonic() + PATIENCE
    for _ in range(REDIRECTS + 1):
        try:
            found = _answer(address, most, end)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            said = sentence_of(error)
            raise ValueError(f"must be a picture that can be fetched, got: {said}") from error
        if isinstance(found, bytes):
            return found
        address = urljoin(address, found)
    raise ValueError(f"must be fetched within {REDIRECTS} redirects, got more")


def _answer(address: str, most: int, end: float) -> bytes | str:
    """The bytes at ``address``, or where it redirects to."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("must stay at http(s) addresses without a user's name, got another")
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    port = parts.port or kind.default_port
    connection = kind(parts.hostname, port, timeout=max(end - time.monotonic(), 0.1))
    # in place of socket.create_connection: the names of hosts stay those of certificates
    connection._create_connection = _connected  # type: ignore[attr-defined]
    try:
        path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.request("GET", path, headers={"User-Agent": "specmm"})
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308):
            return answer.headers.get("Location", "")
        if answer.status != 200:
            raise ValueError(f"must be a picture that can be fetched, got status {answer.status}")
        read = bytearray()
        while piece := answer.read1(PIECE):
            read += piece
            if len(read) > most or time.monotonic() > end:
                raise ValueError(
                    f"must have at most {most:,} bytes, which come within {PATIENCE} s"
                )
        return bytes(read)
    finally:
        connection.close()


def _connected(place: tuple[str, int], timeout: float, *_: Any) -> socket.socket:
    """A connection to a ``place`` (host, port), all of whose addresses are public."""
    found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    hosts = [str(one[-1][0]) for one in found]
    if not all(public(ipaddress.ip_address(host.partition("%")[0])) for host in hosts):
        raise ValueError(f"must be on a public machine, got {place[0]}, which is not")
    return socket.create_connection((hosts[0], place[1]), timeout)


def public(address: Address) -> bool:
    """Whether an ``address`` belongs to the whole internet: not to this machine or its networks."""
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    hidden = address.sixtofour or address.teredo  # ways to an IPv4 address that may be any
    return address.is_global and address in PUBLIC_V6 and not hidden
