"""A run's figures for Prometheus at /metrics, and whether it moves at /health, over HTTP from the process of rank 0.

Threads answer, from the last figures that the meters gave and from `ACTIVITY`; the run does not wait for a slow
reader. It knows no ranks: processes/roll_call.py names the one that others wait for.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from mega.core.activity import ACTIVITY, PATIENT, TRAINING

FIGURES = {
    "loss": "Of the last step",
    "lr": "Learning rate",
    "grad_norm": "Norm of the last step's gradient",
    "loss_scale": "Of fp16",
    "consumed": "Samples since the training began",
    "skipped": "Steps without an update since the training began",
}
"""Of a row of metrics, those that become a gauge each: what it is."""


class Exporter:
    """Answers until it is closed.

    port: on all interfaces; 0 takes a free one. steps: the last one. still_s: how long a step may take before /health
    says 503.
    Errors: ValueError where the port is taken.
    """

    def __init__(self, port: int, *, steps: int, still_s: float):
        self._steps, self._still_s, self._began = steps, still_s, time.monotonic()
        self._productive = 0.0
        self._moved: tuple[object, float] = (_place(), self._began)
        """Where the process was seen last, and since when."""
        every = self._registry = CollectorRegistry()
        self._figures: dict[str, Gauge] = {}
        restarts = self._gauge("restarts", "Of this launch's ranks, by a launcher that counts them")
        restarts.set(int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0))
        self._step = self._gauge("step", "Newest step whose numbers are known")
        self._gauge("steps", "The last one of the run").set(steps)
        self._gauge("goodput_ratio", "Share of the time since the start of this process that steps took").set_function(
            lambda: self._productive / max(time.monotonic() - self._began, 1e-9)
        )
        self._gauge("seconds_since_move", "Since a step, a microbatch or a phase began").set_function(self._still)
        saved = "the newest saved step; NaN before the first of this process"
        self._gauge("save_age_seconds", f"Since {saved}").set_function(_age)
        self._gauge("save_seconds", f"Taken by {saved}").set_function(lambda: _saved(1))
        self._gauge("save_step", f"Number of {saved}").set_function(lambda: _saved(0))
        phase = Gauge("mega_phase", "1 for what the process does", ("phase",), registry=every)
        spent = Gauge("mega_phase_seconds", "Since the start of this process", ("phase",), registry=every)
        self._spent, self._looked = dict.fromkeys(TRAINING, 0.0), self._began
        for name in TRAINING:
            phase.labels(name).set_function(partial(_is, name))
            spent.labels(name).set_function(partial(self._spent.__getitem__, name))
        self._evaluated = Gauge("mega_evaluation", "By the newest evaluation", ("set", "figure"), registry=every)
        try:
            self._server = _Server(("", port), self._handler(), self._look)
        except OSError as error:
            raise ValueError(f"--metrics-port {port}: {error.strerror or error}; valid: a free port") from None
        threading.Thread(target=self._server.serve_forever, name="exporter", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def step(self, step: int, row: Mapping[str, float], speed: Mapping[str, float | None]) -> None:
        """A step's numbers. row: as of `Meters.step`. speed: more figures by name; None is left out."""
        self._productive += float(row["seconds"])
        self._step.set(step)
        self._gauge("step_seconds", "Of the last step").set(row["seconds"])
        for name, about in FIGURES.items():
            if row.get(name) is not None:
                self._gauge(name, about).set(row[name])
        for name, value in speed.items():
            if value is not None:
                self._gauge(name, "Of the last step, of one device").set(value)

    def evaluation(self, split: str, measured: Mapping[str, float]) -> None:
        for name, value in measured.items():
            self._evaluated.labels(split, name).set(value)

    def health(self) -> tuple[int, dict[str, object]]:
        """200, or 503 where nothing has moved for too long; a save or an evaluation has a pace of its own."""
        still, phase = self._still(), ACTIVITY.phase
        stands = still > self._still_s and phase not in PATIENT
        found = {"status": "stands still" if stands else "ok", "phase": phase, "step": ACTIVITY.step}
        return 503 if stands else 200, {**found, "steps": self._steps, "seconds_since_move": round(still, 1)}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _gauge(self, name: str, about: str) -> Gauge:
        if name not in self._figures:
            self._figures[name] = Gauge(f"mega_{name}", about, registry=self._registry)
        return self._figures[name]

    def slowest(self, rank: int, ratio: float) -> None:
        """The rank whose own work takes longest, and how many times as long as that of others."""
        self._gauge("slowest_rank", "Whose own work takes longest").set(rank)
        self._gauge("slowest_rank_ratio", "How many times as long as that of the others").set(ratio)

    def _look(self) -> None:
        """Where the process is; the time since the look before is that phase's."""
        now, phase = time.monotonic(), ACTIVITY.phase
        self._spent[phase] = self._spent.get(phase, 0.0) + now - self._looked
        self._looked = now
        self._still()

    def _still(self) -> float:
        """Seconds since a look that found it elsewhere than the one before; the server looks twice a second."""
        now, place = time.monotonic(), _place()
        if place != self._moved[0]:
            self._moved = place, now
        return now - self._moved[1]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10
            """Seconds that a silent client is listened to."""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    status, kind, body = 200, CONTENT_TYPE_LATEST, generate_latest(exporter._registry)
                elif path == "/health":
                    status, found = exporter.health()
                    kind, body = "application/json", json.dumps(found).encode()
                else:
                    status, kind, body = 404, "text/plain", b"/metrics, /health\n"
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """A request is not reported: the log is the run's."""

        return Handler


class _Server(ThreadingHTTPServer):
    """look: is called between requests, every half second."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], look: Callable[[], object]):
        self._look = look
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without asking a name server what this host is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def service_actions(self) -> None:
        self._look()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is not reported: the log is the run's."""


def _place() -> tuple[str, int]:
    return ACTIVITY.phase, ACTIVITY.moves


def _is(phase: str) -> float:
    return float(ACTIVITY.phase == phase)


def _saved(place: int) -> float:
    return float("nan") if ACTIVITY.saved is None else float(ACTIVITY.saved[place])


def _age() -> float:
    return float("nan") if ACTIVITY.saved is None else time.monotonic() - ACTIVITY.saved[2]
