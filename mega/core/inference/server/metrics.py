"""Collect the server's metrics for Prometheus. This module depends on neither routes nor the engine."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of a histogram's buckets in seconds."""


class Metrics:
    """The metrics of a server."""

    def __init__(self) -> None:
        every = self._registry = CollectorRegistry()
        self.requests = Counter("mega_requests", "Requests by route and status", ("route", "status"), registry=every)
        self.prompt_tokens = Counter("mega_prompt_tokens", "Tokens of accepted prompts", registry=every)
        self.new_tokens = Counter("mega_generated_tokens", "Tokens generated", registry=every)
        self.cancelled = Counter(
            "mega_cancelled", "Requests whose client disconnected or that took too long", registry=every
        )
        self.first = self._seconds("mega_time_to_first_token_seconds", "From the complete request to its first token")
        self.between = self._seconds("mega_time_between_tokens_seconds", "Between two tokens of a sequence")
        self.whole = self._seconds("mega_request_seconds", "From the complete request to the complete answer")

    def gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Register a gauge whose value is obtained by calling `read` at each scrape."""
        Gauge(name, about, registry=self._registry).set_function(read)

    def text(self) -> bytes:
        """Return the metrics in Prometheus's exposition format 0.0.4."""
        return generate_latest(self._registry)

    def _seconds(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, buckets=SECONDS, registry=self._registry)
