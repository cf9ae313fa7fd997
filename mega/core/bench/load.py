"""Measure an engine or a server under load: requests arrive at random times at given rates, and each token is timed.

    time to first token     from a request's arrival to its first token, including the time in the queue
    time between tokens     from each token of a request to its next one
    throughput              new tokens of all requests, from the first arrival to the last token

Arrivals are a Poisson process with a fixed seed; with rate 0 all requests arrive simultaneously. Prompts are random
tokens, so no prefix is shared; answers always have the requested number of tokens. This module does not depend on
weights or flags.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from urllib.parse import urlsplit

from mega.core.inference.request import Engine, Request, RequestError, Sampling
from mega.core.report.chart import Charts, Scale, svg
from mega.core.report.read import Series

SEED = 1


@dataclass(frozen=True)
class Load:
    """A load: a number of requests that arrive at one rate."""

    rate: float
    """Requests per second; 0 if all requests arrive simultaneously."""
    requests: int
    prompt: int
    """Number of tokens in each prompt."""
    new: int
    """Number of tokens in each answer."""

    def arrivals(self) -> list[float]:
        """Return the arrival times of the requests, in seconds.

        >>> [round(second, 2) for second in Load(2.0, 3, 1, 1).arrivals()]
        [0.0, 0.07, 1.01]
        """
        draw = random.Random(SEED)
        gaps = [0.0, *(draw.expovariate(self.rate) if self.rate else 0.0 for _ in range(self.requests - 1))]
        return list(accumulate(gaps))

    def prompts(self, vocab: int) -> list[tuple[int, ...]]:
        """Return prompts of random ids below `vocab`. Each load has different prompts, because an engine may have
        cached the prompts of an earlier load."""
        draw = random.Random(f"{SEED} {self}")
        return [tuple(draw.randrange(vocab) for _ in range(self.prompt)) for _ in range(self.requests)]


@dataclass(frozen=True)
class Timing:
    """Measured times of one request, in seconds."""

    arrival: float
    tokens: tuple[float, ...]
    """Times at which tokens arrived."""
    error: str = ""
    """Reason why the answer is incomplete; empty if the answer is complete."""
    count: int | None = None
    """Number of tokens in the answer; None if `tokens` has one time per token."""


@dataclass(frozen=True)
class ServingRow:
    """The result of one load."""

    rate: float
    requests: int
    failed: int
    prompt: int
    new: int
    seconds: float
    """Time from the first arrival to the last token."""
    tokens_per_second: float
    requests_per_second: float
    first: tuple[float, float]
    """Time to first token, in seconds: median and 99th percentile."""
    between: tuple[float, float]
    """Time between tokens, in seconds: median and 99th percentile."""
    whole: float
    """Median time of a whole request, in seconds."""

    def fields(self) -> dict[str, object]:
        """Return the row for --json."""
        return {"name": "serve", **asdict(self)}


def summary(load: Load, timings: Sequence[Timing]) -> ServingRow:
    """Return the result of a load, computed from `timings`. Errors: ValueError if no request was answered."""
    good = [each for each in timings if not each.error]
    if not good:
        raise ValueError(f"--rate {load.rate:g}: no request was answered: {timings[0].error}")
    end = max(each.tokens[-1] for each in good)
    seconds = max(end - timings[0].arrival, 1e-9)
    count = sum(len(each.tokens) if each.count is None else each.count for each in good)
    gaps = [after - before for each in good for before, after in pairwise(each.tokens)]
    return ServingRow(
        rate=load.rate,
        requests=len(timings),
        failed=len(timings) - len(good),
        prompt=load.prompt,
        new=load.new,
        seconds=seconds,
        tokens_per_second=count / seconds,
        requests_per_second=len(good) / seconds,
        first=_spread([each.tokens[0] - each.arrival for each in good]),
        between=_spread(gaps or [0.0]),
        whole=statistics.median(each.tokens[-1] - each.arrival for each in good),
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Return median and 99th percentile.

    >>> _spread([float(n) for n in range(101)])
    (50.0, 99.0)
    """
    ordered = sorted(values)
    return statistics.median(ordered), ordered[round(0.99 * (len(ordered) - 1))]


# -- an engine


def run_on_engine(
    engine: Engine,
    load: Load,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Timing]:
    """Run the requests of a load on an idle engine. clock, sleep: functions for the engine's time, which may be
    simulated.

    Errors: ValueError if a request does not fit.
    """
    prompts, arrivals = load.prompts(engine.limits.vocab), load.arrivals()
    numbers: dict[int, int] = {}
    times: list[list[float]] = [[] for _ in prompts]
    begin, next_prompt = clock(), 0
    while next_prompt < len(prompts) or not engine.idle:
        seconds = clock() - begin
        while next_prompt < len(prompts) and arrivals[next_prompt] <= seconds:
            request = Request(prompt=prompts[next_prompt], tokens=load.new, sampling=Sampling(seed=next_prompt))
            try:
                numbers[engine.add(request)] = next_prompt
            except RequestError as error:
                raise ValueError(f"--prompt-tokens {load.prompt}, --new-tokens {load.new}: {error}") from None
            next_prompt += 1
        # An idle engine has no step to run before the next request arrives; sleep briefly instead of polling.
        if engine.idle:
            sleep(min(max(arrivals[next_prompt] - seconds, 0.0), 0.001))
            continue
        events = engine.step()
        seconds = clock() - begin
        for event in events:
            if event.token is not None:
                times[numbers[event.request]].append(seconds)
    return [Timing(arrival, tuple(each)) for arrival, each in zip(arrivals, times, strict=True)]


