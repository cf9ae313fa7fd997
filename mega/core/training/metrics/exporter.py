"""An HTTP server in the process of rank 0: /metrics returns metrics of the run for Prometheus, and /health returns
whether the run makes progress. Threads answer with the most recent values of the meters and of `ACTIVITY`, so the run
does not wait for a slow client. This module does not depend on ranks. `processes/roll_call.py` finds the rank for which
other ranks wait.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from mega.core.activity import ACTIVITY, PATIENT, TRAINING
from mega.core.processes.world import restart_count

FIGURES = {
    "loss": "Loss of the last step",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm of the last step",
    "loss_scale": "Loss scale of fp16",
    "consumed": "Training samples consumed since step 0",
    "skipped": "Steps without an update since step 0",
}
"""Column of a metrics row -> description of the gauge for this column."""


class Exporter:
    """The HTTP server, which runs until `close`.

    port: the port to listen on, on all interfaces; 0 chooses a free port. steps: index of the last step. still_s:
    seconds without progress after which /health returns 503. Errors: ValueError if the port is in use.
    """

    def __init__(self, port: int, *, steps: int, still_s: float):
        self._steps, self._still_s, self._began = steps, still_s, time.monotonic()
        self._productive = 0.0
        self._moved: tuple[object, float] = (_place(), self._began)
        """The last known phase and progress counter of the process, and the time at which they last changed."""
        every = self._registry = CollectorRegistry()
        self._figures: dict[str, Gauge] = {}
        restarts = self._gauge("restarts", "Restarts of the ranks since the launch, if the launcher counts them")
        restarts.set(restart_count())
        self._step = self._gauge("step", "Newest step whose numbers are known")
        self._gauge("steps", "Number of the last step").set(steps)
        self._gauge("goodput_ratio", "Share of the time since the start of this process that steps took").set_function(
            lambda: self._productive / max(time.monotonic() - self._began, 1e-9)
        )
        self._gauge("seconds_since_move", "Seconds since a step, a microbatch or a phase has started").set_function(
            self._still
        )
        saved = "the newest saved step; NaN before the first of this process"
        self._gauge("save_age_seconds", f"Seconds since the save of {saved}").set_function(_age)
        self._gauge("save_seconds", f"Duration of the save of {saved}").set_function(lambda: _saved(1))
        self._gauge("save_step", f"Number of {saved}").set_function(lambda: _saved(0))
        phase = Gauge("mega_phase", "1 for the current phase of the process", ("phase",), registry=every)
        spent = Gauge(
            "mega_phase_seconds", "Seconds in each phase since the start of this process", ("phase",), registry=every
        )
        self._spent, self._looked = dict.fromkeys(TRAINING, 0.0), self._began
        for name in TRAINING:
            phase.labels(name).set_function(partial(_is, name))
            spent.labels(name).set_function(partial(self._spent.__getitem__, name))
        self._evaluated = Gauge(
            "mega_evaluation", "Results of the newest evaluation", ("set", "figure"), registry=every
        )
        try:
            self._server = _Server(("", port), self._handler(), self._look)
        except OSError as error:
            raise ValueError(f"--metrics-port {port}: {error.strerror or error}; valid: a free port") from None
        threading.Thread(target=self._server.serve_forever, name="exporter", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def step(self, step: int, row: Mapping[str, float], speed: Mapping[str, float | None]) -> None:
        """Record the metrics of a step. row: the row of `Meters.step`. speed: further metrics by name; a metric whose
        value is None is omitted."""
        self._productive += float(row["seconds"])
        self._step.set(step)
        self._gauge("step_seconds", "Duration of the last step").set(row["seconds"])
        for name, description in FIGURES.items():
            if row.get(name) is not None:
                self._gauge(name, description).set(row[name])
        for name, value in speed.items():
            if value is not None:
                self._gauge(name, "Value of the last step, per device").set(value)

    def evaluation(self, split: str, measured: Mapping[str, float]) -> None:
        for name, value in measured.items():
            self._evaluated.labels(split, name).set(value)

    def health(self) -> tuple[int, dict[str, object]]:
        """Return the HTTP status and the JSON body. The status is 200, or 503 after `still_s` seconds without progress.
        Saves and evaluations have no time limit."""
        still, phase = self._still(), ACTIVITY.phase
        stuck = still > self._still_s and phase not in PATIENT
        body = {"status": "stands still" if stuck else "ok", "phase": phase, "step": ACTIVITY.step}
        return 503 if stuck else 200, {**body, "steps": self._steps, "seconds_since_move": round(still, 1)}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _gauge(self, name: str, description: str) -> Gauge:
        if name not in self._figures:
            self._figures[name] = Gauge(f"mega_{name}", description, registry=self._registry)
        return self._figures[name]

    def slowest(self, rank: int, ratio: float) -> None:
        """Record the rank with the longest working time, and the ratio of this time to that of the other ranks."""
        self._gauge("slowest_rank", "Rank with the longest working time").set(rank)
        self._gauge("slowest_rank_ratio", "Working time of the slowest rank divided by that of the others").set(ratio)

    def _look(self) -> None:
        """Poll the activity, and add the time since the previous poll to the current phase."""
        moment, phase = time.monotonic(), ACTIVITY.phase
        self._spent[phase] = self._spent.get(phase, 0.0) + moment - self._looked
        self._looked = moment
        self._still()

    def _still(self) -> float:
        """Return the seconds since the process last made progress, which is polled twice per second."""
        moment, position = time.monotonic(), _place()
        if position != self._moved[0]:
            self._moved = position, moment
        return moment - self._moved[1]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10
            """Seconds after which the connection of a silent client is closed."""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    status, kind, body = 200, CONTENT_TYPE_LATEST, generate_latest(exporter._registry)
                elif path == "/health":
                    status, health = exporter.health()
                    kind, body = "application/json", json.dumps(health).encode()
                else:
                    status, kind, body = 404, "text/plain", b"/metrics, /health\n"
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Do not log requests, because stderr is the log of the run."""

        return Handler


class _Server(ThreadingHTTPServer):
    """A threading HTTP server. look: function that is called between requests, every half second."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], look: Callable[[], object]):
        self._look = look
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the base class's lookup of the host name, which may query a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def service_actions(self) -> None:
        self._look()

    def handle_error(self, request: object, client_address: object) -> None:
        """Do not log errors of clients, because stderr is the log of the run."""


def _place() -> tuple[str, int]:
    return ACTIVITY.phase, ACTIVITY.moves


def _is(phase: str) -> float:
    return float(ACTIVITY.phase == phase)


def _saved(place: int) -> float:
    return float("nan") if ACTIVITY.saved is None else float(ACTIVITY.saved[place])


def _age() -> float:
    return float("nan") if ACTIVITY.saved is None else time.monotonic() - ACTIVITY.saved[2]
