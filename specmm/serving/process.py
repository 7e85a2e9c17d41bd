"""A server as a process: its port, and its end in two steps.

At the first signal (SIGTERM, SIGINT) it refuses new requests (503), finishes running ones and
exits. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
from types import FrameType
from typing import Any

import uvicorn

from specmm.serving.http import Api

LAST = 2  # seconds for what was cancelled to be sent


class Server(uvicorn.Server):
    """Serves ``app`` at ``host`` and ``port`` (0: a free one); ``seconds`` are given to requests at
    the end. Its ``address`` is bound, though not yet served, from the beginning.

    Raises ``ValueError`` for a port that cannot be taken.
    """

    def __init__(self, app: Any, host: str, port: int, seconds: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # the same whatever else is installed: httptools answers some requests that are
                # too large otherwise, uvloop sets what is set of sockets below by itself
                http="h11",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=LAST,
            )
        )
        self.api: Api = app.state.api
        self.seconds = seconds
        try:
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.socket = socket.create_server(place, family=family, backlog=2048)
            # those that it accepts inherit it: else a stream's second piece waits 40 ms, until the
            # client has acknowledged the first one
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, OverflowError) as error:
            said = getattr(error, "strerror", None) or error
            raise ValueError(
                f"--port must be free at --host, got {host}:{port}: {said}; 0 takes a free one"
            ) from error
        where = f"[{host}]" if ":" in host else host
        self.address = f"http://{where}:{self.socket.getsockname()[1]}"
        self.ending: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests until a signal, or :meth:`end`."""
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets or [self.socket])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """React to a signal."""
        if self.ending is not None:
            os._exit(128 + sig)
        self.end()

    def end(self) -> None:
        """Begin to end, from any thread."""
        self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.ending = self.ending or self.loop.create_task(self._ended())

    async def _ended(self) -> None:
        await self.api.close(self.seconds)
        self.should_exit = True