# -- a server


def run_on_server(url: str, load: Load, vocab: int) -> list[Timing]:
    """Send the requests of a load to /v1/completions at `url` (HOST:PORT), each on a separate connection.

    Errors: ValueError if the address is invalid; OSError if no server answers.
    """
    return asyncio.run(_ask_all(*_address(url), load, load.prompts(vocab)))


def vocabulary(url: str) -> int:
    """Return the vocabulary size of a server, from /tokenizer_info. Errors: as in `run_on_server`."""
    status, lines = asyncio.run(_whole(*_address(url), "/tokenizer_info"))
    try:
        return int(json.loads(lines)["vocab_size"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--url {url}: /tokenizer_info answers {status}, and no vocab_size") from None


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "http" or not host or not port:
        raise ValueError(f"--url {url}: must be HOST:PORT")
    return host, port


def _head(host: str, method: str, path: str, body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += ["Content-Type: application/json"]
    if os.environ.get("MEGA_TOKEN"):
        lines.append(f"Authorization: Bearer {os.environ['MEGA_TOKEN']}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _whole(host: str, port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(_head(host, "GET", path, b""))
    response = await reader.read()
    writer.close()
    head, _, body = response.decode(errors="replace").partition("\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


async def _ask_all(host: str, port: int, load: Load, prompts: Sequence[Sequence[int]]) -> list[Timing]:
    begin = time.perf_counter()

    async def one(number: int, arrival: float) -> Timing:
        await asyncio.sleep(max(0.0, begin + arrival - time.perf_counter()))
        fields = {"prompt": list(prompts[number]), "max_tokens": load.new, "seed": number, "ignore_eos": True}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            times, error, count = await _stream(host, port, json.dumps(fields).encode(), begin)
        except OSError as problem:
            times, error, count = [], str(problem), None
        return Timing(arrival, tuple(times), error, count)

    return list(await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(load.arrivals()))))


async def _stream(host: str, port: int, body: bytes, begin: float) -> tuple[list[float], str, int | None]:
    """Return the times at which text arrived, an error message or "", and the number of tokens if the server reports
    that number. Text may arrive less often than tokens, because a token may be only a part of a character."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        writer.write(_head(host, "POST", "/v1/completions", body))
        status = (await reader.readline()).decode(errors="replace").strip()
        times: list[float] = []
        count, ended = None, False
        while line := await reader.readline():
            seconds = time.perf_counter() - begin
            if line.startswith(b"{") and " 200 " not in status:
                return times, line.decode(errors="replace")[:200], count
            if not line.startswith(b"data: "):
                continue
            ended = line.strip() == b"data: [DONE]"
            event = {} if ended else json.loads(line[len(b"data: ") :])
            if "error" in event:
                return times, str(event["error"])[:200], count
            if event.get("choices"):
                times.append(seconds)
            count = (event.get("usage") or {}).get("completion_tokens", count)
        return times, "" if ended and times else f"{status}: the answer has no end", count
    finally:
        writer.close()


# -- output


def table(rows: Sequence[ServingRow]) -> str:
    """Return a table with one line per rate. Times are given as median and 99th percentile, in milliseconds; the column
    `median s` has the median time of a whole request, in seconds."""
    head = f"{'rate':>8} {'requests':>8} {'failed':>6} {'tokens/s':>9} {'req/s':>7} {'first ms':>17} {'between ms':>17}"
    lines = [
        f"{head} {'median s':>8}",
        f"{'':>8} {'':>8} {'':>6} {'':>9} {'':>7} {'median      p99':>17} {'median      p99':>17}",
    ]
    for row in rows:
        rate = f"{row.rate:g}" if row.rate else "at once"
        times = " ".join(f"{1e3 * a:8.1f} {1e3 * b:8.1f}" for a, b in (row.first, row.between))
        lines.append(
            f"{rate:>8} {row.requests:>8} {row.failed:>6} {row.tokens_per_second:>9,.1f} "
            f"{row.requests_per_second:>7.2f} {times} {row.whole:>8.2f}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[ServingRow], title: str) -> str:
    """Return an SVG plot of throughput, and of the median and 99th percentile of both times, against the request
    rate."""
    rows = sorted(rows, key=lambda row: row.rate or float("inf"))

    def times(pairs: Sequence[tuple[float, float]]) -> dict[str, Series]:
        return {
            name: [(float(index), 1e3 * pair[percentile]) for index, pair in enumerate(pairs)]
            for percentile, name in enumerate(("median", "99th percentile"))
        }

    charts: Charts = {
        "time to first token, ms": times([row.first for row in rows]),
        "time between tokens, ms": times([row.between for row in rows]),
        "tokens a second": {"new": [(float(index), row.tokens_per_second) for index, row in enumerate(rows)]},
    }
    names = [f"{row.rate:g}" if row.rate else "at once" for row in rows]
    return svg(charts, Scale(over="rate", names=names), f"{title}, over requests a second")
