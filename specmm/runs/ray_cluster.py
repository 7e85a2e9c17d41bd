"""The Ray cluster that this process uses."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray

LOCAL = "127.0.0.1"
ANSWER = 5.0  # seconds in which a cluster must answer


def connect() -> None:
    """Connect to the cluster at RAY_ADDRESS, or start one on this machine.

    Raises ``ValueError`` if it cannot be used.
    """
    if ray.is_initialized():
        return
    _check_address()
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # of another Python, or too slow a start, for which it has no type
        raise ValueError(f"the Ray cluster cannot be used: {last_line(error)}") from error


def last_line(error: BaseException) -> str:
    """The last line of an ``error``, where Ray says why."""
    return next(filter(None, reversed(str(error).strip().splitlines())), "").strip()[:300]


def _check_address() -> None:
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


def living_nodes() -> dict[str, dict[str, Any]]:
    """Ray's descriptions of the nodes that are alive, by its identities.

    Raises ``ValueError`` if the node of this process died: Ray starts nothing for it any more.
    """
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    if ray.get_runtime_context().get_node_id() not in alive:
        raise ValueError("Ray's node on this machine died; run the same command again")
    return alive
