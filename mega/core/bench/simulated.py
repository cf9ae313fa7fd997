"""Predict the speed of a server without a device: the engine's own scheduler, with predicted instead of computed steps.

    SimulatedWorker   takes the place of an engine's worker: a step ends after its estimated time
    speed             times of a single request, of concurrent requests, and of requests that arrive at a rate

All answer tokens are 0, and times are those of a simulated clock. This module does not depend on weights or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from mega.core.bench.load import Load, ServingRow, run_on_engine, summary
from mega.core.estimate.serving import Seconds, ServingTimes, step_size
from mega.core.inference.cache import Blocks
from mega.core.inference.engine import BatchingEngine
from mega.core.inference.graphs import MANY, GraphShape, graph_rows, rows_of_graphs, shape_counts
from mega.core.inference.options import BLOCK
from mega.core.inference.request import Limits
from mega.core.inference.schedule import Choice
from mega.core.inference.step import Step, scratch_step
from mega.core.inference.worker import Worker


class SimulatedWorker:
    """Runs an engine's steps on a simulated clock. seconds: time of all steps, by limiting factor."""

    tile = adapters = reader = None

    def __init__(self, model: ServingTimes) -> None:
        self.model, self.graphs, self.many = model, self, MANY
        self.now, self.seconds = 0.0, Seconds()
        self._idle_until, self._free = 0.0, [0.0] * model.pp
        self._known: dict[int, float] = {}

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock while no request is in flight."""
        self.now += seconds
        self._idle_until = self.now

    def launch(self, step: Step) -> SimulatedStep:
        """Launch a step. It starts when the host has built it, the first stage is free, and its tokens are known."""
        self.now += self.model.host(len(step.counts))
        tokens_ready = max((self._known.get(~token, 0.0) for token in step.tokens.tolist() if token < 0), default=0.0)
        ready = max(self._free[0], tokens_ready, self._idle_until)
        self.seconds += Seconds(host=max(0.0, self.now - ready))
        end = max(self.now, ready)
        for stage, seconds in enumerate(self.stages(step)):
            end = self._free[stage] = max(end, self._free[stage]) + seconds.all
            self.seconds += seconds * (1 / self.model.pp)
        self._known |= dict.fromkeys(step.requests.tolist(), end)
        return SimulatedStep(self, end, len(step.wanted))

    def stages(self, step: Step) -> list[Seconds]:
        """Return the predicted time of a step on each stage."""
        tokens = len(step.tokens)
        if tokens == len(step.counts) == len(step.wanted):
            padded = graph_rows(tokens)
        else:
            padded = next((size for size in MANY if size >= tokens), tokens)
        return self.model.step(step_size(step.counts.tolist(), step.lengths.tolist(), padded, len(step.wanted)))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class SimulatedStep:
    """A launched step, whose results are known at the time `end`."""

    worker: SimulatedWorker
    end: float
    rows: int

    def choices(self) -> list[Choice]:
        self.worker.now = max(self.worker.now, self.end)
        return [Choice(0)] * self.rows


def engine_of(model: ServingTimes, limits: Limits) -> tuple[BatchingEngine, SimulatedWorker]:
    """Return a warmed-up engine, configured as `start_engine` would on CUDA devices, and its worker."""
    worker = SimulatedWorker(model)
    blocks = Blocks(limits.cache // BLOCK + 1, BLOCK)
    depth = 1 + model.pp
    engine = BatchingEngine(cast(Worker, worker), limits, blocks, chunk=None, depth=depth, groups=model.pp)
    singles = [GraphShape("single", size) for size in sorted(rows_of_graphs(limits.requests))]
    for shape in (*singles, *(GraphShape("many", size) for size in MANY)):
        step = scratch_step(shape_counts(shape, limits.longest), BLOCK, limits.vocab)
        seconds = sum(each.all for each in worker.stages(step))
        engine.chunks.note_duration(shape, model.host(len(step.counts)) + seconds)
    return engine, worker


LIMITS = {"host": "the host: it is host-bound", "exchange": "exchanges between ranks", "kernels": "starts of kernels"}
"""Descriptions of the limiting factors whose names are not clear enough."""


@dataclass(frozen=True)
class Simulated:
    """The result of a load, and the time of its steps by limiting factor."""

    row: ServingRow
    seconds: Seconds

    @property
    def limit(self) -> str:
        """The factor that takes most of the time, and its share."""
        name = self.seconds.limit
        words = {
            "host": "the host: it is host-bound",
            "exchange": "exchanges between ranks",
            "kernels": "kernel starts",
        }
        return f"{words.get(name, name)} ({vars(self.seconds)[name] / self.seconds.all:.0%} of the time)"

    def fields(self) -> dict[str, object]:
        """Return the result for --json. Its key `limits` has the fraction of the time that each factor takes."""
        limits = {name: value / self.seconds.all for name, value in vars(self.seconds).items()}
        return {**self.row.fields(), "limit": self.seconds.limit, "limits": limits}


def simulated(model: ServingTimes, limits: Limits, load: Load) -> Simulated:
    """Run a load on a simulated engine. Errors: ValueError if a request does not fit."""
    engine, worker = engine_of(model, limits)
    timings = run_on_engine(engine, load, worker.clock, worker.sleep)
    return Simulated(summary(load, timings), worker.seconds)


@dataclass(frozen=True)
class ServingSpeed:
    """The predicted speed of a server.

    first: prompt length -> seconds to the first token of a single request. alone: result for one request.
    at_once: result for as many requests as the server can run concurrently. at_rate: result for requests that arrive at
    random; None if no rate is given.
    """

    first: dict[int, float]
    alone: Simulated
    at_once: Simulated
    at_rate: Simulated | None

    @property
    def per_token(self) -> float:
        """Seconds between two tokens of a single request."""
        row = self.alone.row
        return (row.whole - row.first[0]) / max(row.new - 1, 1)

    def lines(self) -> list[str]:
        """Describe the speed for the user."""
        alone, at_once = self.alone, self.at_once.row
        first = ", ".join(f"{1e3 * seconds:.0f} ms ({length:,})" for length, seconds in self.first.items())
        load = f"{at_once.requests} requests at once, {at_once.prompt:,} + {at_once.new:,} tokens each"
        lines = [
            f"first token of a request alone, by prompt tokens: {first}",
            f"one request: {1e3 * self.per_token:.2f} ms per token after {alone.row.prompt:,} prompt tokens; "
            f"limited by {alone.limit}",
            f"{load}: {_words(self.at_once)}",
        ]
        if self.at_rate is not None:
            rate = self.at_rate.row.rate
            grows = "; too many: the queue grows" if rate * at_once.new > at_once.tokens_per_second else ""
            lines.append(f"{rate:g} requests a second: {_words(self.at_rate)}{grows}")
        return lines

    def fields(self) -> dict[str, object]:
        """Return the speed for --json, in seconds."""
        rate = None if self.at_rate is None else self.at_rate.fields()
        values = {"alone": self.alone.fields(), "at_once": self.at_once.fields(), "at_rate": rate}
        return {"first": self.first, "per_token": self.per_token, **values}


def _words(result: Simulated) -> str:
    row = result.row
    (first, last_first), (between, _) = row.first, row.between
    return (
        f"{row.tokens_per_second:,.0f} tokens/s; first token after {1e3 * first:.0f} ms (99th percentile "
        f"{1e3 * last_first:.0f}), {1e3 * between:.1f} ms between tokens; limited by {result.limit}"
    )


RATE_REQUESTS = 128
"""Number of simulated requests that arrive at a given rate."""

FIRST = (128, 512, 2048, 8192, 32768)
"""Prompt lengths for which the time to the first token is predicted."""


def speed(model: ServingTimes, limits: Limits, load: Load) -> ServingSpeed:
    """Predict the speed of a server. load: the request rate, the number of requests that arrive at this rate, and the
    numbers of prompt and new tokens per request.

    Errors: ValueError if a request does not fit.
    """
    longest = min(limits.longest, limits.cache)
    lengths = sorted({load.prompt, *(length for length in FIRST if length < longest)})
    alone = Load(0, 1, load.prompt, load.new)
    return ServingSpeed(
        {length: simulated(model, limits, Load(0, 1, length, 1)).row.first[0] for length in lengths},
        simulated(model, limits, alone),
        simulated(model, limits, replace(alone, requests=limits.requests)),
        simulated(model, limits, load) if load.rate else None,
    )
