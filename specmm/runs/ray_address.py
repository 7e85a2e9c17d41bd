"""Whether the Ray cluster that RAY_ADDRESS names is there."""

from __future__ import annotations

import os
import socket

LOCAL = "127.0.0.1"
ANSWER = 5.0  # seconds in which a cluster must answer


def check_address() -> None:
    """Raise ``ValueError`` for a cluster's address where nothing answers; Ray would wait for a
    minute and a half and warn.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host or LOCAL, int(port)), timeout=ANSWER).close()
    except OSError as error:
        raise ValueError(
            f"RAY_ADDRESS must be a cluster's, got {address}, where nothing answers ({error}); "
            "start a node there, or unset it to use this machine"
        ) from None
