"""A server as several replicas, on one machine or many, by Ray Serve."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from specmm.loading.extras import needed

NAME = "specmm"
LOOK = 5.0  # seconds between two looks at the node of this process


def run(
    build: Callable[[], Any],
    replicas: int,
    host: str,
    port: int,
    seconds: float,
    ongoing: int,
    resources: Mapping[str, float],
    ready: Callable[[], None],
) -> None:
    """Serve ``replicas`` of the application that ``build()`` makes in each, at ``host`` and
    ``port``, until a signal; running requests get ``seconds`` to end.

    Each takes ``ongoing`` requests at a time and has ``resources`` of Ray ("num_cpus", "num_gpus").
    A replica that dies is replaced: its running requests fail, later requests go to the others.
    ``ready()`` is called once all are there. The cluster is the one at RAY_ADDRESS, or one on this
    machine. Raises ``ValueError`` if Ray Serve is not installed, if the cluster cannot be used, for
    replicas that do not start, and when the node of this process dies.
    """
    with needed("--replicas", "replicas"):
        from ray import serve

        from specmm.runs.ray_cluster import connect, living_nodes

    def made() -> Any:  # a function, by which Ray tells a maker from an application
        return build()

    connect()
    ended = threading.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: ended.set())
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "ERROR"})
    deployment = serve.deployment(
        serve.ingress(made)(),
        name=NAME,
        num_replicas=replicas,
        max_ongoing_requests=ongoing,
        ray_actor_options=dict(resources),
        graceful_shutdown_timeout_s=seconds,
    )
    try:
        serve.run(deployment.bind(), name=NAME)
    except RuntimeError as error:
        serve.shutdown()
        raise ValueError(f"the replicas could not be started: {error}") from error
    ready()
    while not ended.wait(LOOK):
        living_nodes()  # for its error
    serve.shutdown()
