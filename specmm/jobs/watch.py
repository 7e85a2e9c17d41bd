"""Progress of a job for people (a bar with rate and time left) and for Prometheus.

Shape letters: none.
"""

from __future__ import annotations

from typing import Any, Self

from tqdm import tqdm


class Bar:
    """A progress bar over ``total`` items of which ``before`` were done earlier, and metrics where
    wanted.
    """

    def __init__(self, total: int, before: int, metrics: Metrics | None = None) -> None:
        self.bar = tqdm(total=total, initial=before, unit="item", disable=None, smoothing=0.1)
        self.failures, self.metrics = 0, metrics

    def observe(self, done: int, failed: int, batch: int, seconds: float) -> None:
        """See :class:`specmm.jobs.run.Watch`."""
        self.failures += failed
        self.bar.update(done + failed)
        self.bar.set_postfix(batch=batch, failed=self.failures, refresh=False)
        if self.metrics is not None:
            self.metrics.observe(done, failed, batch, seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()


class Metrics:
    """Counters for Prometheus at http://127.0.0.1:``port``/metrics (0 takes a free port, see
    ``port``).
    """

    def __init__(self, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
        except ModuleNotFoundError as error:
            raise ValueError(
                "metrics need prometheus_client, run: pip install 'specmm[batch]'"
            ) from error
        registry = CollectorRegistry()
        self.done = Counter(
            "specmm_items_done", "Items finished by this process.", registry=registry
        )
        self.failed = Counter(
            "specmm_items_failed", "Items set aside by this process.", registry=registry
        )
        self.seconds = Counter(
            "specmm_busy_seconds", "Seconds spent in the model.", registry=registry
        )
        self.batch = Gauge("specmm_batch_size", "Items of the last batch.", registry=registry)
        try:
            server: Any = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise ValueError(
                f"metrics port {port} must be free, got: {error.strerror}; choose another"
            ) from error
        self.server, self.port = server[0], server[0].server_port

    def observe(self, done: int, failed: int, batch: int, seconds: float) -> None:
        """See :class:`specmm.jobs.run.Watch`."""
        self.done.inc(done)
        self.failed.inc(failed)
        self.seconds.inc(seconds)
        if batch:
            self.batch.set(batch)

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()
