"""One process's progress in a job, shown by a bar and, if asked for, by metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from tqdm import tqdm

from specmm.loading.extras import needed

EVERY = 60  # seconds between two states of the bar in a log


class Progress:
    """The outcome of one process: how many items it finished (``done``), the ids of those set aside
    (``failed``), whether Ctrl-C ended it, and the ``seconds`` since its start.

    Its bar is over ``total`` items of which ``before`` were done earlier. In a log it appears once
    a minute, and not for shorter jobs.
    """

    def __init__(self, total: int, before: int, metrics: Metrics | None = None) -> None:
        watched = sys.stderr.isatty()
        often = 0.1 if watched else EVERY
        self.bar = tqdm(
            total=total,
            initial=before,
            unit="item",
            smoothing=0.1,
            mininterval=often,
            maxinterval=max(often, 10),
            delay=0 if watched else EVERY,
        )
        self.metrics = metrics
        self.done = 0
        self.failed: list[str] = []
        self.interrupted = False
        self.seconds = 0.0
        self.began = time.perf_counter()

    def observe(self, done: int, failed: Sequence[str], seconds: float, slow: str = "") -> None:
        """Count items ``done`` in ``seconds`` and add the ids of ``failed`` ones; ``slow`` names
        slow machines.
        """
        self.done += done
        self.failed += failed
        self.bar.update(done + len(failed))
        more = {"slow": slow} if slow else {}
        self.bar.set_postfix(batch=done, failed=len(self.failed), **more, refresh=False)
        if self.metrics is not None:
            self.metrics.observe(done, len(failed), seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.began
        self.bar.close()
        if self.metrics is not None:
            self.metrics.close()


class Metrics:
    """Counters for Prometheus at http://127.0.0.1:``port``/metrics; 0 takes a free port."""

    def __init__(self, port: int) -> None:
        with needed("--metrics-port", "batch"):
            from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
        kind: Any = dict(namespace="specmm", registry=(registry := CollectorRegistry()))
        self.done = Counter("items_done", "Items finished by this process.", **kind)
        self.failed = Counter("items_failed", "Items set aside by this process.", **kind)
        self.seconds = Counter("busy_seconds", "Seconds spent in the model.", **kind)
        self.batch = Gauge("batch_size", "Items of the last batch.", **kind)
        try:
            self.server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise ValueError(
                f"metrics port {port} must be free, got: {error.strerror}; choose another"
            ) from error
        self.port = self.server.server_port

    def observe(self, done: int, failed: int, seconds: float) -> None:
        self.done.inc(done)
        self.failed.inc(failed)
        self.seconds.inc(seconds)
        if done:
            self.batch.set(done)

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()
