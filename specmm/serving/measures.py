"""A server's measurements and its engines' counts, in Prometheus' format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from specmm.serving.requests import Ended, Engine, Piece

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/images/generations", "/v1/models")


class Measures:
    """Requests by path and status, seconds to the first token and between tokens (a round's are
    shared by its tokens), and the counts of ``engines`` by model.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.registry = CollectorRegistry()
        kind = dict(namespace="specmm", registry=self.registry)
        self.requests = Counter("requests", "Answered requests.", ["path", "status"], **kind)
        self.first = Histogram(
            "first_token_seconds", "To the first token.", ["model"], buckets=FIRST, **kind
        )
        self.between = Histogram(
            "between_tokens_seconds", "Between tokens.", ["model"], buckets=BETWEEN, **kind
        )
        self.registry.register(self)

    def answered(self, path: str, status: int) -> None:
        """Count an answer; unknown paths are one, since there could be any number of them."""
        known = next((one for one in PATHS if path.startswith(one)), "other")
        self.requests.labels(known, str(status)).inc()

    def timed(self, model: str, start: float) -> Callable[[int, Any], None]:
        """The function that times pieces of ``model``'s answers to a request of ``start``."""
        last: dict[int, float] = {}
        first, between = self.first.labels(model), self.between.labels(model)

        def seen(number: int, event: Piece | Ended) -> None:
            if isinstance(event, Ended) or not event.tokens:
                return
            now = time.perf_counter()
            if number not in last:
                first.observe(now - start)
            else:
                for _ in event.tokens:
                    between.observe((now - last[number]) / len(event.tokens))
            last[number] = now

        return seen

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The counts of all engines; names that end in ``_total`` are counters."""
        found: dict[str, Any] = {}
        for engine in self.engines:
            for name, value in engine.counts().items():
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                title = f"Of engines: {name.replace('_', ' ')}."
                family = found.setdefault(
                    name, kind(f"specmm_engine_{name}", title, labels=["model"])
                )
                family.add_metric([engine.name], value)
        yield from found.values()

    def page(self) -> tuple[str, bytes]:
        """The content type and the text of all measurements."""
        return CONTENT_TYPE_LATEST, generate_latest(self.registry)
